"""NVML's facts about the cards here: which a process sees, how much is free, and who holds the rest.

Needs no CUDA context. Run on an H200. Not modelled: MIG slices, and CUDA_DEVICE_ORDER other than
PCI_BUS_ID. In a container the processes of others have no name, and often are not listed at all.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from autotune.common.units import MIB, format_bytes

IDLE_BYTES = 128 * MIB
"""Bytes held of a card that nobody uses: a driver's daemon, another process's bare context. [judgement]"""
MAX_NAMED = 3
"""Most holders named in one line, the largest first."""

_NO_DRIVER = "NVML Shared Library Not Found"
_EXPLANATIONS = {
    # NVML's own words (nvidia-ml-py 13, pynvml.py), in other words
    _NO_DRIVER: "NVIDIA's driver is not installed",
    "Driver Not Loaded": "NVIDIA's driver is installed, and not loaded: `nvidia-smi` may say why",
    "RM has detected an NVML/RM version mismatch.": (
        "NVIDIA's driver was updated since it was loaded: a restart is needed"
    ),
}


class NoCard(Exception):
    """No card is visible; its text is one clause that says why."""

    def __init__(self, reason: str, *, is_fault: bool = False) -> None:
        super().__init__(reason)
        self.is_fault = is_fault
        """Something is broken; otherwise there is nothing that could be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """A process that has memory of a card."""

    pid: int
    """Process id on the host."""
    name: str
    """Name of the program, empty where it cannot be read."""
    used_bytes: int | None

    def __str__(self) -> str:
        size = "" if self.used_bytes is None else f", {format_bytes(self.used_bytes)}"
        return f"{self.name or 'a program'} (process {self.pid}{size})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Occupancy:
    """A card's memory that is in use, and who holds it."""

    free_bytes: int
    used_bytes: int
    """Bytes in use, those that the driver keeps for itself aside, where it tells."""
    holders: tuple[Holder, ...]
    """Processes that hold memory, largest first; may be fewer than there are."""

    def __str__(self) -> str:
        """Return in one clause which processes hold the memory."""
        if not self.holders:
            return f"{format_bytes(self.used_bytes)} are held by processes that cannot be seen from here"
        named = ", ".join(map(str, self.holders[:MAX_NAMED]))
        more = len(self.holders) - MAX_NAMED
        held = f"{format_bytes(self.used_bytes)} are held by {named}"
        return f"{held} and {more} more" if more > 0 else held


@contextlib.contextmanager
def opened() -> Iterator[Any]:
    """Yield the module pynvml, ready to be asked. Raises NoCard where it cannot be."""
    try:
        import pynvml
    except ImportError as error:
        raise NoCard("the package nvidia-ml-py is not installed") from error
    try:
        pynvml.nvmlInit()
        try:
            yield pynvml
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        said = str(error)
        reason = _EXPLANATIONS.get(said, f"NVIDIA's driver says: {said}")
        raise NoCard(reason, is_fault=said != _NO_DRIVER) from error


def visible(pynvml: Any) -> list[Any]:
    """Handles of the cards that a process sees, as CUDA_VISIBLE_DEVICES orders them.

    Raises NoCard when there are none.
    """
    handles = [
        pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())
    ]
    if not handles:
        raise NoCard("NVIDIA's driver is there, and finds no card")
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return handles
    names = [
        (str(index), text(pynvml.nvmlDeviceGetUUID(handle))) for index, handle in enumerate(handles)
    ]
    found = []
    for entry in (entry.strip() for entry in value.split(",")):
        matching = [
            index
            for index, (number, uuid) in enumerate(names)
            if entry == number or (entry.startswith("GPU-") and uuid.startswith(entry))
        ]
        if not matching:
            break  # as CUDA does: what follows an unknown one is not seen either
        found.append(handles[matching[0]])
    if not found:
        raise NoCard(f"CUDA_VISIBLE_DEVICES is {value[:80]!r}, which hides every card")
    return found


def why_no_card() -> str:
    """Return one clause that says why no card is visible; empty where there is one."""
    try:
        with opened() as pynvml:
            visible(pynvml)
    except NoCard as reason:
        return str(reason)
    return ""


def alike() -> list[str]:
    """Entries of CUDA_VISIBLE_DEVICES for the visible cards that have the first one's name.

    Numbers are those of CUDA_DEVICE_ORDER=PCI_BUS_ID, in which the driver counts.
    """
    try:
        with opened() as pynvml:
            handles = visible(pynvml)
            names = [text(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
    except NoCard:
        return []
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    entries = map(str, range(len(names))) if value is None else map(str.strip, value.split(","))
    return [entry for entry, name in zip(entries, names, strict=False) if name == names[0]]


def occupancy(number: int = 0) -> Occupancy | None:
    """Return who holds memory of a visible card, the first by default, before this process has a context.

    None where nobody can tell.
    """
    try:
        with opened() as pynvml:
            handle = visible(pynvml)[number]
            memory = memory_of(pynvml, handle)
            return Occupancy(
                free_bytes=int(memory.free),
                used_bytes=int(memory.used),
                holders=_holders(pynvml, handle),
            )
    except NoCard:
        return None


def taken_of(budget_bytes: int, *, number: int = 0) -> Occupancy | None:
    """Return who holds the part of a visible card, the first by default, that a budget needs.

    None where nobody does, or can be seen to.
    """
    taken = occupancy(number)
    if taken is None or taken.used_bytes <= IDLE_BYTES or budget_bytes <= taken.free_bytes:
        return None
    return taken


@dataclass(frozen=True, kw_only=True, slots=True)
class CardState:
    """State of the first visible card as the driver tells it. None where it does not tell."""

    name: str
    num_visible: int
    """Number of cards that this process sees, this one among them."""
    compute_capability: tuple[int, int]
    driver: str
    cuda: tuple[int, int] | None
    """The newest CUDA version that the driver runs, (major, minor)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CardIdentity:
    """The first visible card, and what decides how fast it is. None where the driver does not tell."""

    name: str
    driver: str
    power_limit_watts: float | None = None
    """The limit in force, which its owner may have lowered."""
    sm_clock_mhz: int | None = None
    """Highest clock of the multiprocessors."""
    memory_clock_mhz: int | None = None

    def is_like(self, other: CardIdentity) -> bool:
        """Whether rates of one are those of the other: the same kind with the same limits."""
        return replace(self, driver="") == replace(other, driver="")


def identity() -> CardIdentity:
    """Return which card the first visible one is. Raises NoCard."""
    with opened() as pynvml:
        handle = visible(pynvml)[0]

        def told(ask: Callable[[], Any]) -> Any:
            with contextlib.suppress(pynvml.NVMLError, AttributeError):
                return ask()
            return None

        milliwatts = told(lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle))
        return CardIdentity(
            name=text(pynvml.nvmlDeviceGetName(handle)),
            driver=text(pynvml.nvmlSystemGetDriverVersion()),
            power_limit_watts=None if milliwatts is None else round(milliwatts) / 1000,
            # nvml.h: NVML_CLOCK_SM is 1, NVML_CLOCK_MEM 2.
            sm_clock_mhz=told(lambda: int(pynvml.nvmlDeviceGetMaxClockInfo(handle, 1))),
            memory_clock_mhz=told(lambda: int(pynvml.nvmlDeviceGetMaxClockInfo(handle, 2))),
        )


def busy_share() -> float | None:
    """Return the share of the last second in which the first visible card ran kernels; None: not told."""
    try:
        with opened() as pynvml, contextlib.suppress(AttributeError):
            return float(pynvml.nvmlDeviceGetUtilizationRates(visible(pynvml)[0]).gpu) / 100
    except NoCard:
        pass
    return None


def card_state() -> CardState:
    """Return the state of the first visible card. Raises NoCard."""
    with opened() as pynvml:
        handles = visible(pynvml)
        handle = handles[0]
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        cuda = None
        with contextlib.suppress(pynvml.NVMLError):
            cuda = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
        return CardState(
            name=text(pynvml.nvmlDeviceGetName(handle)),
            num_visible=len(handles),
            compute_capability=(int(major), int(minor)),
            driver=text(pynvml.nvmlSystemGetDriverVersion()),
            # nvml.h: 1000 x major + 10 x minor
            cuda=None if cuda is None else (cuda // 1000, cuda % 1000 // 10),
        )


def driver_version() -> str:
    """Return the driver's version, with the newest CUDA that it runs. There may be a driver and no card.

    Raises NoCard.
    """
    with opened() as pynvml:
        cuda = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
        driver = text(pynvml.nvmlSystemGetDriverVersion())
        return f"{driver} (CUDA {cuda // 1000}.{cuda % 1000 // 10})"


_SLOWED = {
    # bits of nvmlDeviceGetCurrentClocksEventReasons (nvidia-ml-py 13, pynvml.py), worst first
    0x40: "too hot",
    0x20: "too hot",
    0x80: "its power supply asks for less",
    0x08: "the hardware slows it down",
    0x04: "at its power limit",
}


def slowed_down() -> str:
    """Return why the first visible card's clocks are lower than they could be; empty where nothing is."""
    try:
        with opened() as pynvml:
            reasons = pynvml.nvmlDeviceGetCurrentClocksEventReasons(visible(pynvml)[0])
    except NoCard:
        return ""
    return next((words for bit, words in _SLOWED.items() if reasons & bit), "")


def memory_of(pynvml: Any, handle: Any) -> Any:
    """Return NVML's memory info; by version 2 where the driver has it, which tells its own share apart."""
    try:
        return pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except pynvml.NVMLError:
        return pynvml.nvmlDeviceGetMemoryInfo(handle)


def text(value: str | bytes) -> str:
    """Text from NVML's Python binding, which returned bytes before version 12."""
    return value.decode() if isinstance(value, bytes) else value


def _holders(pynvml: Any, handle: Any) -> tuple[Holder, ...]:
    found: dict[int, Holder] = {}
    for ask in (
        pynvml.nvmlDeviceGetComputeRunningProcesses,
        pynvml.nvmlDeviceGetGraphicsRunningProcesses,
    ):
        with contextlib.suppress(pynvml.NVMLError):
            for process in ask(handle):
                used = process.usedGpuMemory
                found[process.pid] = Holder(
                    pid=process.pid,
                    name=_name(pynvml, process.pid),
                    used_bytes=None if used is None else int(used),
                )
    return tuple(sorted(found.values(), key=lambda h: (-(h.used_bytes or 0), h.pid)))


def _name(pynvml: Any, pid: int) -> str:
    """Name of a process's program, without the folders."""
    try:
        name = PurePath(text(pynvml.nvmlSystemGetProcessName(pid)).strip()).name
    except (pynvml.NVMLError, UnicodeDecodeError):
        return ""
    return "".join(c for c in name if c.isprintable())[:40]
