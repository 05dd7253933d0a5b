"""Calibration: what was measured on one card, the rates that follow, and how far off they are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from autotune.catalogue.nvml import CardIdentity
from autotune.catalogue.own_rates import OwnRates
from autotune.common import json_records
from autotune.records.fingerprint import Fingerprint
from autotune.speed.calibration import Residual, TimedKernel

VERSION = 1
"""Version of the record; one of another version is not used."""

MOST_WAITED = 0.1
"""HostTimes.waited beyond which they are not this machine's. [judgement] On two cores it was 0.002 alone, and
0.24 to 0.60 with one to four busy processes beside, when an operation took 1.5 to 3.3 times as long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostTimes:
    """Times of operations on a host, and how much others were in its way."""

    seconds: dict[str, float]
    """Seconds on one operation, by phase; empty where that was not timed."""
    waited: float
    """Share of the time in which other processes had the processor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Skipped:
    """A kernel that was not timed."""

    name: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """One run of `autotune calibrate`; without kernels, what a search has timed of the host."""

    version: int = VERSION
    made_on: str
    """The day, as 2026-11-23."""
    card: CardIdentity
    fingerprint: Fingerprint
    rates: OwnRates
    residuals: tuple[Residual, ...]
    """Errors by kind, of the kernels that the rates were fitted to."""
    timed: tuple[TimedKernel, ...]
    skipped: tuple[Skipped, ...] = ()
    host_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds that the host spends on an operation, by phase."""

    def to_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = json_records.plain(self)
        return plain


def calibration_from_dict(values: Any) -> Calibration:
    """Read `to_dict` back, from JSON as well. Raises ValueError."""
    found = json_records.read(Calibration, values, "the calibration")
    if found.version != VERSION:
        raise ValueError(f"its version is {found.version}")
    return found
