"""The traces that one request asks for: those that the cache has, those that come, those that never will."""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from autotune.common import json_lines, log
from autotune.errors import WorkerError
from autotune.memory.traces import BrokenTrace, LaterTrace, Trace, on_card_with
from autotune.records.estimate import TraceSpec
from autotune.store.trace_cache import TraceCache
from autotune.worker.client.isolate import WorkerEnd, describe_exit

_log = log.logger(__name__)

MAX_PARAMETERS = 10**13
"""Most parameters of a model that is traced: sixteen cards of 288 GB hold less, at half a byte each."""


class _Refusal(msgspec.Struct):
    """The part of an answer that says why there is no trace."""

    unsupported: str | None = None


class TraceJobs:
    """The traces that are wanted, those that are here, and those that never will be."""

    def __init__(
        self,
        specs: Iterable[TraceSpec],
        keep: Callable[[TraceSpec, Trace], None],
        on_trace: Callable[[int, int], None] | None,
        *,
        operations: bool,
        shared: Mapping[str, Any],
    ) -> None:
        """`shared`: what is asked for of all of them."""
        self._operations = operations
        self._shared = shared
        self._specs = sorted(specs, key=repr)
        self._whole: set[int] = set()
        self._answered: set[int] = set()
        self._keep = keep
        self._on_trace = on_trace
        self.traces: dict[TraceSpec, Trace] = {}
        self.refused: dict[int, str] = {}
        self.crash: WorkerError | None = None
        self._tracebacks: dict[str, str] = {}
        """A traceback for each reason."""
        self._new: dict[int, dict[str, Any]] = {}

    def take_known(self, cache: TraceCache) -> None:
        """Take the stored answers, each to what was asked last: of every layer, where that was needed.

        Those that are kept add up, so they are read when they are needed.
        """
        known = cache.find_texts([self._request(number) for number in range(len(self._specs))])
        for number, spec in enumerate(self._specs):
            text = known.get(self._request(number))
            if text is None:
                continue
            try:
                refusal = msgspec.json.decode(text, type=_Refusal)
            except ValueError:  # Spoilt: it is traced again.
                continue
            if refusal.unsupported is not None:
                self.refused[number] = refusal.unsupported
            else:
                read = functools.partial(self._read, text)
                self.traces[spec] = trace = LaterTrace(read, self._identity(number), adds_up=True)
                self._keep(spec, trace)
        if known:  # All at once: who looks at what is there so far need not look at a part of it.
            self._tell()

    def keep_new(self, cache: TraceCache) -> None:
        if self._new:
            cache.add({self._request(n): said for n, said in self._new.items()})

    def _read(self, text: bytes) -> dict[str, Any]:
        answer: dict[str, Any] = json_lines.decode(text)["trace"]
        on_card_with(self._shared["num_sms"], answer["tensors"])
        return answer

    def why_refused(self) -> dict[TraceSpec, str]:
        return {self._specs[number]: why for number, why in self.refused.items()}

    def log_refused(self) -> None:
        """Log what cannot be traced, counted by the reason."""
        for reason, count in Counter(self.refused.values()).most_common():
            _log.info(
                "%d of %d training steps cannot be traced: %s", count, len(self._specs), reason
            )
            for line in self._tracebacks.get(reason, "").splitlines():
                _log.debug("%s", line)

    def _identity(self, number: int) -> str:
        """Return the trace's identity, which is that of cards of one number of multiprocessors."""
        text = f"{self._request(number)} {self._shared['num_sms']}"
        return hashlib.sha256(text.encode()).hexdigest()

    def _request(self, number: int) -> str:
        return kept_by(self._shared, self._specs[number])

    def left(self) -> list[dict[str, Any]]:
        """List what is left to ask for."""
        self._answered.clear()
        return [
            job_of(number, spec, whole=number in self._whole, operations=self._operations)
            for number, spec in enumerate(self._specs)
            if number not in self.refused and spec not in self.traces
        ]

    def take(self, answer: dict[str, Any]) -> None:
        """Take an answer of a worker: a trace, or why there is none."""
        self._keep_answer(answer)
        self._tell()

    def _tell(self) -> None:
        if self._on_trace is not None:
            self._on_trace(len(self.traces) + len(self.refused), len(self._specs))

    def _keep_answer(self, answer: dict[str, Any]) -> None:
        number = answer["id"]
        self._answered.add(number)
        if "unsupported" in answer:
            self.refused[number] = answer["unsupported"]
            self._new[number] = answer
        elif "died" in answer:
            problem = describe_exit(answer["died"])
            self._set_aside(number, problem)
            self.crash = WorkerError(f"The trace process {problem}")
        elif "crashed" in answer:  # Perhaps a mistake, so it is not kept.
            self.refused[number] = answer["crashed"]
            self._tracebacks[answer["crashed"]] = answer["traceback"]
        else:
            try:
                on_card_with(self._shared["num_sms"], answer["trace"]["tensors"])
                trace = Trace(answer["trace"])
                trace.identity = "" if self._operations else self._identity(number)
                total, _ = trace.num_parameters(1)
                if total > MAX_PARAMETERS:
                    self.refused[number] = f"{total:,} parameters are more than any machine holds"
                else:
                    self.traces[self._specs[number]] = trace
                    self._keep(self._specs[number], trace)
                    self._new[number] = answer
            except OverflowError:
                self.refused[number] = "its training step is too large to be counted"
            except BrokenTrace as error:
                if number in self._whole:
                    self.refused[number] = f"the trace does not add up: {error}"
                self._whole.add(number)

    def blame(self, asked: list[dict[str, Any]], end: WorkerEnd) -> None:
        """Set aside the spec that the worker died of: answers come in order, so the first without one.

        Raises WorkerError for every other failure than a crash.
        """
        self.crash = end.to_error("trace")
        unanswered = [job["id"] for job in asked if job["id"] not in self._answered]
        if end.how != "crashed" or not unanswered:
            raise self.crash
        self._set_aside(unanswered[0], end.problem)

    def _set_aside(self, number: int, problem: str) -> None:
        self.refused[number] = f"tracing it ended the process: {problem}"


def job_of(
    number: int, spec: TraceSpec, *, whole: bool = False, operations: bool = False
) -> dict[str, Any]:
    """Return what a request says of one of its traces."""
    return {"id": number, "spec": _plain(spec), "whole": whole, "operations": operations}


def kept_by(shared: Mapping[str, Any], spec: TraceSpec) -> str:
    """Return the text that a trace is kept by.

    Cards that differ only in multiprocessors or L2 cache share it where the trace does not depend on them.

    `shared`: what is asked for of all of a request.
    """
    # Liger's kernels are launched by the multiprocessors; Inductor times its own beside an L2 cache.
    asked = {
        **shared,
        **({} if spec.liger else {"num_sms": None}),
        **({} if spec.is_compiled else {"l2_bytes": None}),
    }
    return json.dumps([asked, _plain(spec)], sort_keys=True)


def _plain(spec: TraceSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in TraceSpec.__slots__}
