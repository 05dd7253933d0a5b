"""How much a command writes to stderr while it works: it depends on who reads.

| stderr is a     | as it is    | with --json |
|-----------------|-------------|-------------|
| terminal        | SCREEN      | SCREEN      |
| file or pipe    | LINES       | NONE        |
| either, with CI | MILESTONES  | NONE        |
"""

from __future__ import annotations

import contextlib
import enum
import os
import sys

_NO = ("", "0", "false")


class Output(enum.Enum):
    """Amounts of output on stderr, by who reads it."""

    SCREEN = enum.auto()
    """A screen that is redrawn in place, and gone at the end."""
    LINES = enum.auto()
    MILESTONES = enum.auto()
    """The few lines that the log of a CI job has use for."""
    NONE = enum.auto()


def output(*, quiet: bool) -> Output:
    if os.environ.get("CI", "").lower() not in _NO:
        return Output.NONE if quiet else Output.MILESTONES
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        return Output.SCREEN
    return Output.NONE if quiet else Output.LINES


def tell(line: str) -> None:
    """Write a line to stderr; whoever closes it has read enough, and loses nothing else by it."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)
