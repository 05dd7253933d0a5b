"""Shares work among processes that are forked from this one, which has imported everything.

Each takes the next piece when it is done with one. What a piece does to its process, it does to that one:
the others go on, and a piece that ended its process is told apart. Nothing is forked where that would not be
safe: beside other threads, whose locks nobody would open in a fork, and elsewhere than on Linux.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from autotune.common import json_lines
from autotune.worker.client.orphans import PARENT_VARIABLE, die_with_parent

MOST_PROCESSES = 4
"""Most processes at once. [judgement] Each takes some 0.1 GB of its own beside what they share."""
_NUMBER_BYTES = 4


@dataclass(frozen=True, slots=True)
class Died:
    """The end of the process that a piece was done in."""

    piece: int
    exit_code: int
    """Exit code as subprocess gives it: minus the signal's number when a signal ended the process."""


def num_processes(num_pieces: int) -> int:
    """How many processes share the work; 1 where it is done in this one."""
    if sys.platform != "linux" or len(os.listdir("/proc/self/task")) > 1:
        return 1
    return min(MOST_PROCESSES, len(os.sched_getaffinity(0)), num_pieces)


def forked(
    work: Callable[[int], dict[str, Any]], num_pieces: int, num_processes: int
) -> Iterator[dict[str, Any] | Died]:
    """Yield what `work` answers for each number below `num_pieces`, in the order in which answers come."""
    queue, numbers = os.pipe()
    # A pipe holds 64 KiB: all the numbers, written before anybody reads.
    os.set_blocking(numbers, False)
    os.write(numbers, b"".join(n.to_bytes(_NUMBER_BYTES, "little") for n in range(num_pieces)))
    os.close(numbers)
    children = [_Child(work, queue) for _ in range(num_processes)]
    os.close(queue)
    running = {child.answers: child for child in children}
    try:
        while running:
            for descriptor in select.select(list(running), [], [])[0]:
                child = running[descriptor]
                yield from child.received()
                if child.has_ended:
                    del running[descriptor]
                    yield from child.end()
    finally:
        for child in running.values():
            child.kill()


class _Child:
    """A forked process: it reads numbers of pieces from a pipe, and writes lines into another.

    A line is the number of a piece that it begins, or the answer for it.
    """

    def __init__(self, work: Callable[[int], dict[str, Any]], queue: int) -> None:
        self.answers, writable = os.pipe()
        self.has_ended = False
        self._rest = b""
        self._begun: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            os.environ[PARENT_VARIABLE] = str(parent)
            _work_off(work, queue, writable)
        os.close(writable)

    def received(self) -> Iterator[dict[str, Any]]:
        """Yield the answers in what has come since the last call."""
        new = os.read(self.answers, 2**20)
        self.has_ended = not new
        *lines, self._rest = (self._rest + new).split(b"\n")
        for line in lines:
            said = json_lines.decode(line)
            self._begun = said if isinstance(said, int) else None
            if isinstance(said, dict):
                yield said

    def end(self) -> Iterator[Died]:
        """Reap the process; yield its end where it was in the middle of a piece."""
        os.close(self.answers)
        _, status = os.waitpid(self._pid, 0)
        if self._begun is not None:
            yield Died(self._begun, os.waitstatus_to_exitcode(status))

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.close(self.answers)
        os.waitpid(self._pid, 0)


def _work_off(work: Callable[[int], dict[str, Any]], queue: int, writable: int) -> NoReturn:
    """Do pieces until there are no more; the life of a child."""
    exit_code = 1
    try:
        die_with_parent()
        with os.fdopen(writable, "wb") as lines:
            while number := os.read(queue, _NUMBER_BYTES):
                piece = int.from_bytes(number, "little")
                lines.write(b"%d\n" % piece)
                lines.flush()
                lines.write(json_lines.encode(work(piece)) + b"\n")
                lines.flush()
        exit_code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
