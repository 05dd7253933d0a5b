"""Waiting for what happens in another process."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(is_true: Callable[[], bool]) -> bool:
    """Wait until it is true; return whether it came true within half a minute: a busy machine takes time."""
    give_up = time.monotonic() + 30
    while time.monotonic() < give_up:
        if is_true():
            return True
        time.sleep(0.01)
    return False
