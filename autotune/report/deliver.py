"""An answer delivered: its files in a folder, its study and its recommendation in the database."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import AutotuneError, ConfigError, StorageError
from autotune.report import html
from autotune.report.answer_files import AnswerFiles
from autotune.report.data import collect
from autotune.report.files import write
from autotune.report.terminal import REPORT
from autotune.search.find import Finding
from autotune.store import optuna_study, predicted_trials, stored_answers
from autotune.store.database import damage_explained, parse_url
from autotune.store.recommendations import (
    Recommendation,
    open_recommendations,
    question_key,
    reason_for,
)

MAX_TRIALS_OF_PAGE = 1000
"""Reading and drawing so many takes under a second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivered:
    """A record of what was written of an answer."""

    result: dict[str, Any]
    """The object of `find --json`."""
    files: list[Path]
    """Files that a trainer loads."""
    study: str
    """Empty where none was kept."""
    report: Path | None
    """None where there is no folder or no study to draw, or the study is too large to read in passing:
    `autotune report` draws it then."""
    problems: list[AutotuneError]
    """Errors that kept something from being written; the answer is not lost by them."""
    notes: tuple[str, ...] = ()
    """Changes in the user's own file, in words."""
    command: str = ""
    """Command that trains with the user's edited file; empty where train.py does."""
    unsaid: Mapping[str, tuple[str, ...]]
    """Settings that some of the files do not carry, and which; each file says at its top what it is."""


def deliver(
    finding: Finding,
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
    answered = AnswerFiles.of(finding.answer, folder=folder, run=finding.run)
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
            page = _record(finding, result, storage=storage, command=command, draws=bool(files))
            study = finding.study
            _recommend(finding, storage=storage, reason=reason)
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
        command=answered.command if files else "",
        unsaid=answered.unsaid,
    )


def _record(
    finding: Finding, result: dict[str, Any], *, storage: str, command: str, draws: bool
) -> str | None:
    """Keep the answer in its study. The page of its report, where that is wanted and quick."""
    answer = finding.answer
    with (
        optuna_study.open_study(
            storage,
            finding.study,
            workload=answer.workload,
            gpu=answer.gpu,
            command=command,
            versions=stored_answers.library_versions(),
            alone=True,  # Of two at once, the second one finds the first one's trials.
        ) as opened,
        damage_explained(parse_url(storage)),
    ):
        # A study of measurements holds nothing else.
        if answer.measured is None:
            predicted_trials.record_estimates(
                opened,
                finding.considered,
                budget_bytes=answer.workload.memory_budget_bytes,
                headroom=answer.workload.headroom,
                host_memory_bytes=answer.workload.host_memory_bytes,
                space=answer.space,
            )
        stored_answers.keep(opened, answer, finding.details, files=result["files"], command=command)
        trials = stored_answers.trials_of(opened) if draws else []
        if not 0 < len(trials) <= MAX_TRIALS_OF_PAGE:
            return None
        data = collect(stored_answers.answer_of(opened), trials)
    # Out there, where a mistake of ours is not taken for damage to the database.
    return html.draw(data)


def _recommend(finding: Finding, *, storage: str, reason: str) -> None:
    """Keep the answer beside those that were given to the question before."""
    answer, question = finding.answer, dict(finding.question)
    final = None if answer.measured is None else answer.measured.final
    now = Recommendation(
        question_key=question_key(question),
        question=question,
        device=answer.gpu if final is None else final.fingerprint.device,
        fingerprint=None if final is None else final.fingerprint,
        made_at=datetime.datetime.now(datetime.UTC),
        study=finding.study,
        evidence=answer.evidence,
        tokens_per_second=answer.tokens_per_second,
        spread=None if final is None else final.spread,
        peak_device_bytes=answer.peak_device_bytes,
        config=answer.exported.to_dict(),
        result={},
        reason=reason,
    )
    with open_recommendations(storage) as table:
        if not reason:
            last = table.latest(now.question_key, now.device)
            now = dataclasses.replace(now, reason=reason_for(last, now))
        table.add(now)
