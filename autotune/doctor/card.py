"""Checks of the card and its driver, as NVML tells. Not yet run on a GPU.

Only the first card that is visible is looked at: probes run on that one.
"""

from __future__ import annotations

from autotune.catalogue import nvml
from autotune.common.units import GIB, format_bytes
from autotune.doctor.machine import Machine
from autotune.doctor.verdict import NO_CARD, Verdict, fail, ok, warn

FREE_SHARE = 0.9
"""Of the card's memory; with less, somebody else works on it. [judgement]"""
MIN_FREE_BYTES = GIB
"""A CUDA context and a toy model. [judgement]"""

_INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""Linux, include/linux/proc_ns.h: PROC_PID_INIT_INO."""


def driver(machine: Machine) -> Verdict:
    card = machine.card
    if isinstance(card, nvml.NoCard):
        if card.is_fault:
            return fail(str(card), "Repair or reinstall NVIDIA's driver: `nvidia-smi` says more")
        return warn(
            f"{card}: everything is predicted, nothing measured",
            "None is needed to predict. To measure, run where a process sees a CUDA card",
        )
    major, minor = card.compute_capability
    more = f"; of {card.num_visible} cards the first is used" if card.num_visible > 1 else ""
    return ok(f"{card.driver}; {card.name}, compute capability {major}.{minor}{more}")


def cuda(machine: Machine) -> Verdict:
    """Whether the driver is new enough for the CUDA that torch was built for.

    Within a major version an older driver runs what a newer CUDA compiled, but compiles nothing itself
    (NVIDIA, CUDA Compatibility: minor version compatibility).
    """
    card = machine.card
    if isinstance(card, nvml.NoCard):
        return NO_CARD
    built_for = machine.ask("torch").get("cuda")
    if not built_for:
        return warn("torch is built without CUDA", "See the line on torch")
    if card.cuda is None:
        return warn(
            f"the driver does not say which CUDA it runs; torch needs {built_for}",
            "Update NVIDIA's driver",
        )
    needed = tuple(int(number) for number in str(built_for).split(".")[:2])
    said = (
        f"the driver runs up to CUDA {card.cuda[0]}.{card.cuda[1]}; torch is built for {built_for}"
    )
    if card.cuda >= needed:
        return ok(said)
    if card.cuda[0] == needed[0]:
        return warn(said, "It works, but for kernels compiled here: update NVIDIA's driver")
    if not machine.ask("card")["problem"]:
        return ok(f"{said}, and works: a compatibility package is installed")
    return fail(said, f"Update NVIDIA's driver, or install a torch built for CUDA {card.cuda[0]}")


def memory(machine: Machine) -> Verdict:
    taken = None if isinstance(machine.card, nvml.NoCard) else nvml.occupancy()
    if taken is None:
        return NO_CARD
    all_bytes = taken.free_bytes + taken.used_bytes
    said = f"{format_bytes(taken.free_bytes)} of {format_bytes(all_bytes)} are free"
    if taken.free_bytes >= FREE_SHARE * all_bytes:
        return ok(said)
    said += f"; {taken}"
    if taken.holders and _is_contained(machine):
        said += "; the numbers of processes are the host's, not this container's"
    if taken.free_bytes < MIN_FREE_BYTES:
        return fail(said, "End what holds it: there is no room for a probe")
    return warn(said, "End what holds it, or go on: `find` plans with what is free")


def clocks(machine: Machine) -> Verdict:
    card = machine.card
    if isinstance(card, nvml.NoCard):
        return NO_CARD
    if card.clock_reasons is None:
        return warn("the driver does not say what slows the card", "Update NVIDIA's driver")
    words = nvml.slowed_in_words(card.clock_reasons)
    if not words:
        return ok("nothing slows the card")
    if nvml.is_slowed_by_hardware(card.clock_reasons):
        return fail(
            f"the card is slowed: {words}",
            "Check its cooling and its power cables: what is measured now is too slow",
        )
    return warn(
        f"the card is slowed: {words}",
        "Wait until it is cool and idle before you measure; see the line on power as well",
    )


def power(machine: Machine) -> Verdict:
    """Never fails: a cap is somebody's choice, and what is measured under it is true under it."""
    card = machine.card
    if isinstance(card, nvml.NoCard):
        return NO_CARD
    limit, default = card.power_limit_watts, card.default_power_limit_watts
    if limit is None or default is None:
        return ok("the card has no power limit that can be read")
    if limit >= default:
        return ok(f"may draw {limit:.0f} W, {default:.0f} W by default")
    return warn(
        f"capped at {limit:.0f} W, {default:.0f} W by default: it is measured at that pace",
        f"Leave it where that is meant, else: sudo nvidia-smi -pl {default:.0f}",
    )


def _is_contained(machine: Machine) -> bool:
    """Whether processes have other numbers here than on the host. Linux only."""
    try:
        return str((machine.root / "proc/self/ns/pid").readlink()) != _INITIAL_PID_NAMESPACE
    except OSError:
        return False
