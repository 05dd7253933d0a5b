"""Owners of trials: which process works on one, and whether it is gone.

On the machine of that process this is known at once. Elsewhere only silence tells: a heartbeat that is too
old.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PROC = Path("/proc")
_START_TIME = 19
"""Index of the start time among the fields after the name in /proc/PID/stat: clock ticks since boot (proc(5),
field 22)."""
_ENDED = ("Z", "X", "x")


def this_process() -> dict[str, Any]:
    """Identify this process, in JSON's types: where it runs, its number, and when it began.

    The number and the time tell it from all that had or will have its number.
    """
    pid = os.getpid()
    return {"place": _place(), "pid": pid, "began": _began(pid)}


def is_gone(owner: Mapping[str, Any]) -> bool:
    """Whether the process ended; False where that cannot be told from here."""
    place, pid, began = owner.get("place"), owner.get("pid"), owner.get("began")
    if not place or place != _place() or type(pid) is not int:
        return False
    return _began(pid) != began


@functools.cache
def _place() -> str:
    """Identify the boot of the machine and the container whose process numbers these are.

    The text is empty where there is no /proc.
    """
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:
        return ""


def _began(pid: int) -> int | None:
    """The time at which the process started, in clock ticks since boot; None when it is no more."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name before is in parentheses, and may have some itself.
    state, *rest = text.rpartition(")")[2].split()
    return None if state in _ENDED else int(rest[_START_TIME - 1])
