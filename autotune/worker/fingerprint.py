"""The fingerprint of this process's measurements."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import pynvml
import torch

from autotune.results import Fingerprint

LIBRARIES = ("accelerate", "bitsandbytes", "peft", "torch", "transformers")


def fingerprint(backend: str) -> Fingerprint:
    """Of the first visible CUDA device, or of the CPU. Needs no CUDA context."""
    is_cuda = backend == "cuda"
    versions = [(name, importlib.metadata.version(name)) for name in LIBRARIES]
    return Fingerprint(
        device=torch.cuda.get_device_name(0) if is_cuda else cpu_name(),
        driver=_driver() if is_cuda else "",
        cuda=torch.version.cuda or "" if is_cuda else "",
        versions=tuple(sorted([*versions, ("python", platform.python_version())])),
        # The newer name wins (torch c10/core/AllocatorConfig.cpp).
        allocator=os.environ.get("PYTORCH_ALLOC_CONF")
        or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
    )


def cpu_name() -> str:
    """As the kernel names it; the architecture where it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _driver() -> str:
    """Empty without NVML."""
    try:
        pynvml.nvmlInit()
        try:
            version = pynvml.nvmlSystemGetDriverVersion()
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return ""
    return version.decode() if isinstance(version, bytes) else str(version)
