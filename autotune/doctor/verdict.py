"""Verdict of a check, and how a check ends that cannot answer."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Status(enum.StrEnum):
    """Status of a check, from good to bad."""

    OK = "ok"
    WARN = "warn"
    """Status for what works with less than there could be."""
    FAIL = "fail"
    """Status for what autotune needs here and does not work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """A check's outcome: one line of the doctor."""

    status: Status
    said: str
    """Finding in a clause or two."""
    remedy: str = ""
    """Advice on what to do; never empty where it is not ok."""

    def __post_init__(self) -> None:
        assert self.status is Status.OK or self.remedy, self.said


def ok(said: str) -> Diagnosis:
    return Diagnosis(status=Status.OK, said=said)


def warn(said: str, remedy: str) -> Diagnosis:
    return Diagnosis(status=Status.WARN, said=said, remedy=remedy)


def fail(said: str, remedy: str) -> Diagnosis:
    return Diagnosis(status=Status.FAIL, said=said, remedy=remedy)


NO_CARD = ok("no card here: nothing to check")
