"""Calibrates the card of this machine: a process with torch times kernels, and rates are fitted to them.

Nothing is kept here (store.calibrations). Run on an H100 (studies/h100-80gb-hbm3).
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.catalogue import nvml
from autotune.catalogue.gpus import Gpu
from autotune.catalogue.nvml import CardIdentity
from autotune.common import json_records
from autotune.common.units import counted
from autotune.errors import HardwareError, WorkerError
from autotune.probe.fingerprint import assumed_fingerprint
from autotune.records.calibration import Calibration, HostTimes, Skipped, calibration_from_dict
from autotune.records.fingerprint import Fingerprint
from autotune.speed import calibration
from autotune.speed.calibration import TimedKernel
from autotune.speed.calibration_plan import tiny_plan, usual_plan
from autotune.speed.host import USUAL
from autotune.speed.roofline import Kernel
from autotune.worker.client import isolate
from autotune.worker.client.forkserver import ForkServer
from autotune.worker.client.isolate import Reply

MOST_BUSY = 0.05
"""Share of the time that others may keep the card busy. [judgement] A desktop's screen takes less."""
SECONDS_EACH, WARM_UP_SECONDS = 0.25, 10.0
"""Time for one kernel, and for warming the card up: 280 kernels take some two minutes. [judgement]"""
MOST_OFF = 10.0
"""Factor between predicted and measured times beyond which something is wrong. [judgement] Cards that nobody
measured are predicted within 2."""
MOST_SPREAD = 0.05
"""Spread of times beyond which something disturbs them. [judgement] Kernels alone on a card vary by 1 %."""
_TINY_SECONDS_EACH, _TINY_WARM_UP_SECONDS = 0.01, 0.1
DEADLINE_SECONDS = 1200.0
HOST_DEADLINE_SECONDS = 120.0
"""Time for the host alone, which takes seconds, and for CUDA's start from a cold disk. [judgement]"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Times that a process has taken."""

    timed: tuple[TimedKernel, ...]
    skipped: tuple[Skipped, ...]
    host_seconds: dict[str, float]
    host_waited: float = 0.0
    """HostTimes.waited of the host."""


def check_free(note: Callable[[str], None]) -> None:
    """Raise HardwareError where others keep the card busy; say who only holds memory of it."""
    share, taken = nvml.busy_share(), nvml.occupancy()
    is_held = taken is not None and taken.used_bytes > nvml.IDLE_BYTES
    if share is not None and share > MOST_BUSY:
        raise HardwareError(
            f"The card is busy: it ran kernels of others for {100 * share:.0f} % of the last second",
            why=str(taken) if is_held else "Times taken beside them would be theirs as well",
            remedy="Run it again when they have ended",
        )
    if is_held:
        note(f"the card is not this command's alone: {taken}.")


def time_on_card(
    gpu: Gpu,
    card: CardIdentity | None,
    *,
    is_tiny: bool = False,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> Timing:
    """Time the kernels of the usual plan on the first visible card, or tiny ones of each kind.

    `card`: which it is by the driver; None on a CPU.

    Raises HardwareError where PyTorch cannot use it or nothing could be timed, WorkerError.
    """
    plan = tiny_plan(half_of(gpu)) if is_tiny else usual_plan(gpu)
    timed, skipped = list[TimedKernel](), list[Skipped]()

    def keep(_: Kernel, found: TimedKernel | Skipped) -> None:
        if isinstance(found, TimedKernel):
            timed.append(found)
        else:
            skipped.append(found)
        progress(len(timed) + len(skipped), len(plan))

    host = time_kernels(plan, gpu.backend, card, is_tiny=is_tiny, on_kernel=keep)
    if not timed:
        why = f"{skipped[0].name}: {skipped[0].why}" if skipped else "The process answered nothing"
        raise HardwareError("No kernel could be timed", why=why, remedy="See `autotune doctor`")
    return Timing(
        timed=tuple(timed),
        skipped=tuple(skipped),
        host_seconds=host.seconds,
        host_waited=host.waited,
    )


def time_host(card: CardIdentity, server: ForkServer) -> Timing:
    """Time this machine's host on its card, in a fork of the server, and no kernels.

    Raises HardwareError where PyTorch cannot use the card or the times are none, WorkerError.
    """
    host = time_kernels(
        (),
        "cuda",
        card,
        server=server,
        deadline_seconds=HOST_DEADLINE_SECONDS,
        on_kernel=lambda *_: None,
    )
    if host_factor_of(host.seconds) is None:
        raise HardwareError(
            "The host could not be timed", why=f"It took {host.seconds or 'no time'}"
        )
    return Timing(timed=(), skipped=(), host_seconds=host.seconds, host_waited=host.waited)


def half_of(gpu: Gpu) -> str:
    """The 16-bit type that the card trains in."""
    return "bfloat16" if gpu.has_bfloat16 else "float16"


def time_kernels(
    plan: Sequence[Kernel],
    backend: str,
    card: CardIdentity | None,
    *,
    is_tiny: bool = False,
    server: ForkServer | None = None,
    deadline_seconds: float = DEADLINE_SECONDS,
    on_kernel: Callable[[Kernel, TimedKernel | Skipped], None],
) -> HostTimes:
    """Time kernels in a process of their own; `on_kernel` hears of each at once, in the plan's order.

    Returns what the host takes. `server` forks the process; None: it imports for itself.

    Raises HardwareError where PyTorch cannot use the card, WorkerError where the process fails or takes too
    long: what was heard of before counts.
    """
    host = HostTimes(seconds={}, waited=0.0)

    def read(answer: Reply) -> None:
        nonlocal host
        if card is not None and answer.get("device", card.name) != card.name:
            raise HardwareError(
                f"PyTorch counts another card first: {answer['device']}",
                why=f"NVIDIA's driver names the {card.name} first",
                remedy="Set CUDA_DEVICE_ORDER=PCI_BUS_ID, and CUDA_VISIBLE_DEVICES to the card's number",
            )
        if "unusable" in answer:
            raise HardwareError(
                "PyTorch cannot use the GPU of this machine",
                why=str(answer["unusable"]),
                remedy="See what `autotune doctor` says",
            )
        try:
            if "host" in answer:
                seconds = {str(phase): float(s) for phase, s in answer["host"].items()}
                host = HostTimes(seconds=seconds, waited=float(answer.get("waited", 0.0)))
            elif "index" in answer:
                kernel = plan[answer["index"]]
                on_kernel(kernel, _read(kernel, answer))
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise WorkerError(
                "The answer of the calibrating process cannot be read", why=str(error)[:200]
            ) from error

    request = {
        "backend": backend,
        "kernels": [json_records.plain(kernel) for kernel in plan],
        "seconds_each": _TINY_SECONDS_EACH if is_tiny else SECONDS_EACH,
        "warm_up_seconds": _TINY_WARM_UP_SECONDS if is_tiny or not plan else WARM_UP_SECONDS,
    }
    run = isolate.run if server is None else server.run
    end = run("calibrate", request, deadline_seconds=deadline_seconds, on_answer=read)
    if end.how != "ok":
        raise end.to_error("calibrate")
    return host


def _read(kernel: Kernel, answer: Reply) -> TimedKernel | Skipped:
    if "skipped" in answer:
        return Skipped(name=name_of(kernel), why=str(answer["skipped"]))
    return TimedKernel(
        kernel=kernel,
        seconds=_positive(answer["seconds"]),
        spread=float(answer["spread"]),
        num_weights=int(answer["num_weights"]),
    )


def _positive(value: Any) -> float:
    seconds = float(value)
    if not 0 < seconds < math.inf:
        raise ValueError(f"a kernel took {seconds} seconds")
    return seconds


def name_of(kernel: Kernel) -> str:
    """A kernel's name, type and size, in words; of those of a plan each has another."""
    size = " x ".join(f"{each:g}" for each in kernel.shape)
    if len(kernel.shape) < 2 or kernel.kind == "lists":
        size = f"{kernel.count * kernel.bytes_moved / 1e6:g} MB"
    return f"{kernel.name} {kernel.dtype} {size}"


def calibration_of(gpu: Gpu, card: CardIdentity, timing: Timing) -> Calibration:
    """Fit the card's rates to what was timed. `gpu`: the card by its facts.

    Raises HardwareError for times that no card has.
    """
    rates = calibration.fitted(gpu, timing.timed, host_factor_of(timing.host_seconds))
    unknown = Fingerprint(device=card.name, driver=card.driver, cuda="", versions=(), allocator="")
    found = Calibration(
        made_on=f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        card=card,
        fingerprint=assumed_fingerprint("cuda") or unknown,
        rates=rates,
        residuals=tuple(calibration.residuals(gpu, rates, timing.timed)),
        timed=timing.timed,
        skipped=timing.skipped,
        host_seconds=timing.host_seconds,
    )
    try:
        return calibration_from_dict(found.to_dict())
    except ValueError as error:
        raise HardwareError(
            f"These are no times of a {card.name}",
            why=str(error),
            remedy="Run it again when nothing else uses the card",
        ) from error


def check_plausible(found: Calibration) -> None:
    """Raise HardwareError where times are far from what the card's facts allow: they are of another card."""
    for each in found.residuals:
        # What links the card to the host is the machine's, and may be anything.
        if each.kind != "copy_host" and not 1 / MOST_OFF < each.ratio_before < MOST_OFF:
            raise HardwareError(
                f"These are no times of a {found.card.name}",
                why=f"Predicted times of its {each.kind} kernels are {each.ratio_before:.2g} times as long",
                remedy="Run it again when nothing else uses the card; a --gpu-file may be of another one",
            )


def host_factor_of(host_seconds: dict[str, float]) -> float | None:
    """Time that an operation takes this host, against the usual one; None where it was not told."""
    logs = [
        math.log(seconds / USUAL.launch_seconds[phase])
        for phase, seconds in host_seconds.items()
        if seconds > 0 and phase in USUAL.launch_seconds
    ]
    return math.exp(sum(logs) / len(logs)) if logs else None


def median_spread(timed: Sequence[TimedKernel]) -> float:
    """The spread of the kernel in the middle: how steady the card was."""
    spreads = sorted(each.spread for each in timed)
    return spreads[len(spreads) // 2]


def skipped_words(skipped: Sequence[Skipped]) -> str:
    """How many kernels were not timed, and why the first was not."""
    return (
        f"{counted(len(skipped), 'kernel')} could not be timed; {skipped[0].name}: {skipped[0].why}"
    )
