"""Launches as kernels: which of them cost the host more than an operation."""

from __future__ import annotations

import dataclasses

import pytest

from autotune.memory.traces import Launch, TracedKernel
from autotune.predict.estimate_parts import parked_bytes
from autotune.predict.launched_kernels import as_kernels, rate_dtype
from autotune.speed.host import USUAL

HOST = dataclasses.replace(
    USUAL.times(0),
    region_seconds=1.0,
    unpack_seconds=100.0,
    triton_seconds=10_000.0,
    copy_seconds=1_000_000.0,
)


def launch(name: str, *, phase: str = "forward", count: int = 1, is_chunk: bool = False) -> Launch:
    kernel = TracedKernel(
        name=name,
        dtype="bfloat16",
        flops=(0, 0, 0),
        moved=(),
        phase=phase,
        count=count,
        chunk_moved=() if is_chunk else None,
    )
    return Launch(kernel, 0.0, 0.0, count, ())


@pytest.mark.parametrize(
    ("launched", "seconds"),
    [
        (launch("mm"), 0),
        (launch("copy_host"), 0),
        (launch("copy_aside"), 1_000_000),
        (launch("dequantize_4bit"), 100),
        (launch("_rms_norm_backward_kernel", phase="backward"), 10_000),
        (launch("_triton_rope"), 10_000),
        (launch("liger_cross_entropy_kernel", is_chunk=True), 0),
    ],
    ids=lambda value: value.kernel.name if isinstance(value, Launch) else "",
)
def test_what_the_host_spends_beside_a_launch(launched: Launch, seconds: float) -> None:
    (kernel,) = as_kernels([launched], "bf16-true", HOST)
    assert kernel.host_seconds == seconds


def test_regions_are_shared_out_among_what_is_recomputed() -> None:
    launches = [
        launch("mm", count=5),
        launch("mm", phase="recompute", count=3),
        launch("dequantize_4bit", phase="recompute", count=1),
    ]
    kernels = as_kernels(launches, "bf16-true", HOST, num_regions=2)
    assert [kernel.host_seconds for kernel in kernels] == [0, 0.5, 100.5]


def test_what_is_copied_out_and_back_waits_in_powers_of_two() -> None:
    def copies(name: str, count: int, size_bytes: float) -> Launch:
        return dataclasses.replace(launch(name, count=count), bytes_moved=size_bytes, count=count)

    there = [copies("copy_host", 2, 2**20), copies("copy_aside", 4, 2**20 + 0.5)]
    assert parked_bytes(there) == 2**20 + 2 * 2**21
    others = [copies(name, 2, 2**20) for name in ("add", "copy_", "copy_host_of", "mm")]
    assert parked_bytes([*there, *others]) == parked_bytes(there)


@pytest.mark.parametrize(
    ("dtype", "tf32", "rate"),
    [
        ("float8_e4m3fn", False, "float8"),
        ("float8_e5m2", True, "float8"),
        ("float32", True, "tf32"),
        ("float32", False, "float32"),
        ("bfloat16", True, "bfloat16"),
    ],
)
def test_a_product_runs_at_the_rate_of_its_numbers(dtype: str, tf32: bool, rate: str) -> None:
    assert rate_dtype(dtype, tf32=tf32) == rate
