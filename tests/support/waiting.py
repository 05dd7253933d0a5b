"""For what happens in another process."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(is_true: Callable[[], bool]) -> bool:
    """Whether it came true within 5 seconds."""
    give_up = time.monotonic() + 5
    while time.monotonic() < give_up:
        if is_true():
            return True
        time.sleep(0.01)
    return False
