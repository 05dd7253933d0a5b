"""A trace's launches as kernels that are priced, with what the host spends on some of them besides."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.memory.traces import Launch, TracedKernel
from autotune.space.precisions import PRECISIONS
from autotune.speed import roofline
from autotune.speed.host import Host


def as_kernels(
    launches: Sequence[Launch], precision: str, host: Host, *, num_regions: int = 0
) -> list[roofline.Kernel]:
    """Return the kernels of launches at a precision; `num_regions`: those that are recomputed."""
    tf32 = PRECISIONS[precision].tf32
    again = [launch.count for launch in launches if launch.kernel.phase == "recompute"]
    kernels = []
    for launch in launches:
        k = launch.kernel
        kind = k.name if k.name in roofline.COPIES else roofline.kind_of(k.name)
        beside = {"dequantize": host.unpack_seconds, "copy_aside": host.copy_seconds}
        host_seconds = beside.get(kind, 0.0)
        if is_triton(k):
            host_seconds += host.triton_seconds
        if k.phase == "recompute":
            host_seconds += num_regions * host.region_seconds / sum(again)
        kernels.append(
            roofline.Kernel(
                name=k.name,
                kind=kind,
                dtype=rate_dtype(k.dtype, tf32=tf32) if kind == "matmul" else k.dtype,
                flops=launch.flops,
                bytes_moved=launch.bytes_moved,
                shape=launch.shape,
                count=launch.count,
                phase=k.phase,
                host_seconds=host_seconds,
            )
        )
    return kernels


def is_triton(kernel: TracedKernel) -> bool:
    """Whether it is one of Liger's Triton kernels, with its wrapper: those of chunks are launched bare."""
    return kernel.chunk_moved is None and ("_kernel" in kernel.name or "_triton" in kernel.name)


def rate_dtype(dtype: str, *, tf32: bool) -> str:
    """The dtype whose rate a matrix product runs at."""
    if dtype.startswith("float8"):  # e4m3 by e4m3 or by e5m2, at one rate
        return "float8"
    return "tf32" if tf32 and dtype == "float32" else dtype
