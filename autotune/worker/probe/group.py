"""Processes that run one probe together, a GPU for each, as `accelerate launch` would start them.

The worker's process forks them before it has used a device, hosts the store at which they meet, and reads
their answers. The first of them that does not end well ends all: what it says is what became of the probe.
No library notices that in time: the others would wait in a collective for up to half an hour.

Not yet run on a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

import torch

from autotune.records.measurement import Measurement
from autotune.worker.client.orphans import PARENT_VARIABLE, die_with_parent

HOST = "127.0.0.1"
FORK = multiprocessing.get_context("fork")
KILL_SECONDS = 5.0
"""Time for a process that was killed to be gone."""
MEETING_SECONDS = 600.0
"""Longest wait for another process to come to where all agree. [judgement] Whoever comes late has failed, and
the worker ends all before."""

KILLED_SECONDS = 1.0
"""Time for the kernel to say that a process was killed, which closes its connections first. [judgement]"""

OnProgress = Callable[[dict[str, Any]], None]
Measure = Callable[["Rank", OnProgress], Measurement]
"""A function that measures in one of the processes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """One of the processes that run a probe; ALONE where there is one."""

    number: int = 0
    meeting: Meeting | None = None

    def all_agree(self, vote: bool) -> bool:
        """Whether all processes say so; each must ask as often as the others."""
        return vote if self.meeting is None else all(self.meeting.votes(vote))

    def first_says(self, vote: bool) -> bool:
        """Return the vote of the first process; each must ask as often as the others."""
        return vote if self.meeting is None else self.meeting.votes(vote)[0]


class Meeting:
    """Tells the votes of all processes to each of them, through the store."""

    def __init__(self, port: int, number: int, num_ranks: int) -> None:
        store = torch.distributed.TCPStore(
            HOST, port, is_master=False, timeout=timedelta(seconds=MEETING_SECONDS)
        )
        self._store = torch.distributed.PrefixStore("autotune", store)
        self._number, self._num_ranks = number, num_ranks
        self._num_votes = 0

    def votes(self, vote: bool) -> list[bool]:
        """Everybody's vote, in order; waits for all."""
        self._num_votes += 1
        self._store.set(f"{self._num_votes}/{self._number}", str(int(vote)))
        return [
            self._store.get(f"{self._num_votes}/{number}") == b"1"
            for number in range(self._num_ranks)
        ]


ALONE = Rank()


@dataclass(frozen=True, slots=True)
class _Raised:
    """An error of one process, which it tells before it ends."""

    why: str


def run(
    num_ranks: int, variables: Mapping[str, str], measure: Measure
) -> Iterator[dict[str, Any] | Measurement]:
    """Measure with so many processes; yield what the first one tells while it runs, then the measurement.

    `variables`: of their environment, beside those that tell a process who it is.

    A process that dies takes this one with it, by the same signal; one that raises ends it with exit code 1.
    """
    pipes: list[Connection] = []
    processes: list[BaseProcess] = []
    with contextlib.ExitStack() as cleanup:
        for number in range(num_ranks):
            ours, theirs = FORK.Pipe()
            process = FORK.Process(
                target=_be, args=(number, num_ranks, theirs, variables, measure), daemon=True
            )
            process.start()
            cleanup.callback(_end, process)
            # Its end is heard where nobody else holds the pipe: those that start later do not inherit it.
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        # Not before the forks: it has threads.
        store = torch.distributed.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        for pipe in pipes:
            pipe.send(store.port)
        yield from _follow(pipes, processes)


def _follow(
    pipes: list[Connection], processes: list[BaseProcess]
) -> Iterator[dict[str, Any] | Measurement]:
    measured: dict[int, Measurement] = {}
    while len(measured) < len(pipes):
        ready = wait([pipe for number, pipe in enumerate(pipes) if number not in measured])
        for pipe in ready:
            assert isinstance(pipe, Connection)
            number = pipes.index(pipe)
            try:
                said = pipe.recv()
            except EOFError:
                _end_like(processes[number], number)
            if isinstance(said, _Raised):
                _end_like_the_killed(processes)
                raise RuntimeError(f"GPU {number + 1} of {len(pipes)}: {said.why}")
            if not isinstance(said, Measurement):
                yield said
            elif said.outcome in ("ok", "slow"):
                measured[number] = said
            else:
                where = f"GPU {number + 1} of {len(pipes)}: " if len(pipes) > 1 else ""
                yield dataclasses.replace(said, message=where + said.message, rank=number)
                return
    yield together([measured[number] for number in range(len(pipes))])


def _end_like_the_killed(processes: list[BaseProcess]) -> None:
    """End as a process that was killed, of which the others only say that its connections have gone."""
    give_up = time.monotonic() + KILLED_SECONDS
    while time.monotonic() < give_up:
        for number, process in enumerate(processes):
            if (process.exitcode or 0) < 0:
                _end_like(process, number)
        time.sleep(0.01)


def together(measured: list[Measurement]) -> Measurement:
    """One measurement of what several GPUs did: the memory of the tightest, the time of the slowest."""
    # Of several that reserve as much, the one that allocates most.
    tightest = max(measured, key=lambda m: (m.peak_device_bytes or 0, m.peak_allocated_bytes or 0))
    slowest = max(measured, key=lambda m: m.step_seconds or 0.0)
    timed = {
        name: getattr(slowest, name)
        for name in ("micro_step_seconds", "optimizer_step_seconds", "spread", "num_steps")
    }
    return dataclasses.replace(
        tightest,
        **timed,
        rank=measured.index(tightest),
        outcome=measured[0].outcome,
        message=measured[0].message,
        num_alloc_retries=max(m.num_alloc_retries for m in measured),
        num_varied_retries=max(m.num_varied_retries for m in measured),
        varied_device_bytes=max(
            (m.varied_device_bytes for m in measured if m.varied_device_bytes is not None),
            default=None,
        ),
        cold_start_seconds=max(m.cold_start_seconds or 0.0 for m in measured),
        elapsed_seconds=max(m.elapsed_seconds for m in measured),
    )


def _be(
    number: int,
    num_ranks: int,
    pipe: Connection,
    variables: Mapping[str, str],
    measure: Measure,
) -> None:
    """Be one of the processes: measure, and tell."""
    os.environ[PARENT_VARIABLE] = str(os.getppid())
    die_with_parent()
    port = pipe.recv()
    # What torchrun sets (torch 2.13 distributed/elastic/agent/server/local_elastic_agent.py).
    os.environ.update(
        {
            "RANK": str(number),
            "LOCAL_RANK": str(number),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": HOST,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            **variables,
        }
    )
    rank = Rank(number=number, meeting=Meeting(port, number, num_ranks))
    tell: OnProgress = pipe.send if number == 0 else lambda _: None
    try:
        pipe.send(measure(rank, tell))
    except Exception as error:
        pipe.send(_Raised(f"{type(error).__name__}: {error}"))
        raise


def _end_like(process: BaseProcess, number: int) -> NoReturn:
    """End this process as that one has ended. Raises RuntimeError where that was no signal."""
    process.join(KILL_SECONDS)
    exit_code = process.exitcode
    if exit_code is not None and exit_code < 0:
        os.kill(os.getpid(), -exit_code)
    raise RuntimeError(f"The process of GPU {number + 1} ended with exit code {exit_code}")


def _end(process: BaseProcess) -> None:
    process.kill()
    process.join(KILL_SECONDS)
