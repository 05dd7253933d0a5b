"""Rows of an answer's table of trade-off classes, as the terminal and a report draw them."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.common.user_text import printable
from autotune.records.answer import Answer
from autotune.records.estimate import Estimate
from autotune.records.measurement import Measurement
from autotune.report import words
from autotune.space.words import describe

_MEANINGS = {
    "exact": "the mathematics of the base",
    "numerics": "other rounding",
    "recipe": "another training run",
}
_FURTHER = ("further", "another run that gives up more")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassRow:
    """The best configuration of a trade-off class: measured where one of the class was, else predicted."""

    name: str
    meaning: str
    entry: str
    tokens_per_second: float | None = None
    resident_bytes: int | None = None
    against_answer: str = ""


def class_rows(answer: Answer) -> tuple[ClassRow, ...]:
    """The best of each class, the lowest first, and what further trades would bring."""
    rows = [
        _row(answer, name, meaning, answer.best_by_class.get(name))
        for name, meaning in _MEANINGS.items()
    ]
    if answer.further is not None:
        rows.append(_row(answer, *_FURTHER, answer.further))
    return tuple(rows)


def _row(answer: Answer, name: str, meaning: str, estimate: Estimate | None) -> ClassRow:
    found = answer.measured
    if estimate is None:
        entry = "none in this space" if name in answer.classes_outside else "none fits"
        return ClassRow(name=name, meaning=meaning, entry=entry)
    if found is not None and estimate.config == answer.best.config:
        return _measured(name, meaning, "the answer", found.final)
    if found is not None and name in found.of_classes:
        return _measured(name, meaning, "", found.of_classes[name], found.final)
    is_answer = estimate.config == answer.best.config
    return ClassRow(
        name=name,
        meaning=meaning,
        entry="the answer" if is_answer else _predicted(estimate, is_marked=found is not None),
        tokens_per_second=estimate.tokens_per_second,
        resident_bytes=estimate.resident_bytes,
        against_answer="" if is_answer else words.gain(estimate, answer.best),
    )


def _measured(
    name: str, meaning: str, entry: str, shown: Measurement, answer: Measurement | None = None
) -> ClassRow:
    how = "measured" if shown.fits else "measured until it was stopped as slower"
    return ClassRow(
        name=name,
        meaning=meaning,
        entry=printable(f"{entry or describe(shown.config)}; {how}"),
        tokens_per_second=shown.tokens_per_second,
        resident_bytes=shown.peak_device_bytes,
        against_answer="" if answer is None else words.gain(shown, answer),
    )


def _predicted(estimate: Estimate, *, is_marked: bool) -> str:
    said, count = describe(estimate.config), estimate.parameters
    if count.trainable < count.total:
        share = 100 * count.trainable / count.total
        said += f"; trains {share:.{1 if share >= 0.1 else 2}f} % of the weights"
    return printable(said + "; predicted" * is_marked)
