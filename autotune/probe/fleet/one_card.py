"""The one card that is visible to this process: probes run one after the other."""

from __future__ import annotations

from autotune.catalogue import nvml
from autotune.catalogue.nvml import Occupancy
from autotune.probe.fingerprint import fingerprint_here
from autotune.probe.fleet.fleet import Job, run_job
from autotune.records.fingerprint import Fingerprint
from autotune.worker.client.forkserver import ForkServer
from autotune.worker.client.isolate import WorkerEnd


class OneCard:
    """A fleet of one card, on which a probe runs while it is waited for."""

    num_cards = 1

    def __init__(self, server: ForkServer) -> None:
        self._server = server
        self._job: Job | None = None

    def fingerprint(self, backend: str) -> Fingerprint:
        return fingerprint_here(self._server, backend)

    def start(self, job: Job) -> None:
        assert self._job is None
        self._job = job

    def wait(self) -> tuple[Job, WorkerEnd]:
        job, self._job = self._job, None
        assert job is not None
        return job, run_job(self._server, job, job.on_answer)

    def drop(self) -> None:
        self._job = None  # It has not begun.

    def taken_of(self, job: Job, budget_bytes: int) -> Occupancy | None:  # noqa: ARG002  # there is one card
        return nvml.taken_of(budget_bytes)
