"""Stored answers side by side: the differences between their questions and between the answers.

A record, and the table that is drawn of it. Predicted and measured figures have rows of their own: a
gain is one of predictions over a prediction, or of measurements over a measurement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.common import json_records
from autotune.common.units import counted, format_bytes
from autotune.records.estimate import Estimate
from autotune.records.measurement import Measurement
from autotune.space.knobs import KNOBS
from autotune.space.words import describe
from autotune.store.stored_answers import StoredAnswer

_MISSING = "-"


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Speed and memory of each answer, all predicted or all measured; None where that was not done."""

    tokens_per_second: tuple[float | None, ...]
    memory_bytes: tuple[int | None, ...]
    """Bytes that have to be on the card at the peak, without paged state that gives way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The differences between answers, a value per study in each row."""

    studies: tuple[str, ...]
    answers: tuple[str, ...]
    """The configurations, in words."""
    speed_units: tuple[str, ...]
    """The units of their speeds."""
    question: dict[str, tuple[Any, ...]]
    """Model and budget; beside them what else differs of the workload, the card, the space and the class
    allowed."""
    settings: dict[str, tuple[Any, ...]]
    """Fields of TrainConfig that differ, in their knobs' words."""
    predicted: Figures
    measured: Figures
    measured_on: tuple[str | None, ...]
    versions: dict[str, tuple[str | None, ...]]
    """Versions of the libraries that differ."""

    def to_dict(self) -> dict[str, object]:
        """The object of `studies compare --json`."""
        values: dict[str, Any] = json_records.plain(self)
        values["measured"]["device"] = values.pop("measured_on")
        return values


def compare(stored: Sequence[StoredAnswer]) -> Comparison:
    """The answers of several studies, each against the others."""
    answers = [each.answer for each in stored]
    asked = [
        {
            **answer.workload.to_dict(),
            "gpu": answer.gpu,
            "space": answer.space,
            "allow": answer.allow,
        }
        for answer in answers
    ]
    configs = [answer.best.config for answer in answers]
    found = [None if s.measured is None else s.measured.final for s in answers]
    return Comparison(
        studies=tuple(each.study for each in stored),
        answers=tuple(map(describe, configs)),
        speed_units=tuple(config.speed_unit for config in configs),
        question=_differing(asked, always=("model", "memory_budget_bytes")),
        settings={
            name: tuple(_said(name, value) for value in values)
            for name, values in _differing([config.to_dict() for config in configs]).items()
        },
        predicted=_figures([answer.best for answer in answers]),
        measured=_figures(found),
        measured_on=tuple(None if m is None else m.fingerprint.device for m in found),
        versions=_differing([each.versions for each in stored]),
    )


def _differing(
    records: Sequence[Mapping[str, Any]], always: Sequence[str] = ()
) -> dict[str, tuple[Any, ...]]:
    """The values of each key that is in `always`, or whose values differ."""
    keys = dict.fromkeys([*always, *(key for record in records for key in record)])
    rows = {key: tuple(record.get(key) for record in records) for key in keys}
    return {
        key: values
        for key, values in rows.items()
        if key in always or any(value != values[0] for value in values)
    }


def _said(name: str, value: Any) -> Any:
    """The value of a setting in its knob's words; None where the configuration has no such setting."""
    return KNOBS[name].words(value) if name in KNOBS and value is not None else value


def _figures(found: Sequence[Estimate | Measurement | None]) -> Figures:
    return Figures(
        tokens_per_second=tuple(None if f is None else f.tokens_per_second for f in found),
        memory_bytes=tuple(map(_memory, found)),
    )


def _memory(found: Estimate | Measurement | None) -> int | None:
    if isinstance(found, Estimate):
        return found.resident_bytes
    return None if found is None else found.peak_device_bytes


def rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """The rows of the table: a label and a text per study in each."""
    texts = [("study", *comparison.studies)]
    for name, values in comparison.question.items():
        say = _size if name.endswith("_bytes") else _text
        texts.append((_label(name), *map(say, values)))
    texts.append(("answer", *comparison.answers))
    texts += [
        (f"  {_label(name)}", *map(_text, values))
        for name, values in comparison.settings.items()
        if name not in comparison.question  # It stands there.
    ]
    for evidence, figures in (
        ("predicted", comparison.predicted),
        ("measured", comparison.measured),
    ):
        speeds, peaks = figures.tokens_per_second, figures.memory_bytes
        if any(speed is not None for speed in speeds):
            heading, said = headed(speeds, comparison.speed_units)
            gains = _gains(speeds, comparison.speed_units)
            said = [f"{text or _MISSING}{gain}" for text, gain in zip(said, gains, strict=True)]
            texts.append((f"{evidence} {heading}", *said))
            texts.append((f"{evidence} memory", *map(_size, peaks)))
    if any(comparison.measured_on):
        texts.append(("measured on", *map(_text, comparison.measured_on)))
    return texts + [(name, *map(_text, values)) for name, values in comparison.versions.items()]


def _label(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ")


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        if "num_samples" not in value:
            return "given"
        mean_tokens = value["num_tokens"] / value["num_samples"]
        return f"{counted(value['num_samples'], 'sample')}, {mean_tokens:,.0f} tokens on average"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return _MISSING if value is None else str(value)


def _size(size_bytes: int | None) -> str:
    return _MISSING if size_bytes is None else format_bytes(size_bytes)


def headed(speeds: Sequence[float | None], units: Sequence[str | None]) -> tuple[str, list[str]]:
    """The heading of speeds, and each as a text, empty where there is none.

    Their unit heads them; where they have several, each says its own.
    """
    own = {unit for speed, unit in zip(speeds, units, strict=True) if speed is not None}
    texts = ["" if speed is None else f"{speed:,.0f}" for speed in speeds]
    if len(own) < 2:
        return next(iter(own), None) or "tokens/s", texts
    return "speed", [
        f"{text} {unit}" if text else "" for text, unit in zip(texts, units, strict=True)
    ]


def _gains(speeds: Sequence[float | None], units: Sequence[str]) -> list[str]:
    """The gain of each over the first study's of the same evidence, in words, where the unit is the same."""
    first, *_ = speeds
    return [
        f" ({100 * (speed / first - 1):+.0f} %)"
        if number and first and speed and unit == units[0]
        else ""
        for number, (speed, unit) in enumerate(zip(speeds, units, strict=True))
    ]
