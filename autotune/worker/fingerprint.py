"""The fingerprint of this process's measurements."""

from __future__ import annotations

import torch

from autotune.catalogue import nvml
from autotune.catalogue.installed import cpu_name, versions
from autotune.records.fingerprint import Fingerprint


def fingerprint(backend: str, allocator: str) -> Fingerprint:
    """The fingerprint of the first visible CUDA device, or of the CPU. It needs no CUDA context.

    `allocator`: its settings, without what the configuration adds to them.
    """
    is_cuda = backend == "cuda"
    return Fingerprint(
        device=torch.cuda.get_device_name(0) if is_cuda else cpu_name(),
        driver=_driver() if is_cuda else "",
        cuda=torch.version.cuda or "" if is_cuda else "",
        versions=versions(),
        allocator=allocator,
    )


def _driver() -> str:
    """The driver's version; empty without NVML."""
    try:
        with nvml.opened() as pynvml:
            return nvml.text(pynvml.nvmlSystemGetDriverVersion())
    except nvml.NoCard:
        return ""
