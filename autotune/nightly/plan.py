"""Plan of a night: each cell's state, why, for how long, and which of them the time is for.

The most valuable first: what was interrupted or is under suspicion, then new, stale, due and fresh
cells; among those of one state the higher priority, then the greater expected gain per minute.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from autotune.common.units import format_bytes, format_seconds, parse_bytes
from autotune.nightly import drift
from autotune.nightly.history import Night
from autotune.nightly.matrix import Cell, Matrix
from autotune.records.fingerprint import Fingerprint
from autotune.records.measurement import CONFIRM_STEPS, PROBE_SECONDS
from autotune.search.prediction import EFFORTS

INTERRUPTED, NEW, STALE, DUE, FRESH = "interrupted", "new", "stale", "due", "fresh"
IMPOSSIBLE = "impossible"
"""State of a cell whose budget is larger than the card's memory."""
FATAL = "fatal"
"""State of a cell that night after night died over: it waits until everything else is done."""
MAX_DEATHS = 3

CLOCK_SECONDS = 86_400.0
"""Seconds by which a clock that was set right in between may be off. [judgement]"""
FUTURE = "tuned in the future, by this machine's clock, which was wrong then or is now"

EXPECTED_GAIN = {
    INTERRUPTED: 1.0,
    NEW: 1.0,
    STALE: 0.05,
    DUE: 0.01,
    FRESH: 0.002,
    FATAL: 0.0,
    IMPOSSIBLE: 0.0,
}
"""Share of speed that doing a cell brings, before its own history says better. [judgement]"""
_GAIN_WEIGHT = 3
"""Weight of the judgement, in searches of the cell's own."""
_ORDER = (INTERRUPTED, NEW, STALE, DUE, FRESH, FATAL, IMPOSSIBLE)
_SEARCHES = (INTERRUPTED, NEW, STALE, DUE, FATAL)

SET_UP_SECONDS = 20.0
"""Seconds of a probe or a search beside its timed steps, before there is a history. [judgement]"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A cell and what a night would do with it."""

    cell: Cell
    state: str
    reason: str
    """Reason for that state, in words."""
    nights: tuple[Night, ...]
    """Earlier nights, oldest first."""
    measures: bool
    """Whether the standing answer is measured again, first."""
    searches: bool
    expected_seconds: float
    expected_gain: float
    is_chosen: bool = True
    """Whether the night does it. False: there is no time for it, or nothing to do."""
    problem: str = ""
    """Reason why a dry run did not find its model, without the network, or why the cell cannot begin."""
    can_begin: bool = True
    """Whether a search can begin, as far as a dry run knows."""

    @property
    def has_work(self) -> bool:
        return self.measures or self.searches

    @property
    def standing(self) -> Night | None:
        return self.nights[-1] if self.nights else None

    @property
    def is_suspect(self) -> bool:
        return self.standing is not None and self.standing.kind == drift.SUSPECT

    def to_dict(self) -> dict[str, Any]:
        """Return an entry of `nightly --dry-run --json`."""
        return {
            "cell": self.cell.name,
            "state": self.state,
            "reason": self.reason,
            "priority": self.cell.priority,
            "measures": self.measures,
            "searches": self.searches,
            "expected_seconds": round(self.expected_seconds, 1),
            "expected_gain": round(self.expected_gain, 5),
            "chosen": self.is_chosen,
            "problem": self.problem,
            "can_begin": self.can_begin,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A night before anything is measured: its backend, machine and cells."""

    backend: str
    fingerprint: Fingerprint
    planned: tuple[Planned, ...]

    @property
    def expected_seconds(self) -> float:
        return sum(each.expected_seconds for each in self.planned if each.is_chosen)

    def to_dict(self) -> dict[str, Any]:
        """Return the object of `nightly --dry-run --json`."""
        return {
            "schema_version": 1,
            "device": self.fingerprint.device,
            "driver": self.fingerprint.driver,
            "versions": dict(self.fingerprint.versions),
            "backend": self.backend,
            "expected_seconds": round(self.expected_seconds, 1),
            "cells": [each.to_dict() for each in self.planned],
        }


def plan(
    matrix: Matrix,
    histories: Mapping[str, Sequence[Night]],
    *,
    fingerprint_of: Callable[[Night], Fingerprint],
    backend: str,
    now: datetime.datetime,
    budget_seconds: float,
    begun: Mapping[str, int] = MappingProxyType({}),
    capacity_bytes: int | None = None,
) -> list[Planned]:
    """Return every cell of the matrix, most valuable first.

    `histories` are of this machine, by the cell's name; `fingerprint_of` says what a measurement of a
    night's answer would have now; `begun` are cells that an earlier run left half done, and how often it
    died over them.
    """
    known = [night for nights in histories.values() for night in nights]
    found = []
    for cell in matrix.cells:
        nights = tuple(histories.get(cell.name, ()))
        state, reason = _obstacle(cell, begun.get(cell.name), capacity_bytes) or _staleness(
            nights, fingerprint_of, now, matrix.retune_after_seconds
        )
        planned = _planned(cell, state, reason, nights, now, matrix.measure_again_after_seconds)
        seconds = expected_seconds(planned, known, matrix, backend)
        found.append(dataclasses.replace(planned, expected_seconds=seconds))
    return _chosen(sorted(found, key=_order), budget_seconds)


def changes(before: Fingerprint, now: Fingerprint) -> list[str]:
    """Return what is not as it was, such as `torch 2.13.0 -> 2.14.0`."""
    old, new = _parts(before), _parts(now)
    return [
        f"{name} {old.get(name) or 'none'} -> {new.get(name) or 'none'}"
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name)
    ]


def _parts(fingerprint: Fingerprint) -> dict[str, str]:
    return {
        "driver": fingerprint.driver,
        "CUDA": fingerprint.cuda,
        **dict(fingerprint.versions),
        "PYTORCH_ALLOC_CONF": fingerprint.allocator,
    }


def _planned(
    cell: Cell,
    state: str,
    reason: str,
    nights: tuple[Night, ...],
    now: datetime.datetime,
    again_after_seconds: float,
) -> Planned:
    searches = state in _SEARCHES
    old_seconds = _age_seconds(nights[-1], now) if nights else 0.0
    measures = bool(nights) and state != IMPOSSIBLE
    if old_seconds < again_after_seconds and not searches:
        measures = False
        if nights and state == FRESH:
            reason = f"measured {_age(old_seconds)} ago"
    return Planned(
        cell=cell,
        state=state,
        reason=reason,
        nights=nights,
        measures=measures,
        searches=searches,
        expected_seconds=0.0,
        expected_gain=_gain(state, nights),
    )


def _obstacle(cell: Cell, deaths: int | None, capacity_bytes: int | None) -> tuple[str, str] | None:
    """Return (state, reason) of a cell that cannot be done, or that an earlier night did not end."""
    size = cell.options.gpu_mem
    if capacity_bytes is not None and size is not None and parse_bytes(size) > capacity_bytes:
        return IMPOSSIBLE, f"the card has {format_bytes(capacity_bytes)}, the cell asks for {size}"
    if deaths is not None and deaths >= MAX_DEATHS:
        return FATAL, f"{deaths} nights crashed during it"
    if deaths is not None:
        return INTERRUPTED, "an earlier night began it and did not end"
    return None


def _staleness(
    nights: Sequence[Night],
    fingerprint_of: Callable[[Night], Fingerprint],
    now: datetime.datetime,
    retune_after_seconds: float,
) -> tuple[str, str]:
    """Return (state, reason) by what a cell's nights were, and when."""
    searched = [night for night in nights if night.has_searched]
    if not searched:
        return NEW, "never tuned on this machine"
    last = searched[-1]
    if changed := changes(last.fingerprint, fingerprint_of(last)):
        return STALE, ", ".join(changed)
    old_seconds = _age_seconds(last, now)
    if old_seconds >= retune_after_seconds:
        return DUE, FUTURE if old_seconds == math.inf else f"tuned {_age(old_seconds)} ago"
    if nights[-1].kind == drift.SUSPECT:
        return FRESH, "last night's speed was suspect"
    return FRESH, f"nothing has changed since {last.made_at[:10]}"


def _age_seconds(night: Night, now: datetime.datetime) -> float:
    """Return the age of a night.

    Where the clock was set back beyond it, nothing is known: it is as old as can be.
    """
    seconds = (now - night.at).total_seconds()
    return seconds if seconds > -CLOCK_SECONDS else math.inf


def _age(seconds: float) -> str:
    if seconds >= 2 * 86_400:
        return f"{seconds / 86_400:.0f} days"
    return f"{seconds / 3600:.0f} hours" if seconds >= 7200 else format_seconds(max(seconds, 0.0))


def _gain(state: str, nights: Sequence[Night]) -> float:
    """Return the expected gain as a share of speed: the judgement, and what searches of the cell brought."""
    seen = [abs(night.change or 0.0) for night in nights[1:] if night.has_searched]
    if state not in (STALE, DUE):
        return EXPECTED_GAIN[state]
    return (_GAIN_WEIGHT * EXPECTED_GAIN[state] + sum(seen)) / (_GAIN_WEIGHT + len(seen))


def expected_seconds(
    planned: Planned, known: Sequence[Night], matrix: Matrix, backend: str
) -> float:
    """Return the seconds that a cell is expected to take.

    By its own nights of that kind, else by the machine's, which are `known`, else by the effort.
    """
    if not planned.has_work:
        return 0.0
    for nights in (planned.nights, known):
        taken = [n.elapsed_seconds for n in nights if n.has_searched == planned.searches]
        if taken:
            return statistics.median(taken)
    probe_seconds = PROBE_SECONDS[backend] + SET_UP_SECONDS
    seconds = matrix.max_probes * probe_seconds
    if planned.searches:
        num_probes = EFFORTS[planned.cell.options.effort].max_probes
        seconds += (num_probes + 1) * probe_seconds + CONFIRM_STEPS[backend]
    return seconds


def _order(planned: Planned) -> tuple[float, ...]:
    rank = 0 if planned.is_suspect and planned.measures else _ORDER.index(planned.state)
    minutes = max(planned.expected_seconds, 1.0) / 60
    return (rank, -planned.cell.priority, -planned.expected_gain / minutes)


def _chosen(found: Sequence[Planned], budget_seconds: float) -> list[Planned]:
    """Mark the cells that the night has time for; one at least, which if need be goes on the next night."""
    left_seconds, chosen = budget_seconds, []
    has_any = False
    for each in found:
        fits = each.has_work and (each.expected_seconds <= left_seconds or not has_any)
        if fits:
            left_seconds -= each.expected_seconds
            has_any = True
        chosen.append(dataclasses.replace(each, is_chosen=fits))
    return chosen
