"""A study has one searcher at a time: a second one is told who has it, or waits; a killed one leaves no
lock."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from autotune.errors import EXIT_INTERRUPTED
from autotune.space.config import Workload
from autotune.store import locks
from autotune.store.locks import StudyBusyError
from autotune.store.optuna_study import open_study

WORKLOAD = Workload(
    model="tiny", sequence_length=64, effective_batch_size=8, memory_budget_bytes=10**8
)
HOLD = """
import sys, time
from autotune.space.config import Workload
from autotune.store.optuna_study import open_study
workload = Workload(model="tiny", sequence_length=64, effective_batch_size=8, memory_budget_bytes=10**8)
with open_study(sys.argv[1], "s", workload=workload, gpu="CPU", searches=True) as study:
    study.ask()
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgresql":
        address: str = request.getfixturevalue("postgres_url")
        return address
    return f"sqlite:///{tmp_path}/autotune.db"


def holder(url: str) -> subprocess.Popen[str]:
    """A process that searches in the study."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, url],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.worker
def test_a_second_searcher_is_told_who_has_the_study_and_a_killed_one_leaves_no_lock(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "POLL_SECONDS", 0.05)
    first = holder(url)
    try:
        with (
            pytest.raises(StudyBusyError, match='Another search works in the study "s"') as busy,
            open_study(url, "s", workload=WORKLOAD, gpu="CPU", searches=True),
        ):
            pass
        assert f"Process {first.pid} on " in busy.value.why
        assert "--wait" in busy.value.remedy
        assert busy.value.exit_code == 6 != EXIT_INTERRUPTED
        # Who only reads, or searches in another study, is not kept out.
        with open_study(url, "s", workload=WORKLOAD, gpu="CPU") as read:
            assert len(read.trials) == 1
        with open_study(url, "other", workload=WORKLOAD, gpu="CPU", searches=True):
            pass
        notes: list[str] = []

        def end() -> None:
            while not notes:
                time.sleep(0.01)
            first.send_signal(signal.SIGKILL)

        ending = threading.Thread(target=end)
        ending.start()
        with open_study(
            url, "s", workload=WORKLOAD, gpu="CPU", searches=True, waits=True, note=notes.append
        ) as mine:
            assert mine.user_attrs[locks.SEARCHER]["pid"] == os.getpid()
        ending.join()
        (note,) = notes
        assert note.startswith(f'waiting for the study "s": Process {first.pid} on ')
    finally:
        first.kill()
        first.wait()
        assert first.stdout is not None
        first.stdout.close()


def test_who_is_done_leaves_the_study_to_the_next(url: str) -> None:
    for _ in range(2):
        with open_study(url, "s", workload=WORKLOAD, gpu="CPU", searches=True):
            pass
