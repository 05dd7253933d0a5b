"""Runs commands in the process of the tests, and workers forked from one that has imported all.

For tests of what a command answers: `python -m autotune` takes a second to import what it needs, each
worker three to five. Whether processes start, end and are cleaned up is tested with real ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from autotune import cli
from autotune.nightly import run as nightly
from autotune.predict import trace_servers, tracing
from autotune.records import measurement
from autotune.search import find
from autotune.search.inverse import limits
from autotune.worker.client import forkserver, isolate
from autotune.worker.client.forkserver import ForkServer
from autotune.worker.client.isolate import Reply, WorkerEnd
from autotune.worker.client.orphans import adopt_orphans

SERVER = (sys.executable, "-P", str(Path(__file__).with_name("program_server.py")))
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `autotune ARGUMENTS` in that folder; what the command changed in the process is put back."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        signals_put_back(),
        pytest.raises(SystemExit) as ended,
    ):
        cli.main(arguments)
    code = int(ended.value.code or 0)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def signals_put_back() -> Iterator[None]:
    before = {each: signal.getsignal(each) for each in SIGNALS}
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for each, handler in before.items():
            signal.signal(each, handler)


class Workers:
    """Fork servers that outlive who asks them, as one ForkServer.

    Their folder is that of who asked first: paths must be absolute.
    """

    def __init__(self) -> None:
        self.traces: Path | None = None
        """A folder in which traces are kept for whoever asks for them again."""
        self._free: list[ForkServer] = []
        """Servers that run no job; there is a second one only where jobs run side by side."""

    def close(self) -> None:
        for server in self._free:
            server.close()

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Let no worker start that could be forked, for the length of a `with` block."""
        run_many = isolate.run_many

        def run_forked(
            verb: str,
            requests: Sequence[Mapping[str, Any]],
            *,
            command: Sequence[str] | None = None,
            max_children: int | None = None,
            **rest: Any,
        ) -> tuple[WorkerEnd, ...]:
            if command is not None:
                return run_many(verb, requests, command=command, max_children=max_children, **rest)
            return tuple(self.run(verb, request, **rest) for request in requests)

        with pytest.MonkeyPatch.context() as patch:
            for module in (isolate, tracing):
                patch.setattr(module, "run_many", run_forked)
            for module in (forkserver, find, limits, nightly, trace_servers):
                patch.setattr(module, "ForkServer", lambda **_: _Lent(self))
            # How long a probe times its steps is nothing that a test here asks.
            patch.setitem(measurement.PROBE_SECONDS, "cpu", 0.1)
            # Nor how many micro-batches it trains on with varied lengths: as few as there may be.
            patch.setitem(measurement.VARIED_MICRO_BATCHES, "cpu", 1)
            yield

    def run(
        self,
        verb: str,
        request: Mapping[str, Any],
        *,
        on_answer: Callable[[Reply], None] = lambda _: None,
        **rest: Any,
    ) -> WorkerEnd:
        if verb != "trace" or self.traces is None:
            return self._run(verb, request, on_answer=on_answer, **rest)
        # A trace follows from what was asked, as TraceTable has it too.
        files = {job["id"]: self.traces / _name(request, job) for job in request["traces"]}
        kept = [
            {**json.loads(file.read_text(encoding="utf-8")), "id": number}
            for number, file in files.items()
            if file.exists()
        ]
        for answer in kept:
            on_answer(answer)
        known = {answer["id"] for answer in kept}
        missing = [job for job in request["traces"] if job["id"] not in known]
        if not missing:
            return dataclasses.replace(NOTHING_LEFT, answers=tuple(kept))
        end = self._run(verb, {**request, "traces": missing}, on_answer=on_answer, **rest)
        for answer in end.answers:
            if "crashed" not in answer:
                _keep(files[answer["id"]], answer)
        return dataclasses.replace(end, answers=(*kept, *end.answers))

    def program(
        self, program: str, *arguments: str, cwd: Path = Path(), deadline_seconds: float = 600
    ) -> subprocess.CompletedProcess[str]:
        """Run a Python program, a path or a text, in a process forked for it; see program_server.py."""
        with tempfile.NamedTemporaryFile() as printed:
            request = {
                "program": program,
                "arguments": arguments,
                "folder": str(cwd.absolute()),
                "printed": printed.name,
            }
            end = self._run("program", request, deadline_seconds=deadline_seconds)
            told = Path(printed.name).read_text(encoding="utf-8")
        assert end.how != "timeout", end.problem
        assert end.exit_code is not None
        return subprocess.CompletedProcess(arguments, end.exit_code, told, end.stderr_tail)

    def start(self, verb: str) -> None:
        with self.server() as server:
            server.start(verb)

    def _run(self, verb: str, request: Mapping[str, Any], **rest: Any) -> WorkerEnd:
        with self.server() as server:
            return server.run(verb, request, **rest)

    @contextlib.contextmanager
    def server(self) -> Iterator[ForkServer]:
        """One of the servers, for whoever looks at it, or kills it: its next job starts another."""
        server = self._free.pop() if self._free else _AnyVerb(command=SERVER)
        try:
            with _adopting():
                yield server
        finally:
            self._free.append(server)


class _AnyVerb(ForkServer):
    """A server that is one for all verbs: program_server.py gives a trace its variables."""

    def start(self, verb: str) -> None:
        super().start("probe")


class _Lent:
    """The workers, in the place of a server of one's own: they outlive it."""

    def __init__(self, workers: Workers) -> None:
        self.run = workers.run
        self.start = workers.start

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        pass


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Have a server's orphans adopted, but no orphans of tests beside it: those are init's to reap."""
    before = adopt_orphans()
    try:
        yield
    finally:
        adopt_orphans(before)


NOTHING_LEFT = WorkerEnd(how="ok", exit_code=0, answers=(), problem="", stderr_tail="")


def _name(request: Mapping[str, Any], job: Mapping[str, Any]) -> str:
    """The name of the file for a trace: of all that was asked but its number among others."""
    asked = json.dumps([{**request, "traces": None}, {**job, "id": None}], sort_keys=True)
    return f"{hashlib.sha256(asked.encode()).hexdigest()}.json"


def _keep(file: Path, answer: Reply) -> None:
    """Write a file at once: processes that test beside this one read it."""
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(answer), encoding="utf-8")
    part.replace(file)


workers = Workers()
"""Those of all tests of a process."""
