"""Workers of one study, some killed; studies/workers has the figures of workers.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import workers

pytestmark = pytest.mark.slow


@pytest.mark.slow  # a dozen processes
def test_four_workers_of_which_five_are_killed(postgres_url: str, tmp_path: Path) -> None:
    task = workers.Task(
        url=postgres_url,
        study="s",
        num_trials=40,
        probe_seconds=0.2,
        heartbeat_seconds=1,
        grace_seconds=3,
        is_elsewhere=True,
        log=str(tmp_path / "log"),
    )
    found = workers.run(task, num_workers=4, num_kills=5)
    assert found.is_well, found
    assert found.num_done == 40
    assert found.num_given_back <= 5
