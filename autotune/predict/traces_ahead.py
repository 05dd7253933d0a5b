"""Traces that a later question may ask for, made while the answer to this one is worked out and written.

A server that has traced what a search needs has nothing to do, and a second core neither: what less memory
would try is traced there, one step after the other, and kept in the cache. Nothing waits for it, nothing
outlives the command, and what is not done by its end is left to who asks for it.
"""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from autotune.common import log
from autotune.errors import AutotuneError
from autotune.predict.trace_jobs import job_of, kept_by
from autotune.predict.trace_servers import block_ahead
from autotune.predict.tracing import of_unlike_gpus
from autotune.records.estimate import TraceSpec
from autotune.store.trace_cache import TraceCache
from autotune.worker.client.forkserver import ForkServer

_log = log.logger(__name__)


class TracesAhead:
    """The traces that a server makes for the cache while nobody else asks it."""

    def __init__(
        self, server: ForkServer, shared: Mapping[str, Any], cache: TraceCache | None
    ) -> None:
        """Remember what there is; nothing is traced. `shared`: what a request says of all its traces."""
        self._server = server
        self._shared = shared
        self._cache = cache
        self._running = contextlib.ExitStack()
        self._new_answers: Callable[[], list[dict[str, Any]]] | None = None
        self._kept_by: list[str] = []

    @property
    def is_running(self) -> bool:
        """Whether something is being traced."""
        return self._new_answers is not None

    def go_on(self, specs: Callable[[], Iterable[TraceSpec]]) -> None:
        """Trace in the background what the cache lacks of these, the first ones first.

        Not by a server that still imports, nor where that would take the only core from the command. Without
        a block that a server was started ahead for there would be no time for it.
        """
        if self._cache is None or self.is_running or block_ahead() is None:
            return
        if self._server.last_fork is None or len(os.sched_getaffinity(0)) < 2:
            return
        texts = {
            kept_by(self._shared, spec): spec for one in specs() for spec in of_unlike_gpus(one)
        }
        known = self._cache.find_texts(texts)
        wanted = {text: spec for text, spec in texts.items() if text not in known}
        if not wanted:
            return
        jobs = [job_of(number, spec) for number, spec in enumerate(wanted.values())]
        request = {**self._shared, "traces": jobs, "ahead": True}
        self._kept_by = list(wanted)
        with _or_a_note():
            run = self._server.in_background("trace", request)
            self._new_answers = self._running.enter_context(run)

    def stop(self) -> None:
        """End what is being traced; keep what is done."""
        new_answers, self._new_answers = self._new_answers, None
        if new_answers is None or self._cache is None:
            return
        with _or_a_note():
            answers = new_answers()
            self._running.close()
            self._cache.add_packed(
                {self._kept_by[each["id"]]: base64.b64decode(each["packed"]) for each in answers}
            )
            _log.info("%d of %d traces were made ahead", len(answers), len(self._kept_by))

    def end(self) -> None:
        """End the server with what it traces; keep what is done."""
        self.stop()
        self._server.close()


@contextlib.contextmanager
def traces_ahead(
    server: ForkServer, shared: Mapping[str, Any], cache: TraceCache | None
) -> Iterator[TracesAhead]:
    """Yield what may trace ahead. The server ends with it; if it traces then, with the block around both."""
    ahead = TracesAhead(server, shared, cache)
    try:
        yield ahead
    except BaseException:
        ahead.end()
        raise
    block = block_ahead()
    if ahead.is_running and block is not None:
        block.callback(ahead.end)
    else:
        ahead.end()


@contextlib.contextmanager
def _or_a_note() -> Iterator[None]:
    """Let nothing that befalls such traces stop the command."""
    try:
        yield
    except (AutotuneError, OSError) as error:
        _log.info("nothing is traced ahead: %s", error)
