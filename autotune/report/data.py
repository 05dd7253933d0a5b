"""The record of a report: a study's answer, its details and its trials, ready to be drawn.

report.html and report.markdown draw it; `to_dict` is `autotune report --format json`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotune.common import json_records
from autotune.common.units import format_bytes
from autotune.common.user_text import printable
from autotune.records.measurement import measurement_from_dict
from autotune.space.config import TrainConfig
from autotune.space.tradeoffs import tradeoff_class
from autotune.space.words import describe
from autotune.store.predicted_trials import OVER_BUDGET, PAGED_IN, SPACE
from autotune.store.stored_answers import StoredAnswer, load_with_trials

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

FITS, DOES_NOT_FIT = "fits", "does not fit"
"""Outcomes of predictions; those of measurements are measurement.OUTCOMES."""
NOT_FINISHED = "not finished"
"""Outcome of a probe that was broken off, or is running."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialRow:
    """One trial of the study."""

    number: int
    evidence: str
    """The kind of the figures below that do not say it: `predicted` or `measured`."""
    outcome: str
    tradeoff: str
    """Trade-off class against the base; empty where the configuration cannot be read."""
    config: str
    tokens_per_second: float | None
    peak_device_bytes: int | None
    paged_in_bytes: int = 0
    """Part of a predicted peak that is paged state: it gives way."""
    predicted_tokens_per_second: float | None = None
    """Predicted speed of a measured trial, where it was kept."""
    predicted_peak_device_bytes: int | None = None
    reason: str = ""
    """The reason of the outcome."""
    space: str = ""
    """Name of the space whose search added the trial, where that is not the answer's space."""
    is_answer: bool = False
    is_frontier: bool = False
    """Whether nothing faster needs less memory, among the trials that fit and have the same evidence."""

    @property
    def resident_bytes(self) -> int | None:
        """Bytes of the peak that have to be on the device, as far as is known."""
        return (
            None if self.peak_device_bytes is None else self.peak_device_bytes - self.paged_in_bytes
        )

    @property
    def remark(self) -> str:
        """The reason of the outcome, and the space where it is another one."""
        return "; ".join(filter(None, (self.reason, self.space and f"of the space {self.space}")))


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportData:
    """A study's answer and its trials, ready to be drawn."""

    stored: StoredAnswer
    trials: tuple[TrialRow, ...]

    def to_dict(self) -> dict[str, object]:
        """The object of `autotune report --format json`."""
        details = self.stored.details
        return {
            "study": self.stored.study,
            "command": self.stored.command,
            "versions": self.stored.versions,
            "result": self.stored.result,
            "details": None if details is None else json_records.plain(details),
            "trials": [dataclasses.asdict(row) for row in self.trials],
        }


def read(url: str, name: str) -> ReportData:
    """Read the record of a stored study.

    Raises ConfigError for one without an answer, and StorageError.
    """
    return collect(*load_with_trials(url, name))


def collect(stored: StoredAnswer, trials: Iterable[FrozenTrial]) -> ReportData:
    """Make the record of a report from an answer and its trials."""
    rows = [_row(trial, stored) for trial in trials]
    frontier = _frontier(rows)
    return ReportData(
        stored=stored,
        trials=tuple(
            dataclasses.replace(row, is_frontier=True) if row.number in frontier else row
            for row in rows
        ),
    )


def _row(trial: FrozenTrial, stored: StoredAnswer) -> TrialRow:
    attributes, answer = trial.user_attrs, stored.answer
    try:
        config = json_records.read(TrainConfig, attributes.get("config"), "config")
        figures = (_measured if "measurement" in attributes else _predicted)(
            attributes, answer.workload.memory_budget_bytes
        )
        is_answer = config == answer.best.config and figures["evidence"] == answer.evidence
        space = str(attributes.get(SPACE, ""))
        row = {
            "number": trial.number,
            "tradeoff": tradeoff_class(config, answer.base),
            "config": printable(describe(config)),
            "space": "" if is_answer or space == answer.space else printable(space),
            "is_answer": is_answer,
            **figures,
        }
        return json_records.read(TrialRow, row, "trial")
    except (KeyError, TypeError, ValueError) as error:
        is_unfinished = "config" not in attributes
        return TrialRow(
            number=trial.number,
            evidence="measured" if is_unfinished else str(attributes.get("evidence")),
            outcome=NOT_FINISHED if is_unfinished else "unreadable",
            tradeoff="",
            config="",
            tokens_per_second=None,
            peak_device_bytes=None,
            reason=str(attributes.get("outcome", "")) if is_unfinished else printable(str(error)),
        )


def _predicted(attributes: Mapping[str, Any], budget_bytes: int) -> dict[str, Any]:
    peak_bytes = attributes["peak_device_bytes"]
    excess_bytes = peak_bytes - attributes.get(PAGED_IN, 0) - budget_bytes
    reason = f"{format_bytes(excess_bytes)} over the budget" if excess_bytes > 0 else ""
    if not reason and attributes.get(OVER_BUDGET, 0) > 0:
        reason = "leaves too little room"
    return {
        "evidence": "predicted",
        "outcome": DOES_NOT_FIT if reason else FITS,
        "tokens_per_second": attributes["tokens_per_second"],
        "peak_device_bytes": peak_bytes,
        "paged_in_bytes": attributes.get(PAGED_IN, 0),
        "reason": reason,
    }


def _measured(attributes: Mapping[str, Any], _: int) -> dict[str, Any]:
    measurement = measurement_from_dict(attributes["measurement"])
    problem = "" if measurement.fits else measurement.message or measurement.problem
    return {
        "evidence": "measured",
        "outcome": measurement.outcome,
        "tokens_per_second": measurement.tokens_per_second,
        "peak_device_bytes": measurement.peak_device_bytes,
        "predicted_tokens_per_second": attributes.get("predicted_tokens_per_second"),
        "predicted_peak_device_bytes": attributes.get("predicted_peak_device_bytes"),
        "reason": printable(problem),
    }


def _frontier(rows: Iterable[TrialRow]) -> set[int]:
    """Numbers of the trials that nothing of their evidence beats in both speed and memory."""
    found: set[int] = set()
    fitting = [row for row in rows if row.outcome in (FITS, "ok") and not row.reason]
    for evidence in ("predicted", "measured"):
        fastest = float("-inf")
        of_evidence = (
            (row.resident_bytes, -row.tokens_per_second, row.number)
            for row in fitting
            if row.evidence == evidence
            and row.resident_bytes is not None
            and row.tokens_per_second is not None
        )
        for _, negative_speed, number in sorted(of_evidence):
            if -negative_speed > fastest:
                fastest = -negative_speed
                found.add(number)
    return found
