"""Runs workers as isolate.run does, in processes forked from one that has imported everything.

A probe must not share a process with an earlier one, and should not pay for its imports again: a
server (autotune.worker.server, with its control messages) imports once and forks a process per job.
Deadlines, answers and ends are isolate's; only the launch differs.

- Parent killed: the server ends, kills the job with all that it started, and removes the job's folders.
- Server killed: the job dies with it and is reported as crashed; the next job gets a new server.
- Job killed: reported as crashed; the server goes on.
- Server and parent killed at once: the job dies too; what the job itself started may outlive it.

Where forking would not be safe (not Linux; a library that starts threads or CUDA as it is
imported), every job is a fresh process, and `unfit_reason` says why. While a server runs, orphans
among this process's descendants become its children. To be used from one thread, whose end would
end the server. Run on an H200 (studies/h200).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from autotune.errors import WorkerError
from autotune.worker.client import isolate, launching
from autotune.worker.client.orphans import adopt_orphans

COMMAND = (sys.executable, "-P", "-m", "autotune.worker.server")
"""The command of a server that imports what every verb needs."""
READY_SECONDS = 180.0
"""Time that a server may take for its imports: 4 s here, a minute from a cold network disk."""
CLOSE_SECONDS = 1.0
PATIENCE_SECONDS = 30.0
"""Time that a killed process may take to go: a driver may take seconds to give its memory back."""
MAX_STARTS = 2

_TAIL_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Fork:
    """The state of the server just before it forked a job."""

    pid: int
    """Process id of the job."""
    server_pid: int
    num_threads: int
    """Number of the server's threads."""
    cuda_initialized: bool
    """Whether CUDA is initialised, by what torch or the driver says."""
    cuda_device_open: bool
    """Whether a CUDA context exists, by what the kernel says, whichever library made it."""


class ForkServer:
    """Runs jobs one after the other, each in a process forked for it.

    The server is started with the first job and anew when it has died or when a job needs other
    environment variables. `close`, or the end of the `with` block, ends it.
    """

    def __init__(
        self, *, command: Sequence[str] | None = None, fresh_command: Sequence[str] | None = None
    ) -> None:
        """Remember the commands; nothing is started.

        `command` replaces the server's, `fresh_command` that of jobs that are not forked.
        """
        self._command = list(COMMAND)
        if command is not None:
            self._command = list(command)
        self._fresh_command = fresh_command or launching.worker_command()
        self._server: _Server | None = None
        self.last_fork: Fork | None = None
        self.unfit_reason = "" if sys.platform == "linux" else "forks are safe on Linux only"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exception_class: type[BaseException] | None,
        exception: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def server_pid(self) -> int | None:
        return None if self._server is None else self._server.pid

    def run(
        self,
        verb: str,
        request: Mapping[str, Any],
        *,
        deadline_seconds: float,
        answers_renew: bool = False,
        on_answer: Callable[[isolate.Reply], None] | None = None,
        on_poll: Callable[[], None] | None = None,
    ) -> isolate.WorkerEnd:
        """Run one job to its end, as isolate.run_jobs does.

        The imports do not count for its deadline. Raises WorkerError when no server can be started or the
        request cannot be written.
        """
        # Before there is a folder, which the server removes if this process is killed.
        self.start(verb)
        (end,) = isolate.run_jobs(
            verb,
            [request],
            launch=self._launch,
            deadline_seconds=deadline_seconds,
            answers_renew=answers_renew,
            on_answer=on_answer,
            on_poll=on_poll,
        )
        return end

    def in_background(
        self, verb: str, request: Mapping[str, Any]
    ) -> AbstractContextManager[Callable[[], list[isolate.Reply]]]:
        """Run one job as isolate.in_background does; no other runs before the end of the block."""
        self.start(verb)
        return isolate.in_background(verb, request, launch=self._launch)

    def start(self, verb: str) -> None:
        """Let a server import what jobs of this verb need, without waiting for it."""
        environment = launching.worker_environment(verb)
        if self._server is not None and not self._server.suits(environment):
            self.close()
        if self._server is None and not self.unfit_reason:
            self._server = _Server(self._command, environment)

    def close(self) -> None:
        """End the server and the job that it runs.

        It is safe to call this twice; a later job starts another server.
        """
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def _launch(self, job: launching.ChildJob) -> launching.Process:
        self.last_fork = None
        for num_starts_left in reversed(range(MAX_STARTS)):
            self.start(job.verb)
            if self._server is None:
                break
            try:
                self.last_fork = self._server.fork(job)
                return self._server
            except _Unfit as error:
                self.unfit_reason = str(error)
                self.close()
            except _ServerGone as error:
                # The job had not begun.
                self.close()
                if num_starts_left == 0:
                    raise WorkerError("The fork server failed", why=str(error)) from error
            except BaseException:
                self.close()
                raise
        return launching.spawn(self._fresh_command, job)


class _ServerGone(Exception):
    """The server died, or did not answer in time; the message has its last words."""


class _Unfit(Exception):
    """The server will not fork; the message says why."""


_running: list[_Server] = []
"""Servers of this process that are not closed, in the order in which they were started."""


class _Server:
    """A server process, and the launching.Process of its one job.

    The server is not reaped before `close`, so that its id stays its own.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._is_closed = False
        self._has_hung_up = False
        self._unfit_reason = ""
        self._fork: Fork | None = None
        self._exit_code: int | None = None
        self._is_job_gone = True
        self._rest = b""
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close)
        self._adopted_before = adopt_orphans()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._printed,
                env=environment,
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            self._printed.close()
            adopt_orphans(self._adopted_before)
            raise WorkerError(
                "The fork server could not be started", why=f"{command[0]}: {error.strerror}"
            ) from error
        _running.append(self)
        self.pid = self._process.pid
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._replies = self._process.stdin, self._process.stdout

    def suits(self, environment: Mapping[str, str]) -> bool:
        """Whether the server still runs and its jobs see these variables."""
        if self._is_closed or environment != self._environment:
            return False
        return not launching.has_ended(self.pid)

    def fork(self, job: launching.ChildJob) -> Fork:
        """Start a job.

        Raises _Unfit or _ServerGone: then it has not begun.
        """
        assert self._is_job_gone
        self._fork = self._exit_code = None
        self._is_job_gone = False
        self._send(
            job={
                "request": str(job.request_path),
                "result": str(job.result_path),
                "printed": str(job.printed_path),
                "folders": job.folders,
            }
        )
        return self._started()

    def has_exited(self) -> bool:
        self._read(0)
        if self._has_hung_up and not self._is_job_gone:
            self.close()
        return self._is_job_gone

    def signal(self, number: int) -> None:
        if not self._is_job_gone:
            # One that is gone takes its job with it.
            with contextlib.suppress(_ServerGone):
                self._send(signal=int(number))

    def reap(self) -> int:
        give_up = time.monotonic() + PATIENCE_SECONDS
        while not self.has_exited() and time.monotonic() < give_up:
            self._read(isolate.POLL_SECONDS)
        if not self._is_job_gone:
            self.close()
        assert self._exit_code is not None
        return self._exit_code

    def close(self) -> None:
        """End the server and its job, and reap both.

        It is safe to call this twice.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._requests.close()
        # One that still imports reads nothing, and has nothing to end.
        give_up = time.monotonic() + (0.0 if self._fork is None else CLOSE_SECONDS)
        while not launching.has_ended(self.pid) and time.monotonic() < give_up:
            self._read(isolate.POLL_SECONDS)
        os.kill(self.pid, signal.SIGKILL)
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        # From here on a job that is left is a child of this process.
        while self._read(0):
            pass
        if not self._is_job_gone:
            self._bury_job()
        # A job that was not let go yet is in the server's group.
        os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        _reap_group(self.pid)
        self._replies.close()
        self._printed.close()
        self._end_adoption()

    def _end_adoption(self) -> None:
        """Adopt orphans no longer, unless a server that was started after this one still runs."""
        later = _running[_running.index(self) + 1 :]
        _running.remove(self)
        if later:
            later[0]._adopted_before = self._adopted_before
        else:
            adopt_orphans(self._adopted_before)

    def _bury_job(self) -> None:
        """Kill and reap the job of a dead server."""
        self._is_job_gone = True
        exit_code = -int(signal.SIGKILL)
        if self._fork is not None:
            pid = self._fork.pid
            # ChildProcessError: no child, so the server has killed its group and reaped it.
            with contextlib.suppress(ChildProcessError):
                launching.has_ended(pid)
                for send in (os.killpg, os.kill):
                    # It leads no group yet when it was just let go.
                    with contextlib.suppress(ProcessLookupError):
                        send(pid, signal.SIGKILL)
                give_up = time.monotonic() + PATIENCE_SECONDS
                while not launching.has_ended(pid) and time.monotonic() < give_up:
                    time.sleep(isolate.POLL_SECONDS)
                if launching.has_ended(pid):
                    exit_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            _reap_group(pid)
        if self._exit_code is None:
            self._exit_code = exit_code

    def _send(self, **message: object) -> None:
        try:
            self._requests.write(json.dumps(message).encode() + b"\n")
        except (BrokenPipeError, ValueError) as error:
            raise _ServerGone(self._last_words()) from error

    def _started(self) -> Fork:
        """Wait for what the server says of its fork; before its first it imports."""
        give_up = time.monotonic() + READY_SECONDS
        while self._fork is None:
            if self._unfit_reason:
                self._is_job_gone = True
                raise _Unfit(self._unfit_reason)
            if self._has_hung_up:
                raise _ServerGone(self._last_words())
            if time.monotonic() > give_up:
                raise _ServerGone(f"no answer within {READY_SECONDS:g} s")
            self._read(isolate.POLL_SECONDS)
        return self._fork

    def _read(self, timeout_seconds: float) -> bool:
        """Take in the messages that are there or arrive in time; return whether there were any."""
        if self._has_hung_up:
            time.sleep(timeout_seconds)
            return False
        if not select.select([self._replies], [], [], timeout_seconds)[0]:
            return False
        received = os.read(self._replies.fileno(), 65536)
        self._has_hung_up = not received
        *lines, self._rest = (self._rest + received).split(b"\n")
        for line in lines:
            self._take(json.loads(line))
        return bool(received)

    def _take(self, message: dict[str, Any]) -> None:
        match message:
            case {"started": pid, "state": state}:
                self._fork = Fork(pid=pid, server_pid=self.pid, **state)
            case {"unfit": reason}:
                self._unfit_reason = reason
            case {"exited": exit_code}:
                self._exit_code = exit_code
            case {"gone": _}:
                self._is_job_gone = True

    def _last_words(self) -> str:
        printed = isolate.tail(self._printed, _TAIL_BYTES)
        return isolate.last_line(printed) or "It ended without a word"


def _reap_group(group: int) -> None:
    """Reap the killed and adopted processes of a group; one that does not die in time is left to init."""
    give_up = time.monotonic() + PATIENCE_SECONDS
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < give_up:
            if os.waitpid(-group, os.WNOHANG) == (0, 0):
                time.sleep(isolate.POLL_SECONDS)
