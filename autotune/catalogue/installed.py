"""Installed libraries with their versions, and the processor they run on."""

from __future__ import annotations

import functools
import importlib.util
import platform
from importlib import metadata
from pathlib import Path

from packaging.version import Version


@functools.cache
def version(library: str) -> str | None:
    """Return the installed version of a library, named as pip names it; None where it is not installed."""
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def is_installed(library: str) -> bool:
    """Return whether a library, named as pip names it, is installed."""
    return version(library) is not None


@functools.cache
def takes_lowest_address() -> bool:
    """Return whether torch's CUDA allocator takes the lowest address of free blocks of equal size.

    The version alone tells: builds up to 2.11 do, 2.12 to 2.15 take the oldest (studies/no-card).
    """
    torch = version("torch")
    return torch is not None and Version(torch) < Version("2.12")


OTHER_ATTENTION_SINCE = (2, 14)
"""Version of torch since which it chooses kernels of attention by other rules: each of the fused ones takes
fewer heads of keys than of queries (studies/attention-kernels). The version alone tells."""

WORKSPACE_PER_CALL_SINCE = (2, 15)
"""Version of torch since which each call of cuBLAS makes its workspace and gives it back, where earlier ones
keep one for each thread (pytorch pull request 194311; studies/no-card/drawn_torch_2_15.jsonl shows what comes
of it). The version alone tells."""


@functools.cache
def fuses_any_grouped_heads() -> bool:
    """Return whether each of torch's fused kernels takes fewer heads of keys than of queries."""
    torch = version("torch")
    return torch is not None and Version(torch).release >= OTHER_ATTENTION_SINCE


@functools.cache
def makes_workspace_per_call() -> bool:
    """Return whether each call of cuBLAS makes its workspace and gives it back."""
    torch = version("torch")
    return torch is not None and Version(torch).release >= WORKSPACE_PER_CALL_SINCE


@functools.cache
def releases_messages() -> bool:
    """Return whether a stage of torch's pipelining has buffers of messages and lets go of what arrived.

    Its source is asked (distributed/pipelining/stage.py, as of torch 2.15), without importing torch. False
    where torch is not installed.
    """
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    stage = Path(torch.origin).parent / "distributed" / "pipelining" / "stage.py"
    return stage.is_file() and "def release_fwd_send_outputs" in stage.read_text("utf-8")


LIBRARIES = ("accelerate", "bitsandbytes", "peft", "torch", "transformers")


def versions() -> tuple[tuple[str, str], ...]:
    """Return (name, version) of every library that may change a measurement, and Python's.

    Raises PackageNotFoundError.
    """
    of_libraries = [(name, metadata.version(name)) for name in LIBRARIES]
    return tuple(sorted([*of_libraries, ("python", platform.python_version())]))


def cpu_name() -> str:
    """Return the processor's name as the kernel gives it; the architecture where it gives none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
