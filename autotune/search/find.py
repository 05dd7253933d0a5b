"""A whole search, from what was asked to the answer: the one path of the command line and of code.

It resolves the model, chooses the card, predicts, and measures where that is asked for. It prints nothing:
a Listener hears how far the work is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.errors import HardwareError, StorageError, WorkerError
from autotune.export.base.read import BaseRun
from autotune.records.answer import Summary
from autotune.records.measurement import BACKENDS
from autotune.records.question import FindOptions
from autotune.search import budget, predict_best, resolve
from autotune.search.dataset import Dataset
from autotune.search.listener import SILENT, Listener
from autotune.search.predict_best import Found
from autotune.search.resolve import Brought
from autotune.space import search_space
from autotune.store import optuna_study, stored_answers, study_names
from autotune.store.database import parse_url
from autotune.store.recommendations import question_of
from autotune.store.trace_table import TraceTable, table_of_prediction
from autotune.worker.client.forkserver import ForkServer


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

    Probes and traces are kept in the database `storage`, where later searches find them; a prediction
    keeps traces alone, where that database is there. `command` is what the study keeps of how it was
    made. `brought` has come with the question from another machine. `server` runs the probes; None: one
    of their own. Raises NotMeasuredError where the database fails what is to be measured.
    """
    parse_url(storage)  # an address that cannot be used is said before a search, not after it
    choose = budget.CHOOSERS.get(options.backend, budget.choose_card)
    card, gpu_reason, budget_bytes = choose(options.gpu, options.gpu_mem)
    if gpu_reason.startswith(f"{budget.FOUND};"):
        listener.note(f"{card.name}, {gpu_reason}")
    brought = brought or Brought()
    taken = resolve.read(options, card, budget_bytes, note=listener.note, brought=brought)
    source, workload, run, base = taken.source, taken.workload, taken.run, taken.base
    data = None
    if options.dataset is not None and brought.lengths is None:
        data = Dataset(
            path=options.dataset,
            text_field=options.text_field,
            tokenizer=options.tokenizer or source.folder_or_id,
        )
    if options.backend == "auto":
        is_here = gpu_reason.startswith(budget.FOUND) and workload.num_gpus == 1
        measure_on = "cuda" if is_here else None
    else:
        measure_on = options.backend if options.backend in BACKENDS else None
    trains_elsewhere = measure_on is None and run is not None and run.target is not None
    with listener.searching() as progress:
        found = predict_best.find(
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
            traces_table=table_of_prediction(storage)
            if measure_on is None
            else TraceTable(storage),
        )
    # Only a planned card follows from the budget; another one needs a study of its own.
    is_planned = not gpu_reason.startswith((budget.NAMED, budget.FOUND, budget.ON_CPU))
    name = study_names.default_study_name(workload, gpu=None if is_planned else card.name)
    own_values = search_space.unlisted(taken.space, workload.methods)
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
    from autotune.search import measure_best

    measured_name = f"{name}-measured"
    try:
        measured = measure_best.measured(
            found,
            source,
            options,
            data=data,
            backend=measure_on,
            study=optuna_study.open_study(
                storage,
                options.study or measured_name,
                workload=found.summary.workload,
                gpu=found.summary.gpu,
                command=command,
                versions=stored_answers.library_versions(),
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
