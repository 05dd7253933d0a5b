"""Checks of the card and its driver, as NVML tells. Run on an H200.

Only the first card that is visible is looked at: probes run on that one.
"""

from __future__ import annotations

from autotune.catalogue import host_memory, nvml
from autotune.doctor.machine import CheckedMachine
from autotune.doctor.verdict import NO_CARD, Diagnosis, fail, ok, warn


def driver(machine: CheckedMachine) -> Diagnosis:
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
    if host_memory.in_wsl():
        more += "; in WSL 2, where paged state stays on the card and segments do not expand"
    return ok(f"{card.driver}; {card.name}, compute capability {major}.{minor}{more}")


def cuda(machine: CheckedMachine) -> Diagnosis:
    """Check that the driver is new enough for the CUDA that torch was built for.

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
