"""Ends or adopts a process whose parent has died."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Any

PARENT_VARIABLE = "AUTOTUNE_PARENT_PID"
"""Environment variable of a worker: the id of the process that started it."""

# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37


def die_with_parent(death_signal: int = signal.SIGKILL) -> None:
    """Have the kernel send this process the signal when its parent dies; for a worker's first line.

    Exits at once when the parent is gone already. Does nothing in a process that `run` did not
    start, and nothing but that check outside Linux.
    """
    expected = os.environ.get(PARENT_VARIABLE)
    if expected is None:
        return
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, death_signal)
    if os.getppid() != int(expected):
        sys.exit("The process that asked for this work is gone.")


def adopt_orphans(adopt: bool = True) -> bool:
    """Adopt descendants that lose their parent; return whether that was so before.

    Linux only. What is adopted must be reaped: init does so no longer.
    """
    before = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    _prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))
    return bool(before.value)


def _prctl(option: int, value: Any) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")
