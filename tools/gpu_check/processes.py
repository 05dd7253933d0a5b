"""What NVML sees of probes: the most that one holds, and what forking and killing leave behind.

Seen on an H100, and forks on an H200 (studies).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from autotune.catalogue import nvml
from autotune.common.units import MIB
from autotune.records.measurement import ProbeSpec
from autotune.worker.client.forkserver import ForkServer
from autotune.worker.client.isolate import private_folder
from tools.gpu_check import cases as gpu_cases
from tools.gpu_check.check import Check

RETURN_SECONDS = 20.0
LOOK_SECONDS = 0.05
"""Between two questions. [judgement] A cache that has grown stays so for longer."""
RETURNED_WITHIN_BYTES = 16 * MIB
"""Device memory counts as given back when so near to what was in use before."""


def processes(check: Check) -> bool:
    """What a fork finds, and what a killed probe leaves."""
    records = check.records("processes")
    steps: tuple[tuple[str, Callable[[ForkServer], int | None] | None], ...] = (
        ("first fork", None),
        ("second fork", None),
        ("third fork", None),
        ("fork after 3 probes", None),
        ("probe killed", lambda server: server.last_fork.pid if server.last_fork else None),
        ("fork after a killed probe", None),
        ("server killed", lambda server: server.server_pid),
        ("fork after a killed server", None),
    )
    if all(name in records for name, _ in steps):
        return True
    with ForkServer() as server:
        for name, victim in steps:
            if not check.deadline.allows_another():
                return False
            seen = observe(check, server, victim)
            if name not in records:
                records.add(name, **seen)
            print(f"{seen['end']:8} {name}", file=sys.stderr, flush=True)
    return True


def observe(
    check: Check, server: ForkServer, victim: Callable[[ForkServer], int | None] | None
) -> dict[str, Any]:
    """Run a probe; kill `victim`, when there is one, as soon as it times. What was seen.

    fork: what the server saw just before it forked. device_*_bytes: in use on the card, by NVML, before
    the probe, while it timed, and afterwards. pids_left: processes that have a context then and had none
    before (by the ids of the host, so that the server's own is found in no container).
    """
    case = (gpu_cases.TINY_CASES if check.tiny else gpu_cases.CASES)[0]
    spec = ProbeSpec(
        task=gpu_cases.TASK,
        backend=check.backend,
        memory_budget_bytes=check.budget_bytes,
        max_seconds=20.0 if victim else 1.0,
        target_spread=0.0,
        max_steps=2000 if victim else 5,
    )
    request = gpu_cases.request(case, spec)
    before_bytes, before_pids = device_state(check.backend)
    during: list[tuple[int | None, list[int]]] = []

    def on_answer(_: dict[str, Any]) -> None:
        if during:
            return
        during.append(device_state(check.backend))
        pid = victim(server) if victim else None
        if pid is not None:
            os.kill(pid, signal.SIGKILL)

    seconds = check.deadline.of_job(120.0)
    with private_folder() as folder:  # A probe that is killed leaves what it has put there.
        end = server.run(
            "probe", {**request, "folder": folder}, deadline_seconds=seconds, on_answer=on_answer
        )
    ended = time.monotonic()
    after_bytes, after_pids = device_state(check.backend)
    while not has_returned(before_bytes, after_bytes) and time.monotonic() - ended < RETURN_SECONDS:
        time.sleep(0.05)
        after_bytes, after_pids = device_state(check.backend)
    fork = server.last_fork
    return {
        "fork": None if fork is None else dataclasses.asdict(fork),
        "unfit_reason": server.unfit_reason,
        "end": end.how,
        "problem": end.problem,
        "device_before_bytes": before_bytes,
        "device_during_bytes": during[0][0] if during else None,
        "device_after_bytes": after_bytes,
        "has_returned": has_returned(before_bytes, after_bytes),
        "return_seconds": time.monotonic() - ended,
        "server_has_context": fork is not None and fork.server_pid in after_pids,
        "pids_left": sorted(set(after_pids) - set(before_pids)),
    }


class PeakOnCard:
    """The most that the card holds within a `with` block beyond what it held before, by NVML.

    Asked from outside, it knows nothing of torch's counters: what a budget is held against.
    """

    def __init__(self, backend: str) -> None:
        self.peak_bytes: int | None = None
        """None where nobody can tell."""
        self._backend = backend
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> PeakOnCard:
        self._before_bytes, _ = device_state(self._backend)
        if self._before_bytes is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _watch(self) -> None:
        with contextlib.suppress(nvml.NoCard), nvml.opened() as pynvml:
            card = nvml.visible(pynvml)[0]
            while not self._is_over.wait(LOOK_SECONDS):
                held_bytes = int(nvml.memory_of(pynvml, card).used) - (self._before_bytes or 0)
                self.peak_bytes = max(self.peak_bytes or 0, held_bytes)


def has_returned(before_bytes: int | None, after_bytes: int | None) -> bool:
    if before_bytes is None or after_bytes is None:
        return True
    return after_bytes <= before_bytes + RETURNED_WITHIN_BYTES


def device_state(backend: str) -> tuple[int | None, list[int]]:
    """(bytes in use, processes with a context) of the first visible card by NVML; nothing on a CPU."""
    if backend != "cuda":
        return None, []
    try:
        with nvml.opened() as pynvml:
            card = nvml.visible(pynvml)[0]
            running = pynvml.nvmlDeviceGetComputeRunningProcesses(card)
            return int(nvml.memory_of(pynvml, card).used), [process.pid for process in running]
    except nvml.NoCard:
        return None, []
