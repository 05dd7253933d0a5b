"""Traces that are made ahead of a question are those that it finds."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import answers
import pytest

from autotune.common import json_lines
from autotune.errors import WorkerError
from autotune.predict import trace_servers
from autotune.predict.trace_jobs import kept_by
from autotune.predict.traces_ahead import TracesAhead, traces_ahead
from autotune.records.estimate import TraceSpec
from autotune.store.trace_cache import TraceCache

PLAIN = TraceSpec.of(answers.CONFIG)
SPECS = [dataclasses.replace(PLAIN, activation_checkpointing=every) for every in (2, 0, 1)]
SHARED = {"config": {"model_type": "none"}, "num_sms": 108}


class Server:
    """A server whose job has answered to the first two of what is asked, and works on the third."""

    last_fork: object = object()

    def __init__(self) -> None:
        self.requests: list[Mapping[str, Any]] = []
        self.events: list[str] = []

    @contextlib.contextmanager
    def in_background(
        self, verb: str, request: Mapping[str, Any]
    ) -> Iterator[Callable[[], list[dict[str, Any]]]]:
        assert verb == "trace"
        self.requests.append(request)
        made = [
            {"id": job["id"], "packed": json_lines.packed({"id": job["id"], "unsupported": "no"})}
            for job in request["traces"][:2]
        ]
        yield lambda: [json_lines.decode(json_lines.encode(each)) for each in made]
        self.events.append("job ended")

    def close(self) -> None:
        self.events.append("closed")


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def block(monkeypatch: pytest.MonkeyPatch) -> Iterator[contextlib.ExitStack]:
    """The block that a server was started ahead for, on a machine of two cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    with contextlib.ExitStack() as stack:
        monkeypatch.setattr(trace_servers, "_blocks", [stack])
        yield stack


def kept(cache: TraceCache) -> list[TraceSpec]:
    found = cache.find([kept_by(SHARED, spec) for spec in SPECS])
    return [spec for spec in SPECS if kept_by(SHARED, spec) in found]


@pytest.mark.usefixtures("block")
def test_what_is_done_is_kept_and_the_rest_is_asked_for_again(
    server: Server, tmp_path: Path
) -> None:
    cache = TraceCache(tmp_path)
    ahead = TracesAhead(server, SHARED, cache)  # type: ignore[arg-type]
    ahead.go_on(lambda: SPECS)
    ahead.go_on(lambda: SPECS)
    (request,) = server.requests
    assert request["ahead"] is True
    asked = [job["spec"]["activation_checkpointing"] for job in request["traces"]]
    assert asked == [2, 0, 1], "in the order that was asked for"
    ahead.stop()
    ahead.stop()
    assert server.events == ["job ended"]
    assert kept(cache) == SPECS[:2]
    ahead.go_on(lambda: SPECS)
    assert [job["spec"]["activation_checkpointing"] for job in server.requests[1]["traces"]] == [1]
    ahead.end()
    assert server.events == ["job ended", "job ended", "closed"]
    assert kept(cache) == SPECS
    ahead.go_on(lambda: SPECS)
    assert len(server.requests) == 2, "nothing is left"


def test_it_ends_with_the_block_of_the_server(
    server: Server, block: contextlib.ExitStack, tmp_path: Path
) -> None:
    with traces_ahead(server, SHARED, TraceCache(tmp_path)) as ahead:  # type: ignore[arg-type]
        ahead.go_on(lambda: SPECS)
    assert server.events == []
    block.close()
    assert server.events == ["job ended", "closed"]


@pytest.mark.parametrize("why", ["no block", "one core", "still imports", "no cache"])
def test_nothing_is_traced_ahead_where_that_would_cost_time(
    why: str,
    server: Server,
    block: contextlib.ExitStack,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if why == "no block":
        monkeypatch.setattr(trace_servers, "_blocks", [])
    elif why == "one core":
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    elif why == "still imports":
        server.last_fork = None
    cache = None if why == "no cache" else TraceCache(tmp_path)
    with traces_ahead(server, SHARED, cache) as ahead:  # type: ignore[arg-type]
        ahead.go_on(lambda: SPECS)
    assert not server.requests
    assert server.events == ["closed"]
    block.close()
    assert server.events == ["closed"]


@pytest.mark.usefixtures("block")
def test_an_error_ends_it_and_its_own_are_of_no_consequence(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = TraceCache(tmp_path)
    with contextlib.suppress(KeyError), traces_ahead(server, SHARED, cache) as ahead:  # type: ignore[arg-type]
        ahead.go_on(lambda: SPECS)
        raise KeyError
    assert server.events == ["job ended", "closed"]

    def fails(*_: object) -> None:
        raise WorkerError("The fork server failed")

    monkeypatch.setattr(server, "in_background", fails)
    ahead.go_on(lambda: SPECS)
    ahead.stop()
