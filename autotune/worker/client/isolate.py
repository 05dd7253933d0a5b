"""Runs a worker: a child process that may crash, hang or talk nonsense without hurting the parent.

The contract, whole:

- The command is `python -m autotune.worker REQUEST.json RESULT.jsonl`. Both files lie in a private
  folder that the parent makes and removes.
- REQUEST.json, written by the parent: `{"schema_version": int, "verb": str, "request": {...}}`. A `folder` in
  the request is another private folder, for what the child writes.
- RESULT.jsonl, appended to by the child: one JSON object per line and per answer, flushed as soon
  as it is known. A last line without its line break was being written when the child died: it is
  counted and not read. Any other line that is no JSON object makes the result unreadable.
- What the child prints, on stdout or stderr, is kept as text and never parsed.
- Exit code 0 means that every answer was written.
- The child leads a process group. The group gets TERM at the deadline and KILL one second later,
  and whatever is left of it is killed when the child ends. The child calls
  `autotune.worker.client.orphans.die_with_parent`.

Needs POSIX process groups. The death of the parent is noticed on Linux only; elsewhere an orphan
ends when its request is done. Borrowed in outline from pyperf and pyproject-hooks (docs/STYLE.md).

autotune.worker.client.forkserver keeps this contract with children that are forked instead of started: what
differs is a Launch.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from autotune.common import json_lines, log
from autotune.errors import WorkerError
from autotune.records.estimate import SCHEMA_VERSION
from autotune.worker.client import launching
from autotune.worker.client.launching import ChildJob, Launch, Process

_log = log.logger(__name__)

Reply = dict[str, Any]
"""One JSON object from the child."""

POLL_SECONDS = 0.02
GRACE_SECONDS = 1.0
"""Time that a child gets between TERM and KILL."""
MAX_STDERR_BYTES = 64 * 2**10
MAX_LOGGED_LINES = 60
"""Most lines that are logged of what a child printed that did not end well: a traceback through Trainer has
some 40."""
MAX_CHILDREN = 2
"""Most children at once: more would compete for the memory of a small machine, as importing torch takes 0.3
GiB each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerEnd:
    """The end of one child.

    The answers that came before the end are kept whatever it was.
    """

    how: str
    """Kind of the end: ok, crashed, timeout or unreadable."""
    exit_code: int
    """Exit code as subprocess gives it: minus the signal's number when a signal ended the child."""
    answers: tuple[Reply, ...]
    problem: str
    """The problem in one clause; empty when ok."""
    stderr_tail: str
    """The last MAX_STDERR_BYTES that the child printed."""

    @property
    def last_words(self) -> str:
        """The line that the child ended with, as last_line picks it."""
        return last_line(self.stderr_tail)

    def to_error(self, verb: str) -> WorkerError:
        """The error for a caller that cannot go on without the missing answers."""
        last_words = self.last_words[:500]
        if self.exit_code == -signal.SIGKILL and self.how == "crashed":
            last_words = last_words or "The kernel kills a process when memory runs out"
        return WorkerError(f"The {verb} process {self.problem}", why=last_words)


def run(
    verb: str,
    request: Mapping[str, Any],
    *,
    deadline_seconds: float,
    answers_renew: bool = False,
    on_answer: Callable[[Reply], None] | None = None,
    command: Sequence[str] | None = None,
) -> WorkerEnd:
    """Run one child to its end; see `run_many`."""
    (end,) = run_many(
        verb,
        [request],
        deadline_seconds=deadline_seconds,
        answers_renew=answers_renew,
        on_answer=on_answer,
        command=command,
    )
    return end


def run_many(
    verb: str,
    requests: Sequence[Mapping[str, Any]],
    *,
    deadline_seconds: float,
    answers_renew: bool = False,
    on_answer: Callable[[Reply], None] | None = None,
    command: Sequence[str] | None = None,
    max_children: int | None = None,
) -> tuple[WorkerEnd, ...]:
    """Run a child per request, at most `max_children` at once; return their ends in order.

    `command` replaces `python -m autotune.worker`; for the rest see `run_jobs`.
    """
    return run_jobs(
        verb,
        requests,
        launch=functools.partial(launching.spawn, command or launching.worker_command()),
        deadline_seconds=deadline_seconds,
        answers_renew=answers_renew,
        on_answer=on_answer,
        max_children=max_children,
    )


def run_jobs(
    verb: str,
    requests: Sequence[Mapping[str, Any]],
    *,
    launch: Launch,
    deadline_seconds: float,
    answers_renew: bool = False,
    on_answer: Callable[[Reply], None] | None = None,
    on_poll: Callable[[], None] | None = None,
    max_children: int | None = None,
) -> tuple[WorkerEnd, ...]:
    """Launch a child per request and follow it to its end; return the ends in order.

    `deadline_seconds` counts for each child from its own start, or, where `answers_renew` it, from its last
    answer. `on_answer` is called from this
    thread, in the order in which answers of all the children arrive, and `on_poll` several times a second.
    However the call is left (Ctrl-C, an exception out of one of them), no child outlives it.

    Raises WorkerError when a request cannot be written or a child cannot be started.
    """
    if max_children is None:
        max_children = min(MAX_CHILDREN, os.cpu_count() or 1)
    ends: dict[int, WorkerEnd] = {}
    running: dict[int, _Child] = {}
    with contextlib.ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(private_folder()))
        while len(ends) < len(requests):
            while len(running) < max_children and len(running) + len(ends) < len(requests):
                index = len(running) + len(ends)
                child = _Child(verb, requests[index], folder / str(index))
                cleanup.callback(child.close)
                child.start(launch, deadline_seconds, answers_renew=answers_renew)
                running[index] = child
            for index, child in list(running.items()):
                # Asked before the answers are read: nothing can be written after the end.
                is_over = child.is_over()
                for answer in child.read_answers():
                    if on_answer is not None:
                        on_answer(answer)
                if is_over or child.is_spoilt():
                    ends[index] = running.pop(index).end()
            if on_poll is not None:
                on_poll()
            if running:
                time.sleep(POLL_SECONDS)
    return tuple(ends[index] for index in range(len(requests)))


@contextlib.contextmanager
def in_background(
    verb: str, request: Mapping[str, Any], *, launch: Launch
) -> Iterator[Callable[[], list[Reply]]]:
    """Run a child that nobody waits for; yield what returns the answers that are new. It ends with the block.

    Raises WorkerError when the request cannot be written or the child cannot be started.
    """
    with contextlib.ExitStack() as cleanup:
        child = _Child(verb, request, Path(cleanup.enter_context(private_folder())) / "0")
        cleanup.callback(child.close)
        child.start(launch, math.inf, answers_renew=False)
        yield child.read_answers


class _Child:
    """A child and its files."""

    def __init__(self, verb: str, request: Mapping[str, Any], folder: Path) -> None:
        self._job = ChildJob(
            verb=verb,
            request_path=folder / "request.json",
            result_path=folder / "result.jsonl",
            printed_path=folder / "printed.txt",
            folders=(str(folder.parent), *filter(None, [request.get("folder")])),
        )
        self._answers: list[Reply] = []
        self._rest = b""
        self._problem = ""
        self._how = "ok"
        self._process: Process | None = None
        self._exit_code: int | None = None
        content = {"schema_version": SCHEMA_VERSION, "verb": verb, "request": request}
        text = json.dumps(content, allow_nan=False)
        try:
            folder.mkdir(mode=0o700)
            self._job.request_path.write_text(text, encoding="utf-8")
            self._job.result_path.touch()
            self._job.printed_path.touch()
        except OSError as error:
            raise _no_room(error) from error
        self._result = self._job.result_path.open("rb", buffering=0)

    def start(self, launch: Launch, deadline_seconds: float, *, answers_renew: bool) -> None:
        self._process = launch(self._job)
        self._started = self._counted_from = time.monotonic()
        self._deadline_seconds = deadline_seconds
        self._answers_renew = answers_renew

    def is_over(self) -> bool:
        """Whether the child has ended, or was ended because its deadline has passed."""
        assert self._process is not None
        if self._process.has_exited():
            return True
        if time.monotonic() < self._counted_from + self._deadline_seconds:
            return False
        self._how = "timeout"
        done = "answer" if self._answers_renew else "finish"
        self._problem = f"did not {done} within {self._deadline_seconds:g} s"
        self._stop()
        return True

    def is_spoilt(self) -> bool:
        return self._how == "unreadable"

    def read_answers(self) -> list[Reply]:
        """Return the answers that have arrived since the last call, up to the first unreadable line."""
        new: list[Reply] = []
        *lines, self._rest = (self._rest + (self._result.readall() or b"")).split(b"\n")
        for line in lines:
            answer = _parse(line)
            if answer is None:
                self._spoil(len(self._answers) + len(new) + 1, line)
                break
            new.append(answer)
        if new and self._answers_renew:
            self._counted_from = time.monotonic()
        self._answers += new
        return new

    def _spoil(self, number: int, line: bytes) -> None:
        # A deadline that has passed already is the better explanation.
        if self._how == "ok":
            self._how = "unreadable"
            self._problem = f"wrote a line {number} that is no JSON object: {line[:80]!r}"

    def end(self) -> WorkerEnd:
        self._stop()
        exit_code = self._reap()
        if self._how == "ok" and exit_code != 0:
            self._how, self._problem = "crashed", describe_exit(exit_code)
        elif self._how == "ok" and self._rest:
            self._how = "unreadable"
            self._problem = f"ended well, but line {len(self._answers) + 1} is cut off"
        with self._job.printed_path.open("rb") as printed:
            stderr_tail = tail(printed, MAX_STDERR_BYTES)
        end = WorkerEnd(
            how=self._how,
            exit_code=exit_code,
            answers=tuple(self._answers),
            problem=self._problem,
            stderr_tail=stderr_tail,
        )
        seconds, verb = time.monotonic() - self._started, self._job.verb
        _log.info("worker %s: %s, %d answers, %.2f s", verb, end.how, len(end.answers), seconds)
        if end.how != "ok":
            _log.warning("worker %s %s", verb, end.problem)
            for line in end.stderr_tail.splitlines()[-MAX_LOGGED_LINES:]:
                _log.warning("worker %s: %s", verb, line)
        return end

    def close(self) -> None:
        """Kill what still runs and close what is open.

        It is safe to call this twice.
        """
        try:
            self._stop()
        finally:
            self._result.close()
            if self._process is not None:
                self._reap()

    def _stop(self) -> None:
        """End the group: TERM, a second, KILL; at once KILL if the child has exited already."""
        process = self._process
        if process is None or self._exit_code is not None:
            return
        try:
            if not process.has_exited():
                process.signal(signal.SIGTERM)
                give_up = time.monotonic() + GRACE_SECONDS
                while not process.has_exited() and time.monotonic() < give_up:
                    time.sleep(POLL_SECONDS)
        finally:
            # A second Ctrl-C during the wait comes here too.
            process.signal(signal.SIGKILL)

    def _reap(self) -> int:
        assert self._process is not None
        if self._exit_code is None:
            self._exit_code = self._process.reap()
        return self._exit_code


def private_folder() -> tempfile.TemporaryDirectory[str]:
    """Make a folder for this user alone, which is removed at the end of the `with` block.

    Raises WorkerError.
    """
    try:
        return tempfile.TemporaryDirectory(prefix="autotune-", ignore_cleanup_errors=True)
    except OSError as error:
        raise _no_room(error) from error


def _no_room(error: OSError) -> WorkerError:
    return WorkerError(
        "The request for the worker could not be written",
        why=f"{error.filename or 'temporary folder'}: {error.strerror or error}",
        remedy="Free some space there, or let TMPDIR name a folder that can be written",
    )


def _parse(line: bytes) -> Reply | None:
    try:
        value = json_lines.decode(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def describe_exit(exit_code: int) -> str:
    """Describe the end of a process in one clause, from its exit code as subprocess gives it."""
    if exit_code > 0:
        return f"ended with exit code {exit_code}"
    try:
        return f"was ended by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was ended by signal {-exit_code}"


def tail(file: IO[bytes], max_bytes: int) -> str:
    """Read the end of what a process printed to that file."""
    size_bytes = file.seek(0, os.SEEK_END)
    file.seek(max(0, size_bytes - max_bytes))
    return file.read().decode("utf-8", errors="replace")


def last_line(printed: str) -> str:
    """The line that a process ended with: the last one that is an exception's own, else the last of all.

    Libraries may print further lines after an exception.
    """
    lines = printed.strip().splitlines()
    tracebacks = [n for n, line in enumerate(lines) if line.startswith("Traceback (most recent")]
    after = lines[tracebacks[-1] + 1 :] if tracebacks else []
    of_exception = [line for line in after if line and not line[0].isspace()]
    return (of_exception or lines[-1:] or [""])[0]
