"""What a check answers, and how a check ends that cannot answer."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Status(enum.StrEnum):
    """From good to bad."""

    OK = "ok"
    WARN = "warn"
    """It works, with less than there could be."""
    FAIL = "fail"
    """What autotune needs here does not work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One line of the doctor."""

    status: Status
    said: str
    """What was found, in a clause or two."""
    remedy: str = ""
    """What to do about it; never empty where it is not ok."""

    def __post_init__(self) -> None:
        assert self.status is Status.OK or self.remedy, self.said


def ok(said: str) -> Verdict:
    return Verdict(status=Status.OK, said=said)


def warn(said: str, remedy: str) -> Verdict:
    return Verdict(status=Status.WARN, said=said, remedy=remedy)


def fail(said: str, remedy: str) -> Verdict:
    return Verdict(status=Status.FAIL, said=said, remedy=remedy)


NO_CARD = ok("no card here: nothing to check")
