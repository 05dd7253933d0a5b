"""What tests of the database share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest


@pytest.fixture
def go_far_from_greenwich(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Let clocks here be half a day and three quarters of an hour ahead of UTC, once it is called."""

    def go() -> None:
        monkeypatch.setenv("TZ", "Pacific/Chatham")
        time.tzset()

    yield go
    monkeypatch.undo()
    time.tzset()
