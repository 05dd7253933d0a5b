"""How much is told on stderr while a command works: it depends on who reads.

| stderr is a     | as it is    | with --json |
|-----------------|-------------|-------------|
| terminal        | SCREEN      | SCREEN      |
| file or pipe    | LINES       | NONE        |
| either, with CI | MILESTONES  | NONE        |
"""

from __future__ import annotations

import enum
import os
import sys

_NO = ("", "0", "false")


class Output(enum.Enum):
    """What suits the reader."""

    SCREEN = enum.auto()
    """Redrawn in place, gone at the end."""
    LINES = enum.auto()
    MILESTONES = enum.auto()
    """The few lines that a log of a CI job has use for."""
    NONE = enum.auto()


def output(*, quiet: bool) -> Output:
    if os.environ.get("CI", "").lower() not in _NO:
        return Output.NONE if quiet else Output.MILESTONES
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        return Output.SCREEN
    return Output.NONE if quiet else Output.LINES
