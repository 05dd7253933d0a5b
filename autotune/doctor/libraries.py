"""Checks of torch and what is built on it: a worker loads them, and says what happened."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from importlib import metadata
from typing import Any

from autotune.catalogue import compilers, nvml
from autotune.catalogue.installed import version
from autotune.doctor.machine import Machine
from autotune.doctor.verdict import NO_CARD, Verdict, fail, ok, warn
from autotune.memory.alloc_conf import VARIABLES
from autotune.memory.out_of_memory import says_out_of_memory
from autotune.space.knobs import KNOBS

_GET_TORCH = "Install one of https://pytorch.org/get-started/locally for your driver"

_WHEN_UNUSABLE = (
    # part of what torch says (c10/cuda/CUDAFunctions.cpp, CUDA's cudaGetErrorString), and the remedy
    ("no kernel image", "See the line on kernels"),
    ("driver on your system is too old", "See the line on cuda"),
    (
        "busy or unavailable",
        "End what has the card to itself: `nvidia-smi -q -d COMPUTE` tells the mode",
    ),
    ("initialization error", "Load the driver's second half: sudo modprobe nvidia_uvm"),
    ("unknown error", "Load the driver's second half: sudo modprobe nvidia_uvm; else restart"),
)

_FLASH_ATTENTION_CARDS = {
    # flash-attn 2.8 csrc/flash_attn/flash_api.cpp: Ampere or newer; flash-attn-3's README: Hopper
    "flash-attn": ((8, 0), (99, 0)),
    "flash-attn-3": ((9, 0), (9, 9)),
}

NO_CACHING = "PYTORCH_NO_CUDA_MEMORY_CACHING"

TECHNIQUES = "techniques"
"""The extra of pyproject.toml."""


def torch(machine: Machine) -> Verdict:
    """Whether it loads, and can use the card where there is one."""
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
            remedy = "See the line on the card's memory"
        return fail(f"{found}, cannot use the {card.name}: {problem}", remedy)
    return ok(f"{found}, ran on the {card.name}")


def kernels(machine: Machine) -> Verdict:
    """Whether this build of torch has machine code for the card.

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


def compiler(machine: Machine) -> Verdict:
    """What Triton compiles its kernels' launchers with, when they are first called."""
    if isinstance(machine.card, nvml.NoCard):
        return NO_CARD
    lack = compilers.lacking("cuda")
    if lack is None:
        return ok(f"{compilers.found('cuda')}, and Python's headers")
    return warn(f"{lack.said}: torch.compile, Liger and other Triton kernels fail", lack.remedy)


def bitsandbytes(machine: Machine) -> Verdict:
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


def flash_attention(machine: Machine) -> Verdict:
    """Optional: torch's sdpa has flash kernels too. One that does not load spoils every probe of it."""
    part = machine.ask("flash_attention")
    found: dict[str, Any] = part.get("found", {})
    for name, each in found.items():
        if each["problem"]:
            return fail(
                f"{name} {each['version']} does not load: {each['problem']}",
                f"Build it for this torch, or remove it: pip uninstall {name}",
            )
    said = ", ".join(f"{name} {each['version']}" for name, each in found.items())
    card = machine.card
    if isinstance(card, nvml.NoCard):
        return ok(said or "not installed; no card here that needs it")
    capability = card.compute_capability
    fitting = {
        name
        for name, (oldest, newest) in _FLASH_ATTENTION_CARDS.items()
        if oldest <= capability <= newest
    }
    if found and not fitting & found.keys():
        return warn(
            f"{said} does not know compute capability {capability[0]}.{capability[1]}",
            "Leave it: sdpa is searched instead",
        )
    if not found and fitting:
        return warn(
            "not installed: padding-free batches and flash_attention_2 are not searched",
            "pip install flash-attn --no-build-isolation",
        )
    return ok(said or "not installed; this card is too old for it")


def allocator(machine: Machine) -> Verdict:
    """Predictions are made for torch's defaults; measurements say what they were made with."""
    set_here = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    if os.environ.get(NO_CACHING):
        return warn(
            f"{NO_CACHING} turns torch's cache off: nothing that is predicted holds",
            f"unset {NO_CACHING}",
        )
    if not set_here:
        return ok("torch's defaults")
    name, value = next(iter(set_here.items()))
    said = f"{name}={value[:100]}"
    if problem := machine.ask("allocator")["problem"]:
        return fail(f"{said} is refused by torch: {problem}", f"Correct it, or unset {name}")
    if len(set(set_here.values())) > 1:
        said += f" counts, and {VARIABLES[1]} says something else"
    return warn(
        f"{said}: predictions are for the defaults",
        f"Measure, or unset {' '.join(set_here)}",
    )


def libraries(_machine: Machine) -> Verdict:
    """What autotune is declared to need, and what only some techniques do."""
    try:
        declared = metadata.requires("autotune") or []
    except metadata.PackageNotFoundError:
        return warn(
            "autotune itself is not installed, so what it needs is not known",
            "pip install it, from its folder: pip install -c constraints.txt .",
        )
    missing, total = _missing(declared, extra="")
    if missing:
        return fail(f"missing or too old: {', '.join(missing)}", _install(missing))
    optional, more = _missing(declared, extra=TECHNIQUES)
    # No extra brings what has a licence of its own (apollo-torch).
    optional += [name for name in _needed_by_settings() if not _names(name, optional)]
    if optional:
        return warn(
            f"{total} are there; techniques that are left out for want of: {', '.join(optional)}",
            _install(optional),
        )
    return ok(f"{total} that are needed and {more} for techniques are there")


def _missing(declared: Iterable[str], *, extra: str) -> tuple[list[str], int]:
    """Requirements of that extra (or of none) that are not met, and how many there are."""
    from packaging.requirements import Requirement

    wanted = []
    for requirement in map(Requirement, declared):
        marker = requirement.marker
        # What holds without an extra holds with each.
        is_basic = marker is None or marker.evaluate({"extra": ""})
        is_of_extra = marker is not None and marker.evaluate({"extra": extra})
        if is_basic == (not extra) and (is_basic or is_of_extra):
            wanted.append(requirement)
    missing = []
    for requirement in wanted:
        found = version(requirement.name)
        if found is None:
            missing.append(f"{requirement.name}{requirement.specifier}")
        elif not requirement.specifier.contains(found, prereleases=True):
            missing.append(f"{requirement.name}{requirement.specifier} ({found} is here)")
    return missing, len(wanted)


def _needed_by_settings() -> list[str]:
    """What is not here; FlashAttention has a line of its own."""
    needed = {library for knob in KNOBS.values() for library in knob.needs.values()}
    left = sorted(needed - _FLASH_ATTENTION_CARDS.keys())
    return [library for library in left if version(library) is None]


def _names(library: str, missing: Iterable[str]) -> bool:
    return any(each.startswith(f"{library}>") for each in missing)


def _install(missing: Iterable[str]) -> str:
    names = " ".join(f"'{each.partition(' (')[0]}'" for each in missing)
    return f"pip install {names}"


def _numbers(architectures: Iterable[str], kind: str) -> list[int]:
    """`sm_86`, `sm_90a`, `compute_120` -> 86, 90, 120, of one kind."""
    found = (re.fullmatch(rf"{kind}_(\d+)[a-z]?", name) for name in architectures)
    return [int(match[1]) for match in found if match]
