"""Work that is shared among forks: each piece once, whatever one of them does to its process."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from autotune.worker.trace.forks import Died, forked, num_processes

pytestmark = pytest.mark.worker


def test_each_piece_is_done_once_and_by_several_processes() -> None:
    def work(piece: int) -> dict[str, Any]:
        time.sleep(0.01)  # Nobody is so quick that the other finds nothing left.
        return {"id": piece, "pid": os.getpid(), "long": "x" * 200_000}

    done = list(forked(work, 20, 3))
    assert not any(isinstance(each, Died) for each in done)
    assert sorted(each["id"] for each in done) == list(range(20))
    assert len({each["pid"] for each in done} - {os.getpid()}) == 3


@pytest.mark.parametrize("how", ["killed", "raised", "exited"])
def test_a_piece_that_ends_its_process_is_told_apart_and_the_others_are_done(
    how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def work(piece: int) -> dict[str, Any]:
        if piece == 1 and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if piece == 1 and how == "exited":
            os._exit(7)
        if piece == 1:
            raise MemoryError("no room")
        return {"id": piece}

    done = list(forked(work, 6, 2))
    exit_code = {"killed": -signal.SIGKILL, "raised": 1, "exited": 7}[how]
    assert [each for each in done if isinstance(each, Died)] == [Died(1, exit_code)]
    assert sorted(each["id"] for each in done if isinstance(each, dict)) == [0, 2, 3, 4, 5]
    assert ("MemoryError: no room" in capfd.readouterr().err) == (how == "raised")


def test_who_stops_listening_leaves_no_process() -> None:
    def work(piece: int) -> dict[str, Any]:
        if piece:
            time.sleep(60)
        return {"pid": os.getpid()}

    answers = forked(work, 3, 2)
    first = next(answers)
    answers.close()
    assert isinstance(first, dict)
    assert not Path(f"/proc/{first['pid']}").exists()
    with pytest.raises(ChildProcessError):
        os.waitpid(first["pid"], 0)


def test_beside_another_thread_nothing_is_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "listdir", lambda _: ["1"])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert num_processes(3) == 3
    assert num_processes(100) == 4
    monkeypatch.undo()
    end = threading.Event()
    other = threading.Thread(target=end.wait)
    other.start()
    try:
        assert num_processes(100) == 1
    finally:
        end.set()
        other.join()
