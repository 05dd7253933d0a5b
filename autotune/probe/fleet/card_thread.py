"""A card with a thread of its own, which starts the card's fork server and runs one probe after another.

A fork server ends with the thread that started it. Whoever owns the card gives it jobs, and takes what it
says out of a queue: nothing of theirs runs in this thread.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from autotune.errors import WorkerError
from autotune.probe.fingerprint import fingerprint_here
from autotune.probe.fleet.fleet import Job, run_job
from autotune.records.fingerprint import Fingerprint
from autotune.worker.client import launching
from autotune.worker.client.forkserver import ForkServer
from autotune.worker.client.isolate import Reply, WorkerEnd

T = TypeVar("T")

CLOSE_SECONDS = 60.0
"""Time that a card may take to let its probe and its server go."""


@dataclass(frozen=True, slots=True)
class Said:
    """An utterance of a card."""

    card: CardThread
    what: Reply | WorkerEnd | Fingerprint | BaseException
    """An answer of the probe that runs, how it ended, a fingerprint, or what went wrong."""


class _Closing(Exception):
    """The card is to end, whatever it does."""


class _Dropped(Exception):
    """The probe is to end, whatever it does."""


class CardThread:
    """One card: its thread, its server, and the job that it runs."""

    def __init__(self, environment: Mapping[str, str], says: queue.SimpleQueue[Said]) -> None:
        """Start the thread. `environment`: variables of its processes beside this process's own."""
        self.job: Job | None = None
        """The job that it was given and that its owner has not heard the end of."""
        self._environment = environment
        self._says = says
        self._asked: queue.SimpleQueue[Callable[[ForkServer], Any] | None] = queue.SimpleQueue()
        self._stop_reason = ""
        self._is_closing = self._is_dropped = False
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def run(self, job: Job) -> None:
        """Give it a job; it must have none."""
        assert self.job is None
        self.job, self._stop_reason = job, ""
        self._is_dropped = False
        self._is_idle.clear()
        self._asked.put(lambda server: run_job(server, job, self._hear, on_poll=self._go_on))

    def ask_fingerprint(self, backend: str) -> None:
        self._asked.put(lambda server: fingerprint_here(server, backend))

    def stop(self, reason: str) -> None:
        """Let the probe stop at its next step."""
        self._stop_reason = reason

    def drop(self) -> None:
        """Begin to end its probe, of whose end it says nothing; see `await_idle`."""
        self._is_dropped = True

    def await_idle(self) -> None:
        """Wait until its probe has gone. Raises WorkerError where that takes too long."""
        if not self._is_idle.wait(CLOSE_SECONDS):
            raise WorkerError(
                "A probe cannot be ended",
                why=f"Its process was killed, and is still there after {CLOSE_SECONDS:.0f} s",
            )
        self.job = None

    def close(self) -> None:
        """Begin to end its probe and its server; see `join`."""
        self._is_closing = True
        self._asked.put(None)

    def join(self) -> None:
        self._thread.join(CLOSE_SECONDS)

    def _work(self) -> None:
        prefix = ["/usr/bin/env", *(f"{name}={value}" for name, value in self._environment.items())]
        prefix = prefix if self._environment else []
        command = [*prefix, sys.executable, "-P", "-m", "autotune.worker.server"]
        fresh_command = [*prefix, *launching.worker_command()]
        with ForkServer(command=command, fresh_command=fresh_command) as server:
            while (ask := self._asked.get()) is not None:
                try:
                    self._says.put(Said(self, ask(server)))
                except _Closing:
                    return
                except _Dropped:
                    pass
                except BaseException as error:  # the owner's to raise
                    self._says.put(Said(self, error))
                self._is_idle.set()

    def _hear(self, answer: Reply) -> str:
        self._says.put(Said(self, answer))
        return self._stop_reason

    def _go_on(self) -> None:
        if self._is_closing:
            raise _Closing
        if self._is_dropped:
            raise _Dropped


def ended(said: Said) -> WorkerEnd | Fingerprint:
    """Return what a card said at the end of something. Raises what went wrong there."""
    if isinstance(said.what, BaseException):
        raise said.what
    if isinstance(said.what, WorkerEnd | Fingerprint):
        return said.what
    raise WorkerError("A card gave an answer to nothing")
