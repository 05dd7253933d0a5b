"""A process whose parent has died: it ends too, or is adopted."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Any

PARENT_VARIABLE = "AUTOTUNE_PARENT_PID"
"""Of a worker: the process that started it."""

# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37


def die_with_parent(death_signal: int = signal.SIGKILL) -> None:
    """For a worker's first line: have the kernel send this signal when its parent dies.

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
    """Whether descendants that lose their parent become this process's children; was it so before?

    Linux only. What is adopted must be reaped: init does so no longer.
    """
    before = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    _prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))
    return bool(before.value)


def _prctl(option: int, value: Any) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")
