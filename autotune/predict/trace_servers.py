"""Servers that only trace: what they import is paid once for all of a search's requests.

A command that will most likely trace starts its server first and finds out what is asked afterwards
(`started_ahead`): the server takes seconds to import, and the command half a second.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.records.estimate import TraceSpec
from autotune.worker.client import isolate
from autotune.worker.client.forkserver import COMMAND, ForkServer
from autotune.worker.client.libraries import asked_by


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ahead:
    libraries: frozenset[str]
    server: ForkServer


_ahead: list[_Ahead] = []
"""The server that was started ahead, until it is taken."""
_blocks: list[contextlib.ExitStack] = []
"""Calls for the end of each block that a server was started ahead for."""


@contextlib.contextmanager
def started_ahead(libraries: Collection[str]) -> Iterator[None]:
    """Let a server import these libraries in the meantime; who asks for one within the block takes it."""
    server = _server(libraries)
    server.start("trace")
    _ahead.append(_Ahead(libraries=frozenset(libraries), server=server))
    with contextlib.ExitStack() as block:
        _blocks.append(block)
        try:
            yield
        finally:
            _blocks.remove(block)
            while _ahead:
                _ahead.pop().server.close()


def block_ahead() -> contextlib.ExitStack | None:
    """Return the calls for the end of the `started_ahead` block, if this is in one."""
    return _blocks[-1] if _blocks else None


def end_what_runs_ahead() -> None:
    """End what is traced beside the command: it would slow down the host of a step that is timed."""
    block = block_ahead()
    if block is not None:
        block.close()


def trace_server(specs: Iterable[TraceSpec]) -> ForkServer:
    """Return a server for traces alone, of these specs and others that ask for no other libraries."""
    libraries = asked_by(specs)
    while _ahead:
        ahead = _ahead.pop()
        if libraries <= ahead.libraries:
            return ahead.server
        ahead.server.close()
    return _server(libraries)


def run_ahead(
    verb: str, request: Mapping[str, Any], *, deadline_seconds: float
) -> isolate.WorkerEnd:
    """Run a job in the server that was started ahead; in a process of its own where there is none."""
    if _ahead:
        return _ahead[-1].server.run(verb, request, deadline_seconds=deadline_seconds)
    return isolate.run(verb, request, deadline_seconds=deadline_seconds)


def _server(libraries: Collection[str]) -> ForkServer:
    return ForkServer(command=[*COMMAND, json.dumps(sorted(libraries))])
