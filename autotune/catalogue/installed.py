"""The libraries that are installed here, in which versions, and the processor they run on."""

from __future__ import annotations

import functools
import platform
from importlib import metadata
from pathlib import Path


@functools.cache
def version(library: str) -> str | None:
    """Of what is installed, by pip's name for it; None where it is not."""
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def is_installed(library: str) -> bool:
    """By pip's name for it."""
    return version(library) is not None


LIBRARIES = ("accelerate", "bitsandbytes", "peft", "torch", "transformers")


def versions() -> tuple[tuple[str, str], ...]:
    """Of every measurement. Raises PackageNotFoundError."""
    of_libraries = [(name, metadata.version(name)) for name in LIBRARIES]
    return tuple(sorted([*of_libraries, ("python", platform.python_version())]))


def cpu_name() -> str:
    """As the kernel names it; the architecture where it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
