"""Record of a night: the terminal, JSON, Markdown and HTML all draw this."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autotune.common.units import counted
from autotune.errors import EXIT_IMPROVED, EXIT_INTERRUPTED, EXIT_REGRESSION, StorageError
from autotune.nightly import drift
from autotune.nightly.history import NEW, Night
from autotune.nightly.plan import Planned
from autotune.records.fingerprint import Fingerprint
from autotune.space.words import describe

EVENTS = ("regression", "improved", "failure")
"""Events that a night may have, of which `failure` is a cell without an answer."""
FAILED = "failed"
"""Kind of a cell without an answer; its other kinds are a Night's."""
_ORDER = (drift.REGRESSION, FAILED, drift.IMPROVEMENT, drift.SUSPECT, NEW, drift.UNCHANGED)
"""Kinds, those that matter most first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """The outcome of one cell."""

    planned: Planned
    night: Night | None
    """Night of the cell; None where it failed."""
    problem: str = ""
    """Reason why it failed, or what could not be written."""
    exit_code: int = 0
    """Exit code of that problem."""
    relative: Night | None = None
    """Night of the same question on the machine most like this one, shown beside first results."""

    @property
    def kind(self) -> str:
        return FAILED if self.night is None else self.night.kind

    @property
    def nights(self) -> tuple[Night, ...]:
        return self.planned.nights + (() if self.night is None else (self.night,))

    def to_dict(self) -> dict[str, Any]:
        night = self.night
        return {
            **self.planned.to_dict(),
            "kind": self.kind,
            "problem": self.problem,
            "tokens_per_second": None if night is None else night.speed,
            "evidence": None if night is None else "measured",
            "spread": None if night is None else night.spread,
            "num_probes": 0 if night is None else len(night.tokens_per_second),
            "change": None if night is None else night.change,
            "interval": None if night is None or night.low is None else [night.low, night.high],
            "why": "" if night is None else night.reason,
            "replaced": night is not None and night.is_replaced,
            "config": None if night is None else describe(night.config),
            "elapsed_seconds": None if night is None else round(night.elapsed_seconds, 1),
            "trend": [[each.made_at, each.speed, each.kind] for each in self.nights],
            "relative": None
            if self.relative is None
            else {
                "device": self.relative.fingerprint.device,
                "tokens_per_second": self.relative.speed,
                "made_at": self.relative.made_at,
            },
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Digest:
    """A night of one machine."""

    made_at: str
    machine: str
    """Name of the machine's folder."""
    fingerprint: Fingerprint
    done: tuple[Done, ...]
    left: tuple[Planned, ...]
    """Cells that there was no time for, or nothing to do."""
    elapsed_seconds: float
    is_interrupted: bool = False
    is_unwritten: bool = False
    """Whether it is in no file; the notes say why."""
    notes: tuple[str, ...] = ()

    def of_kind(self, *kinds: str) -> list[Done]:
        return [each for each in self.done if each.kind in kinds]

    @property
    def events(self) -> list[str]:
        """Return the events that happened, of EVENTS."""
        happened = (
            bool(self.of_kind(drift.REGRESSION)),
            bool(self.of_kind(drift.IMPROVEMENT)),
            self._failure != 0,
        )
        return [event for event, is_so in zip(EVENTS, happened, strict=True) if is_so]

    @property
    def exit_code(self) -> int:
        """Return 130 if interrupted, 7 for a regression, that of the first failure, 8 if improved, else 0."""
        if self.is_interrupted:
            return EXIT_INTERRUPTED
        if self.of_kind(drift.REGRESSION):
            return EXIT_REGRESSION
        return self._failure or (EXIT_IMPROVED if self.of_kind(drift.IMPROVEMENT) else 0)

    @property
    def _failure(self) -> int:
        failed = next((each.exit_code for each in self.done if each.exit_code), 0)
        return failed or (StorageError.exit_code if self.is_unwritten else 0)

    @property
    def headline(self) -> str:
        """Return a line such as `2 cells: 1 regression, 1 unchanged`."""
        words = _headline(self.done, self.left)
        return f"{words} (interrupted)" if self.is_interrupted else words

    def to_dict(self) -> dict[str, Any]:
        """Return the object of `nightly --json`."""
        return {
            "schema_version": 1,
            "made_at": self.made_at,
            "machine": self.machine,
            "device": self.fingerprint.device,
            "driver": self.fingerprint.driver,
            "cuda": self.fingerprint.cuda,
            "versions": dict(self.fingerprint.versions),
            "headline": self.headline,
            "events": self.events,
            "exit_code": self.exit_code,
            "interrupted": self.is_interrupted,
            "elapsed_seconds": round(self.elapsed_seconds, 1),
            "cells": [each.to_dict() for each in self.done],
            "left": [each.to_dict() for each in self.left],
            "notes": list(self.notes),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class NightProblem:
    """Reason why part of a cluster's night was not done."""

    of: str
    """The kind of card, or the file."""
    problem: str
    exit_code: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterDigest:
    """A night of a cluster: a digest of each kind of card, and what could not be done."""

    made_at: str
    digests: tuple[Digest, ...]
    problems: tuple[NightProblem, ...] = ()
    is_interrupted: bool = False
    notes: tuple[str, ...] = ()

    @property
    def events(self) -> list[str]:
        """Return the events that happened on any kind of card, of EVENTS."""
        happened = {event for each in self.digests for event in each.events}
        happened |= {"failure"} if self.problems else set()
        return [event for event in EVENTS if event in happened]

    @property
    def exit_code(self) -> int:
        """Return a Digest's exit code, of what matters most on any kind of card."""
        both: tuple[Digest | NightProblem, ...] = (*self.digests, *self.problems)
        codes = [each.exit_code for each in both if each.exit_code]
        if self.is_interrupted:
            return EXIT_INTERRUPTED
        if EXIT_REGRESSION in codes:
            return EXIT_REGRESSION
        return min(codes, key=lambda code: code == EXIT_IMPROVED, default=0)

    @property
    def headline(self) -> str:
        """Return a line such as `2 kinds of card, 4 cells: 3 new, 1 failed`."""
        done = [one for each in self.digests for one in each.done]
        kinds = counted(len(self.digests), "kind")
        words = f"{kinds} of card, {_headline(done, [one for each in self.digests for one in each.left])}"
        return f"{words} (interrupted)" if self.is_interrupted else words

    def to_dict(self) -> dict[str, Any]:
        """Return the object of `nightly --on --json`."""
        return {
            "schema_version": 1,
            "made_at": self.made_at,
            "headline": self.headline,
            "events": self.events,
            "exit_code": self.exit_code,
            "interrupted": self.is_interrupted,
            "machines": [each.to_dict() for each in self.digests],
            "problems": [dataclasses.asdict(each) for each in self.problems],
            "notes": list(self.notes),
        }


def _headline(done: Sequence[Done], left: Sequence[Planned]) -> str:
    counts = [(sum(each.kind == kind for each in done), kind) for kind in _ORDER]
    said = ", ".join(f"{count} {kind}" for count, kind in counts if count)
    nothing = "no cell has ended" if any(each.has_work for each in left) else "nothing to do"
    return f"{counted(len(done), 'cell')}: {said}" if done else nothing


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:+.1f} %"


def interval(night: Night) -> str:
    if night.low is None or night.high is None:
        return ""
    return f"{percent(night.low)} to {percent(night.high)}"


def ordered(done: Sequence[Done]) -> list[Done]:
    """Return the cells, those that matter most first; otherwise as they were done."""
    return sorted(done, key=lambda each: _ORDER.index(each.kind))
