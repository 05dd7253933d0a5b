"""Checks of torch and what is built on it: a worker loads them, and tells what happened."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from autotune.catalogue import nvml
from autotune.doctor.machine import CheckedMachine
from autotune.doctor.verdict import NO_CARD, Diagnosis, fail, ok, warn
from autotune.memory.out_of_memory import says_out_of_memory

_GET_TORCH = "Install one of https://pytorch.org/get-started/locally for your driver"

_WHEN_UNUSABLE = (
    # part of what torch says (c10/cuda/CUDAFunctions.cpp, CUDA's cudaGetErrorString), and the remedy
    ("no kernel image", "See the line on kernels"),
    ("driver on your system is too old", "See the line on cuda"),
    (
        "busy or unavailable",
        "Stop the process that has the card to itself: `nvidia-smi -q -d COMPUTE` tells the mode",
    ),
    ("initialization error", "Load the driver's second half: sudo modprobe nvidia_uvm"),
    ("unknown error", "Load the driver's second half: sudo modprobe nvidia_uvm; else restart"),
)


def torch(machine: CheckedMachine) -> Diagnosis:
    """Check that torch loads, and can use the card where there is one."""
    build = machine.ask("torch")
    if build["problem"]:
        return fail(f"torch does not load: {build['problem']}", f"Reinstall it. {_GET_TORCH}")
    card, found = machine.card, str(build["version"])
    if build["hip"]:
        said = f"{found}, built for AMD's ROCm {build['hip']}"
        remedy = f"It predicts; probes are for CUDA. {_GET_TORCH}"
        return warn(said, remedy) if isinstance(card, nvml.NoCard) else fail(said, remedy)
    if build["cuda"]:
        found += f", built for CUDA {build['cuda']}"
    if isinstance(card, nvml.NoCard):
        return ok(found if build["cuda"] else f"{found}, built without CUDA: enough to predict")
    if not build["cuda"]:
        return fail(f"{found} is built without CUDA, though {card.name} is here", _GET_TORCH)
    if problem := machine.ask("card")["problem"]:
        remedy = next((remedy for part, remedy in _WHEN_UNUSABLE if part in problem), _GET_TORCH)
        if says_out_of_memory(problem):
            remedy = "Stop the process that holds the card's memory: `nvidia-smi` names it"
        return fail(f"{found}, cannot use the {card.name}: {problem}", remedy)
    return ok(f"{found}, ran on the {card.name}")


def kernels(machine: CheckedMachine) -> Diagnosis:
    """Check that this build of torch has machine code for the card.

    Code for X.y runs on X.z, z not below y; from PTX the driver compiles for any later card
    (torch 2.13 cuda/__init__.py: _check_cubins, _code_compatible_with_device).
    """
    card = machine.card
    if isinstance(card, nvml.NoCard):
        return NO_CARD
    build = machine.ask("torch")
    if not build.get("cuda"):
        return warn("torch is built without CUDA", "See the line on torch")
    architectures = [str(name) for name in build["architectures"]]
    major, minor = card.compute_capability
    listed = ", ".join(architectures) or "nothing"
    said = f"the card is {major}.{minor}; torch has kernels for {listed}"
    compiled, ptx = _numbers(architectures, "sm"), _numbers(architectures, "compute")
    if any(number // 10 == major and number % 10 <= minor for number in compiled):
        return ok(said)
    if any(number <= 10 * major + minor for number in ptx):
        return warn(f"{said}: the driver compiles them at first use, for minutes", _GET_TORCH)
    return fail(f"{said}: none runs on it", f"{_GET_TORCH}, with kernels for {major}.{minor}")


def bitsandbytes(machine: CheckedMachine) -> Diagnosis:
    part = machine.ask("bitsandbytes")
    found, library = part.get("version", ""), part.get("library", "")
    lost = "QLoRA, LLM.int8 and the 8-bit and paged optimizers do not work"
    has_card = not isinstance(machine.card, nvml.NoCard)
    if "version" in part and not found:
        return warn(f"not installed: {lost}", "pip install bitsandbytes")
    if part["problem"] or not library:
        said = f"{found} did not load its binary: {part['problem'] or 'none fits'}; {lost}".strip()
        remedy = "`python -m bitsandbytes` says why; BNB_CUDA_VERSION chooses another binary"
        return fail(said, remedy) if has_card else warn(said, remedy)
    if has_card and not part["has_cuda"]:
        return fail(
            f"{found} loaded {library}, which is for CPUs; {lost} on the card",
            "Install a torch that is built for CUDA, which it follows",
        )
    return ok(f"{found}, {library}")


def flash_attention(machine: CheckedMachine) -> Diagnosis:
    """Check flash attention, which is optional: torch's sdpa has flash kernels too.

    One that does not load spoils every probe of it.
    """
    part = machine.ask("flash_attention")
    found: dict[str, Any] = part.get("found", {})
    for name, each in found.items():
        if each["problem"]:
            return fail(
                f"{name} {each['version']} does not load: {each['problem']}",
                f"Build it for this torch, or remove it: pip uninstall {name}",
            )
    said = ", ".join(f"{name} {each['version']}" for name, each in found.items())
    return ok(said or "not installed; nothing needs it")


def _numbers(architectures: Iterable[str], kind: str) -> list[int]:
    """Return numbers of one kind: `sm_86`, `sm_90a`, `compute_120` become 86, 90, 120."""
    found = (re.fullmatch(rf"{kind}_(\d+)[a-z]?", name) for name in architectures)
    return [int(match[1]) for match in found if match]
