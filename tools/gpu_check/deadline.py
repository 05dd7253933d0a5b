"""The time of one piece of a check: what runs under it ends with it."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autotune.worker.client.forkserver import ForkServer
from autotune.worker.client.isolate import WorkerEnd

GRACE_SECONDS = 45.0
"""For the probe that runs when the time is over: with 8 minutes a piece stays under 9."""
MIN_LEFT_SECONDS = 5.0
"""[judgement] With less left no probe is begun."""


class Deadline:
    """The time of one piece."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left_seconds(self) -> float:
        return self._end - time.monotonic()

    def allows_another(self) -> bool:
        return self.left_seconds > MIN_LEFT_SECONDS

    def of_job(self, seconds: float) -> float:
        """So many seconds, or those that a job has until it is killed for the piece's sake."""
        return min(seconds, max(self.left_seconds, 0.0) + GRACE_SECONDS)


class PunctualServer:
    """As ForkServer.run; kills a job that still runs when the piece's time is over."""

    def __init__(self, server: ForkServer, deadline: Deadline) -> None:
        self._server = server
        self._deadline = deadline

    def run(self, verb: str, request: Any, *, deadline_seconds: float, **rest: Any) -> WorkerEnd:
        seconds = self._deadline.of_job(deadline_seconds)
        return self._server.run(verb, request, deadline_seconds=seconds, **rest)


def run_until(
    command: Sequence[str], deadline: Deadline, *, cwd: Path
) -> tuple[int, str, str] | None:
    """(exit code, stdout, stderr); None when it had to be stopped."""
    process = subprocess.Popen(
        command, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        output, complaints = process.communicate(timeout=max(deadline.left_seconds, 0.0))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=GRACE_SECONDS / 2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        return None
    except BaseException:
        process.kill()
        process.wait()
        raise
    return process.returncode, output, complaints
