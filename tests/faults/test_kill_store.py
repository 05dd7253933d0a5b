"""Writers into the database, killed; studies/store has the figures of kill_store.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import kill_store

pytestmark = pytest.mark.worker


@pytest.mark.slow
def test_what_was_said_to_be_kept_survives_a_kill(tmp_path: Path) -> None:
    """Of a writer of each kind."""
    problems, killed = kill_store.run(3, 3, tmp_path)
    assert problems == []
    assert sum(killed.values()) == 3
