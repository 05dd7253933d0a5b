"""History of a cell's nights on this machine, oldest first, and the level that drift is measured against."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autotune.common import json_records
from autotune.nightly import drift
from autotune.records.fingerprint import Fingerprint
from autotune.space.config import TrainConfig

NEW = "new"
"""The first answer of a cell on a machine; the other kinds are drift's."""
MAX_NIGHTS = 60
"""Most nights that a judgement looks back on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Night:
    """A night of one cell. Everything in it was measured."""

    made_at: str
    """Time in ISO 8601, UTC."""
    kind: str
    """Kind of the night: NEW, or what drift.judge said."""
    reason: str
    """Reason for the kind, in words."""
    fingerprint: Fingerprint
    """Fingerprint of the measurements."""
    config: TrainConfig
    """The answer that stands after this night."""
    tokens_per_second: tuple[float, ...]
    """Tokens per second of that answer, one figure per process of this night."""
    peak_device_bytes: int | None
    has_searched: bool
    """Whether a search ran. False: the standing answer was measured again, and that was all."""
    is_replaced: bool = False
    """Whether another configuration took the standing one's place."""
    change: float | None = None
    """Change against the nights before, as a share."""
    low: float | None = None
    high: float | None = None
    num_nights: int = 1
    """Number of nights that decided together."""
    useful_share: float = 1.0
    """Share of the tokens that is no padding; part of tokens_per_second."""
    study: str = ""
    elapsed_seconds: float = 0.0

    @property
    def speed(self) -> float:
        """Geometric mean of the tokens per second of the night's processes."""
        return statistics.geometric_mean(self.tokens_per_second)

    @property
    def spread(self) -> float | None:
        """Relative standard deviation between the night's processes; None with one alone."""
        if len(self.tokens_per_second) < 2:
            return None
        return statistics.stdev(self.tokens_per_second) / statistics.fmean(self.tokens_per_second)

    @property
    def at(self) -> datetime.datetime:
        return datetime.datetime.fromisoformat(self.made_at)


def night_from_dict(values: Any) -> Night:
    """Read a Night back from JSON. Raises ValueError, which names the field."""
    night = json_records.read(Night, values, "a night")
    if not night.tokens_per_second or not all(
        0 < speed < 1e15 for speed in night.tokens_per_second
    ):
        raise ValueError("tokens_per_second is no list of speeds")
    datetime.datetime.fromisoformat(night.made_at)
    return night


def levels(nights: Sequence[Night]) -> tuple[drift.Level, list[list[tuple[float, ...]]]]:
    """Return the level that stands, and those before it, which are about the noise alone."""
    earlier: list[list[tuple[float, ...]]] = []
    baseline: list[tuple[float, ...]] = []
    suspects: list[tuple[float, ...]] = []
    bad: list[tuple[float, ...]] = []
    for night in nights:
        speeds = night.tokens_per_second
        if night.kind == drift.SUSPECT:
            bad, suspects = [*bad, *suspects], [speeds]
        elif night.kind == drift.UNCHANGED:
            baseline, bad, suspects = [*baseline, speeds], [*bad, *suspects], []
        else:
            is_confirmed = night.num_nights > 1
            if baseline:
                earlier.append([*baseline, *bad, *([] if is_confirmed else suspects)])
            baseline, bad = [*(suspects if is_confirmed else []), speeds], []
            suspects = []
    level = drift.Level(baseline=tuple(baseline), suspects=tuple(suspects), bad=tuple(bad))
    return level, earlier
