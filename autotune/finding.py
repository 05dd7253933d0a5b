"""A whole search, from what was asked to the files: the one path of the command line and of code.

`find` resolves the model, chooses the card, predicts, and measures where that is asked for; `deliver`
writes the answer's files and its study. Neither prints: a Listener hears how far the work is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from autotune import inputs, reading, space, store, studies, study_names, study_trials, tune
from autotune.answer_files import AnswerFiles
from autotune.dataset import Dataset
from autotune.errors import AutotuneError, ConfigError, HardwareError, StorageError, WorkerError
from autotune.export.read import BaseRun
from autotune.forkserver import ForkServer
from autotune.measurement import BACKENDS
from autotune.optimizers import OPTIMIZERS
from autotune.options import FindOptions
from autotune.reading import Brought
from autotune.recommendations import (
    Recommendation,
    open_recommendations,
    question_key,
    question_of,
    reason_for,
)
from autotune.report import html
from autotune.report.data import collect
from autotune.report.files import write
from autotune.report.progress import SILENT, Listener
from autotune.summary import Summary
from autotune.trace_table import TraceTable
from autotune.tune import Found

REPORT = "report.html"
MAX_TRIALS_OF_PAGE = 1000
"""Reading and drawing so many takes under a second."""

_LIBRARIES = ("autotune", "torch", "transformers", "peft", "optuna", "liger-kernel", "trl")
"""And those of the optimizers, bitsandbytes among them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a search found, and what its study is called."""

    found: Found
    study: str
    folder_name: str
    """The study's name, as a folder may have it."""
    run: BaseRun | None = None
    """What the user trains with so far."""
    question: Mapping[str, Any] = field(default_factory=dict)
    """What was asked, as recommendations.question_of says it."""

    @property
    def summary(self) -> Summary:
        return self.found.summary


class NotMeasuredError(StorageError):
    """The database failed what was to be measured; the answer by the prediction is not lost by it."""

    def __init__(self, error: StorageError, predicted: Answer) -> None:
        self.predicted = predicted
        super().__init__(error.what, error.why, error.remedy)


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivered:
    """What was written of an answer."""

    result: dict[str, Any]
    """The object of `find --json`."""
    files: list[Path]
    """That a trainer loads."""
    study: str
    """Empty where none was kept."""
    report: Path | None
    """None where there is no folder or no study to draw, or the study is too large to read in passing:
    `autotune report` draws it then."""
    problems: list[AutotuneError]
    """What could not be written; the answer is not lost by it."""
    notes: tuple[str, ...] = ()
    """What was changed in the user's own file, in words."""
    unsaid: Mapping[str, tuple[str, ...]]
    """Settings that some of the files do not carry, and which; each file says at its top what it is."""


def find(
    options: FindOptions,
    *,
    storage: str,
    command: str = "",
    listener: Listener = SILENT,
    brought: Brought | None = None,
    server: ForkServer | None = None,
) -> Answer:
    """Answer what was asked; whatever it cannot answer is an AutotuneError.

    Probes are kept in the database `storage`, where later searches find them; a prediction leaves it
    alone. `command` is what the study keeps of how it was made. `brought` has come with the question from
    another machine. `server` runs the probes; None: one of their own. Raises NotMeasuredError where the
    database fails what is to be measured.
    """
    if (options.num_gpus or 1) > 1 and options.backend in BACKENDS:
        raise ConfigError(
            f"--num-gpus {options.num_gpus} does not go with --backend {options.backend}",
            why="Probes run on one GPU",
            remedy="Leave --backend out, for a prediction",
        )
    choose = inputs.CHOOSERS.get(options.backend, inputs.choose_card)
    card, gpu_reason, budget_bytes = choose(options.gpu, options.gpu_mem)
    if gpu_reason.startswith(f"{inputs.FOUND};"):
        listener.note(f"{card.name}, {gpu_reason}")
    brought = brought or Brought()
    taken = reading.read(options, card, budget_bytes, note=listener.note, brought=brought)
    source, workload, run, base = taken.source, taken.workload, taken.run, taken.base
    data = None
    if options.dataset is not None and brought.lengths is None:
        data = Dataset(
            path=options.dataset,
            text_field=options.text_field,
            tokenizer=options.tokenizer or source.folder_or_id,
        )
    if options.backend == "auto":
        is_here = gpu_reason.startswith(inputs.FOUND) and workload.num_gpus == 1
        measure_on = "cuda" if is_here else None
    else:
        measure_on = options.backend if options.backend in BACKENDS else None
    trains_elsewhere = measure_on is None and run is not None and run.target is not None
    with listener.searching() as progress:
        found = tune.find(
            source,
            workload,
            taken.space,
            card,
            gpu_reason=gpu_reason,
            allow=options.allow,
            base=base,
            has=base if trains_elsewhere else None,
            effort=options.effort,
            progress=progress,
            # A prediction leaves the database alone.
            traces_table=None if measure_on is None else TraceTable(storage),
        )
    # Only a planned card follows from the budget; another one needs a study of its own.
    is_planned = not gpu_reason.startswith((inputs.NAMED, inputs.FOUND, inputs.ON_CPU))
    name = study_names.default_study_name(workload, gpu=None if is_planned else card.name)
    own_values = space.unlisted(taken.space, workload.methods)
    if options.peft is not None:
        own_values.pop("peft", None)
        name += f"-{hashlib.sha256(options.peft.encode()).hexdigest()[:6]}"
    if own_values:
        name += f"-{hashlib.sha256(json.dumps(own_values).encode()).hexdigest()[:6]}"

    def answered(found: Found, name: str) -> Answer:
        return Answer(
            found=found,
            study=options.study or name,
            folder_name=name if options.study is None else study_names.folder_of(options.study),
            run=run,
            question=question_of(options),
        )

    if measure_on is None:
        for option, value in (
            ("--confirm-steps", options.confirm_steps),
            ("--train-steps", options.train_steps),
        ):
            if value is not None:
                listener.note(
                    f"{option} says nothing to a prediction: --backend cuda or cpu measures."
                )
        return answered(found, name)
    # Optuna's samplers come with it, which a prediction does without.
    from autotune import measure

    measured_name = f"{name}-measured"
    try:
        measured = measure.measured(
            found,
            source,
            options,
            data=data,
            backend=measure_on,
            study=store.open_study(
                storage,
                options.study or measured_name,
                workload=found.summary.workload,
                gpu=found.summary.gpu,
                command=command,
                versions=_versions(),
                has_heartbeats=True,
            ),
            storage=storage,
            listener=listener,
            server=server,
        )
    except StorageError as error:
        raise NotMeasuredError(error, answered(found, name)) from error
    except (HardwareError, WorkerError) as error:
        if options.backend != "auto":
            raise
        listener.note(f"nothing could be measured, so the answer is predicted. {error}")
        return answered(found, name)
    return answered(measured, measured_name)


def deliver(
    answer: Answer,
    *,
    folder: Path | None,
    storage: str | None,
    command: str = "",
    reason: str = "",
) -> Delivered:
    """Write the answer's files into a folder and record it in its study, where they are given.

    It becomes a recommendation, too: `reason` is why, where that is known better than by comparing it
    with the last one.
    """
    answered = AnswerFiles.of(answer.summary, folder=folder, run=answer.run)
    result = answered.result
    problems: list[AutotuneError] = []
    files: list[Path] = []
    notes: tuple[str, ...] = ()
    try:
        files = answered.write()
        notes = answered.notes
    except StorageError as error:
        problems.append(error)
    study, report = "", None
    if storage is not None:
        try:
            page = _record(answer, result, storage=storage, command=command, draws=bool(files))
            study = answer.study
            _recommend(answer, result, storage=storage, reason=reason)
            if page is not None and folder is not None:
                report = folder / REPORT
                write(report, page)
        except (ConfigError, StorageError) as error:
            problems.append(error)
    return Delivered(
        result=result,
        files=files,
        study=study,
        report=report,
        problems=problems,
        notes=notes,
        unsaid=answered.unsaid,
    )


def _record(
    answer: Answer, result: dict[str, Any], *, storage: str, command: str, draws: bool
) -> str | None:
    """Keep the answer in its study. The page of its report, where that is wanted and quick."""
    summary = answer.summary
    with store.open_study(
        storage,
        answer.study,
        workload=summary.workload,
        gpu=summary.gpu,
        command=command,
        versions=_versions(),
    ) as opened:
        # A study of measurements holds nothing else.
        if summary.measured is None:
            study_trials.record_estimates(
                opened,
                answer.found.considered,
                budget_bytes=summary.workload.memory_budget_bytes,
                space=summary.space,
            )
        opened.set_user_attr(studies.RESULT, result)
        opened.set_user_attr(studies.DETAILS, answer.found.details(summary).to_dict())
        # A study may have been begun by another command: its latest answer is this one's.
        opened.set_user_attr(studies.COMMAND, command)
        opened.set_user_attr(studies.VERSIONS, _versions())
        trials = opened.get_trials(deepcopy=False) if draws else []
        if not 0 < len(trials) <= MAX_TRIALS_OF_PAGE:
            return None
        return html.draw(collect(studies.answer_of(opened), trials))


def _recommend(answer: Answer, result: dict[str, Any], *, storage: str, reason: str) -> None:
    """Keep the answer beside those that were given to the question before."""
    summary, question = answer.summary, dict(answer.question)
    final = None if summary.measured is None else summary.measured.final
    now = Recommendation(
        question_key=question_key(question),
        question=question,
        device=summary.gpu if final is None else final.fingerprint.device,
        fingerprint=None if final is None else final.fingerprint,
        made_at=datetime.datetime.now(datetime.UTC),
        study=answer.study,
        evidence=summary.evidence,
        tokens_per_second=summary.tokens_per_second,
        spread=None if final is None else final.spread,
        peak_device_bytes=summary.peak_device_bytes,
        config=summary.exported.to_dict(),
        result=result,
        reason=reason,
    )
    with open_recommendations(storage) as table:
        if not reason:
            last = table.latest(now.question_key, now.device)
            now = dataclasses.replace(now, reason=reason_for(last, now))
        table.add(now)


def _versions() -> dict[str, str]:
    """Versions of the libraries that a prediction depends on, those that are installed."""
    versions = {}
    for name in (*_LIBRARIES, *sorted({row.needs for row in OPTIMIZERS.values() if row.needs})):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions
