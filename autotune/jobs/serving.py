"""A worker: takes the jobs that its machine can answer, one after the other, until it is told to stop.

Where no job is queued it helps with one that runs on a machine like its own: it searches in the same
study, and the job's own worker gives the answer. A job whose worker fell silent is taken over; what was
measured of it is in the database.

A thread gives a sign of life while a job is worked on. Where the job is no longer ours (cancelled; or
taken over, because the signs did not come through) the search is broken off. To stop a worker raises
KeyboardInterrupt in it: the probe that runs is given back within seconds, and so is the job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import sqlalchemy

from autotune.catalogue import gpus
from autotune.common.units import counted
from autotune.errors import AutotuneError, HardwareError, StorageError
from autotune.jobs import asking
from autotune.probe import fingerprint as fingerprints
from autotune.probe import owners
from autotune.records.answer import Counts, stored_record
from autotune.records.measurement import Measurement, ProbeSpec
from autotune.report.deliver import deliver
from autotune.search import budget
from autotune.search.find import find
from autotune.search.listener import SILENT, Listener, Measuring
from autotune.space.config import TrainConfig
from autotune.store import optuna_study
from autotune.store.jobs import Job, JobTable, WorkerMachine, may_pass, open_jobs, patiently
from autotune.worker.client.forkserver import ForkServer
from autotune.worker.client.isolate import private_folder

IDLE_SECONDS = 2.0
"""Seconds between two looks into an empty queue."""
MAX_LOST = 3
"""Number of jobs in a row after which a database that comes and goes is taken for broken."""

Log = Callable[[str], None]


class Gone(KeyboardInterrupt):
    """The job that is worked on is no longer this worker's. Breaks off a probe as Ctrl-C does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Here:
    """The machine, backend and kind of measurement that this worker offers."""

    backend: str
    machine: WorkerMachine


def here(backend: str) -> Here:
    """Return this machine, on that backend; `auto` is its CUDA card, or the CPU where there is none.

    Starts a process that imports torch. Raises HardwareError where it cannot measure, WorkerError.
    """
    cards = [] if backend == "cpu" else gpus.detect()
    if backend == "cuda" and not cards:
        budget.card_here(None, None)  # says why there is none
    if cards:
        backend, card, capacity_bytes = "cuda", cards[0], cards[0].capacity_bytes
    else:
        card = gpus.cpu_stand_in()
        backend, capacity_bytes = "cpu", card.capacity_bytes // 2
    with ForkServer() as server:
        fingerprint = fingerprints.digest(fingerprints.fingerprint_here(server, backend))
    owner = owners.this_process()
    worker = f"{asking.who()} {owner['pid']} {owner['began']}"
    return Here(
        backend=backend,
        machine=WorkerMachine(
            worker=worker, card=card.name, capacity_bytes=capacity_bytes, fingerprint=fingerprint
        ),
    )


def serve(
    url: str, at: Here, *, once: bool, log: Log, heard: Callable[[], None] = lambda: None
) -> None:
    """Answer jobs until KeyboardInterrupt; `once`: until one is answered, or there is none.

    `heard` is called when a KeyboardInterrupt has arrived, before a job is given back for it.
    Only in the main thread. Raises StorageError, and HardwareError where the machine turns out not to
    be able to measure; the job is given back then.
    """
    with open_jobs(url) as jobs:
        try:
            _serve(url, at, jobs, once=once, log=log)
        except KeyboardInterrupt:
            heard()
            # Also one that had only just been taken.
            _give_back(jobs, at.machine, log)
            raise


def _serve(url: str, at: Here, jobs: JobTable, *, once: bool, log: Log) -> None:
    joined: set[int] = set()
    num_lost = 0
    while True:
        job, is_own = patiently(lambda: _next(jobs, at.machine, joined), log)
        if job is not None:
            log(f"job {job.number}: {'taken' if is_own else 'helping'}, {job.command}")
            work = _Work(url, at, jobs, job, is_own=is_own, log=log)
            try:
                work.run()
            except (StorageError, HardwareError, sqlalchemy.exc.SQLAlchemyError) as error:
                # Nothing is wrong with the question: somebody else may have it.
                num_lost += 1
                goes_on = not once and num_lost < MAX_LOST and may_pass(error)
                _give_back(jobs, at.machine, log, waits=goes_on)
                if not goes_on:
                    raise
                continue
            num_lost = 0
            joined.add(job.number)
        if once:
            return
        if job is None:
            time.sleep(IDLE_SECONDS)


def _give_back(jobs: JobTable, machine: WorkerMachine, log: Log, *, waits: bool = False) -> None:
    """Give back the job that this worker holds, if any; `waits` for a database that is away."""
    give = functools.partial(jobs.give_back, machine.worker)
    with contextlib.suppress(sqlalchemy.exc.SQLAlchemyError):
        for number in patiently(give, log) if waits else give():
            log(f"job {number}: given back, what was measured is kept")


def _next(jobs: JobTable, machine: WorkerMachine, joined: set[int]) -> tuple[Job | None, bool]:
    """Return a job, and whether it is this machine's own rather than one to help with."""
    job = jobs.claim(machine)
    return (job, True) if job else (jobs.to_join(machine, leave_out=joined), False)


class _Work:
    """A job, worked on as its worker or as a helper."""

    def __init__(
        self, url: str, at: Here, jobs: JobTable, job: Job, *, is_own: bool, log: Log
    ) -> None:
        self._url = url
        self._at = at
        self._jobs = jobs
        self._job = job
        self._is_own = is_own
        self._log = log
        self._progress = "predicting"
        self._has_ended = threading.Event()

    def run(self) -> None:
        """Work on the job. Raises KeyboardInterrupt, StorageError and HardwareError.

        What else goes wrong is the job's answer.
        """
        try:
            with self._signs_of_life():
                self._answer()
        except Gone:
            self._log(f"job {self._job.number}: not ours any more, what was measured is kept")
        except (StorageError, HardwareError):
            raise
        except AutotuneError as error:
            self._fail(str(error), error.exit_code)
        except sqlalchemy.exc.SQLAlchemyError:
            raise  # Of the database, which is away: so nothing can be said there.
        except Exception as error:
            self._fail(f"internal error: {type(error).__name__}: {str(error)[:500]}", 1)

    def _answer(self) -> None:
        with private_folder() as folder:
            asked = asking.read(self._job.question, Path(folder), backend=self._at.backend)
            finding = find(
                asked.options,
                storage=self._url,
                command=self._job.command,
                listener=self._listener(),
                brought=asked.brought,
            )
        if not self._is_own:
            self._log(f"job {self._job.number}: nothing is left to help with")
            return
        # As it was asked: a folder of this machine is no part of it.
        finding = dataclasses.replace(finding, question=self._job.question["options"])
        delivered = deliver(finding, folder=None, storage=self._url, command=self._job.command)
        problem = " ".join(map(str, delivered.problems))
        self._has_ended.set()
        if self._jobs.finish(
            self._job.number,
            self._at.machine.worker,
            study=delivered.study,
            result=stored_record(finding.answer),
            problem=problem,
        ):
            self._log(f"job {self._job.number}: done, study {delivered.study}")

    def _fail(self, problem: str, exit_code: int) -> None:
        self._log(f"job {self._job.number}: {problem}")
        if self._is_own:
            self._jobs.fail(
                self._job.number, self._at.machine.worker, problem=problem, exit_code=exit_code
            )

    @contextlib.contextmanager
    def _signs_of_life(self) -> Iterator[None]:
        def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
            if not self._has_ended.is_set():
                raise Gone

        before = signal.signal(signal.SIGUSR1, stop)
        thread = threading.Thread(target=self._beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._has_ended.set()
            thread.join()
            signal.signal(signal.SIGUSR1, before)

    def _beat(self) -> None:
        while not self._has_ended.wait(optuna_study.HEARTBEAT_SECONDS):
            # A database that is away for a moment comes back; one that stays away ends the search.
            with contextlib.suppress(sqlalchemy.exc.SQLAlchemyError):
                if not self._is_still_on() and not self._has_ended.is_set():
                    os.kill(os.getpid(), signal.SIGUSR1)
                    return

    def _is_still_on(self) -> bool:
        if self._is_own:
            return self._jobs.beat(self._job.number, self._at.machine.worker, self._progress)
        return self._jobs.is_running(self._job.number)

    def _listener(self) -> Listener:
        def on_run(config: TrainConfig, spec: ProbeSpec) -> None:  # noqa: ARG001
            if spec.confirm_steps:
                self._say("confirming the winner")

        @contextlib.contextmanager
        def measuring(counts: Counts, max_probes: int, confirm_steps: int) -> Iterator[Measuring]:  # noqa: ARG001
            def on_probe(number: int, seen: Measurement, best: Measurement | None) -> None:  # noqa: ARG001
                speed = None if best is None else best.tokens_per_second
                fastest = "nothing fits yet" if speed is None else f"best {speed:,.0f} tokens/s"
                limit = counted(max_probes, "probe")
                self._say(f"{number} of at most {limit}, {fastest}")

            yield Measuring(on_run=on_run, on_probe=on_probe)

        return dataclasses.replace(
            SILENT, note=lambda text: self._log(f"note: {text}"), measuring=measuring
        )

    def _say(self, progress: str) -> None:
        self._progress = progress
        if self._is_own:
            with contextlib.suppress(sqlalchemy.exc.SQLAlchemyError):
                self._jobs.beat(self._job.number, self._at.machine.worker, progress)
