"""Runs commands in the process of the tests, and workers forked from one that has imported all.

For tests of what a command answers: `python -m autotune` takes a second to import what it needs, each
worker three to five. Whether processes start, end and are cleaned up is tested with real ones.
"""

from __future__ import annotations

import contextlib
import io
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from autotune import cli
from autotune.jobs import serving
from autotune.nightly import run as nightly
from autotune.predict import tracing
from autotune.search import measure_best
from autotune.search.inverse import limits
from autotune.worker.client import forkserver, isolate
from autotune.worker.client.forkserver import ForkServer
from autotune.worker.client.isolate import WorkerEnd
from autotune.worker.client.orphans import adopt_orphans

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `autotune ARGUMENTS` in that folder; what the command changed in the process is put back."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        _signals_put_back(),
        pytest.raises(SystemExit) as ended,
    ):
        cli.main(arguments)
    code = int(ended.value.code or 0)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def _signals_put_back() -> Iterator[None]:
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
        self._servers: dict[bool, ForkServer] = {}

    def close(self) -> None:
        for server in self._servers.values():
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

        # A server has this process adopt orphans, which elsewhere are init's to reap.
        adopted = adopt_orphans(bool(self._servers))
        with contextlib.ExitStack() as stack:
            stack.callback(adopt_orphans, adopted)
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            for module in (isolate, tracing):
                patch.setattr(module, "run_many", run_forked)
            for module in (forkserver, measure_best, limits, serving, nightly):
                patch.setattr(module, "ForkServer", lambda: contextlib.nullcontext(self))
            yield

    def run(self, verb: str, request: Mapping[str, Any], **rest: Any) -> WorkerEnd:
        return self._server(verb).run(verb, request, **rest)

    def start(self, verb: str) -> None:
        self._server(verb).start(verb)

    def _server(self, verb: str) -> ForkServer:
        """The server for a verb.

        A trace needs other variables than the other verbs, for which one server would start anew.
        """
        return self._servers.setdefault(verb == "trace", ForkServer())
