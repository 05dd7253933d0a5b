"""What a report draws beside a Summary: memory over a step, and the way from the base to the answer.

All of it is predicted. Computed once, by the search that has the traces, and kept with the study.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from autotune.common import json_records

MAX_POINTS = 200
"""Of a Timeline: more than a chart has room for, and few enough for a row of a database (64 KiB)."""
MIN_POINTS_OF_PHASE = 16
"""Where it has as many events: a short phase is to be seen."""
MAX_PRICED = 600
"""Points of the space."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Bytes alive during the optimizer step in which the replay peaks; 512 B blocks.

    A point is the fullest instant of a stretch of allocations and frees; there is no clock in it.
    """

    phases: dict[str, int]
    """Name -> its first point, in order."""
    bytes_by_category: dict[str, tuple[int, ...]]
    """allocator.CATEGORIES -> a figure per point."""
    peak_point: int
    """Where allocated memory peaks."""

    @property
    def num_points(self) -> int:
        return len(next(iter(self.bytes_by_category.values())))

    def at(self, point: int) -> int:
        """All that is alive there."""
        return sum(values[point] for values in self.bytes_by_category.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A configuration on the way from the base to the answer."""

    changed: dict[str, object]
    """Fields of TrainConfig that differ from the step before; empty at the start."""
    tokens_per_second: float
    peak_device_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Details:
    answer: Timeline
    base: Timeline | None
    """None where the base could not be traced."""
    path: tuple[Step, ...]
    """One change at a time where what lies between was traced, the base first; empty without a base,
    or where the base is the answer."""
    priced: tuple[tuple[float, int], ...]
    """(tokens per second, device bytes at least) of points that were priced: a sample of all."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def details_from_dict(values: Any) -> Details:
    """Read Details.to_dict back, from JSON as well. Raises ValueError, which names the field."""
    fields = dict(json_records.mapping(values, "details"))
    fields["answer"] = _timeline(fields.get("answer"), "answer")
    if fields.get("base") is not None:
        fields["base"] = _timeline(fields["base"], "base")
    fields["path"] = tuple(
        json_records.record(Step, step, "path") for step in fields.get("path") or ()
    )
    fields["priced"] = tuple((float(x), int(y)) for x, y in fields.get("priced") or ())
    details: Details = json_records.record(Details, fields, "details")
    return details


def _timeline(values: Any, what: str) -> Timeline:
    fields = dict(json_records.mapping(values, what))
    by_category = json_records.mapping(fields.get("bytes_by_category"), f"{what}.bytes_by_category")
    fields["bytes_by_category"] = {
        name: tuple(map(int, figures)) for name, figures in by_category.items()
    }
    timeline: Timeline = json_records.record(Timeline, fields, what)
    lengths = {len(figures) for figures in timeline.bytes_by_category.values()}
    if len(lengths) != 1 or not 0 <= timeline.peak_point < min(lengths):
        raise ValueError(f"{what}: its figures are not of the same points")
    return timeline
