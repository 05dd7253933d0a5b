"""A stand-in for pynvml, for there is no card where the tests run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from autotune.common.units import MIB

Process = tuple[int, int | None]
"""A process that holds memory of a card: (process id, bytes)."""


class NvmlError(Exception):
    pass


def fake_nvml(
    monkeypatch: pytest.MonkeyPatch,
    names: list[str],
    *,
    total_bytes: int = 12288 * MIB,
    reserved_bytes: int | None = 250 * MIB,
    used_bytes: int = 0,
    error: str = "",
    compute: Sequence[Process] = (),
    graphics: Sequence[Process] = (),
    programs: dict[int, str] | None = None,
    clock_reasons: int = 0,
    compute_capability: tuple[int, int] = (8, 9),
    driver: str = "580.65.06",
    cuda: int = 13000,
) -> list[str]:
    """Install the stand-in; return the list that records nvmlShutdown. `error` is raised by nvmlInit."""
    calls: list[str] = []

    def init() -> None:
        if error:
            raise NvmlError(error)

    def memory(_handle: int, version: int | None = None) -> SimpleNamespace:
        if version is None:
            return SimpleNamespace(
                total=total_bytes, used=used_bytes, free=total_bytes - used_bytes
            )
        if reserved_bytes is None:
            raise NvmlError("Function Not Found")
        free_bytes = total_bytes - reserved_bytes - used_bytes
        return SimpleNamespace(
            total=total_bytes, reserved=reserved_bytes, used=used_bytes, free=free_bytes
        )

    def program(pid: int) -> str:
        if programs is None or pid not in programs:
            raise NvmlError("Not Found")
        return programs[pid]

    def running(processes: Sequence[Process]) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in processes]

    nvml: Any = ModuleType("pynvml")
    nvml.NVMLError = NvmlError
    nvml.nvmlMemory_v2 = 2
    nvml.nvmlInit = init
    nvml.nvmlShutdown = lambda: calls.append("shutdown")
    nvml.nvmlDeviceGetCount = lambda: len(names)
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index
    nvml.nvmlDeviceGetName = lambda handle: names[handle]
    nvml.nvmlDeviceGetUUID = lambda handle: f"GPU-{handle}abc"
    nvml.nvmlDeviceGetMemoryInfo = memory
    nvml.nvmlDeviceGetCudaComputeCapability = lambda _handle: compute_capability
    nvml.nvmlSystemGetDriverVersion = lambda: driver
    nvml.nvmlSystemGetCudaDriverVersion_v2 = lambda: cuda
    nvml.nvmlDeviceGetComputeRunningProcesses = lambda _handle: running(compute)
    nvml.nvmlDeviceGetGraphicsRunningProcesses = lambda _handle: running(graphics)
    nvml.nvmlDeviceGetCurrentClocksEventReasons = lambda _handle: clock_reasons
    nvml.nvmlSystemGetProcessName = program
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return calls
