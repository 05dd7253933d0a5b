"""Servers that only trace, started before it is known what they are to trace."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import answers
import pytest

from autotune.predict import trace_servers
from autotune.predict.trace_servers import block_ahead, run_ahead, started_ahead, trace_server
from autotune.records.estimate import TraceSpec
from autotune.worker.client import isolate
from autotune.worker.client.forkserver import CLOSE_SECONDS, ForkServer

PLAIN = TraceSpec.of(answers.CONFIG)
FLOAT8 = dataclasses.replace(PLAIN, precision="fp8-autocast")


@pytest.fixture(autouse=True)
def _servers_import_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeps = (sys.executable, "-c", "import time; time.sleep(600)")
    monkeypatch.setattr(trace_servers, "COMMAND", sleeps)


def is_running(pid: int | None) -> bool:
    return pid is not None and Path(f"/proc/{pid}").exists()


def test_what_is_asked_before_traces_takes_the_server_that_was_started_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def by_server(server: ForkServer, verb: str, *_: Any, **__: Any) -> None:
        asked.append((verb, server.server_pid))

    monkeypatch.setattr(ForkServer, "run", by_server)
    monkeypatch.setattr(isolate, "run", lambda verb, *_, **__: asked.append((verb, None)))
    with started_ahead({"trl"}):
        run_ahead("pictures", {}, deadline_seconds=1.0)
        with trace_server([PLAIN]) as taken:
            assert asked == [("pictures", taken.server_pid)]
            assert taken.server_pid is not None
    run_ahead("pictures", {}, deadline_seconds=1.0)
    assert asked[1:] == [("pictures", None)]


def test_the_server_that_was_started_ahead_is_taken_once() -> None:
    with started_ahead(set()):
        with trace_server([PLAIN]) as taken:
            pid = taken.server_pid
            assert is_running(pid)
        assert not is_running(pid)
        with trace_server([PLAIN]) as other:
            assert other.server_pid is None  # A new one starts with its first job.


def test_a_server_with_more_libraries_than_are_asked_for_is_taken() -> None:
    with started_ahead({"torchao"}), trace_server([PLAIN]) as taken:
        assert is_running(taken.server_pid)


def test_a_server_that_lacks_a_library_is_ended() -> None:
    with started_ahead(set()):
        (ahead,) = trace_servers._ahead
        pid = ahead.server.server_pid
        assert is_running(pid)
        with trace_server([PLAIN, FLOAT8]) as server:
            assert server.server_pid is None
            assert not is_running(pid)


def test_what_nobody_took_is_ended_at_once_though_it_still_imports() -> None:
    with started_ahead(set()):
        (ahead,) = trace_servers._ahead
        pid = ahead.server.server_pid
        assert is_running(pid)
        begun = time.monotonic()
    assert not is_running(pid)
    assert time.monotonic() - begun < CLOSE_SECONDS


def test_what_runs_ahead_is_called_off_with_its_own_block() -> None:
    assert block_ahead() is None
    with started_ahead(set()):
        outer = block_ahead()
        with started_ahead(set()):
            inner = block_ahead()
        assert block_ahead() is outer is not inner
    assert block_ahead() is None
