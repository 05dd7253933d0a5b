"""A worker that imports before it has a request."""

from __future__ import annotations

import time

import pytest

from autotune.worker.client import isolate
from autotune.worker.client.launching import EarlyWorker

pytestmark = pytest.mark.slow


def answered(early: EarlyWorker) -> tuple[str, list[str]]:
    (end,) = isolate.run_jobs(
        "fingerprint", [{"backend": "cpu"}], launch=early.launch, deadline_seconds=60
    )
    assert end.how == "ok", end.stderr_tail
    return end.stderr_tail, [key for answer in end.answers for key in answer]


def test_it_takes_one_job_and_another_one_the_next() -> None:
    with EarlyWorker() as early:
        process = early._process
        assert process is not None
        for _ in range(2):
            _, keys = answered(early)
            assert keys == ["fingerprint"]
            assert process.poll() == 0


def test_one_that_has_died_is_replaced() -> None:
    with EarlyWorker() as early:
        assert early._process is not None
        early._process.kill()
        while early._process.poll() is None:
            time.sleep(0.01)
        assert answered(early)[1] == ["fingerprint"]


def test_one_that_nobody_needs_is_gone() -> None:
    with EarlyWorker() as early:
        process = early._process
        assert process is not None
    assert process.returncode is not None
