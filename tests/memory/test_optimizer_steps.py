"""Costs of an optimizer step, of clipping and of unscaling, worked out by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from autotune.catalogue.gpus import find_gpu
from autotune.memory.allocator import Tape
from autotune.memory.optimizers import (
    StepCost,
    TensorSpec,
    clip_cost,
    unscale_cost,
    write_clip,
    write_unscale,
)
from autotune.memory.optimizers.low_rank import SvdProjection
from autotune.memory.replayer import replay
from autotune.space.optimizers import OPTIMIZERS

CHUNK = 65_536
ONE_LAUNCH = TensorSpec(shape=(320 * CHUNK,), dtype="float32")
"""Fills the 320 blocks of a launch exactly."""


def cost(name: str, *specs: TensorSpec) -> StepCost:
    return OPTIMIZERS[name].algorithm.cost(specs)


@pytest.mark.parametrize(
    ("name", "bytes_per_element"),
    [
        ("adamw_torch", 18 * 2),
        ("adamw_torch_fused", 7 * 2),
        ("adamw_bnb_8bit", 3 * 2 + 4 * (1 + 4 / 256)),
        ("paged_adamw_32bit", 3 * 2 + 4 * 4),
        ("lion_8bit", 3 * 2 + 2 * (1 + 4 / 256)),
        ("adafactor", 3 * 2 + 24 * 4),
        ("sgd", 3 * 2),
        ("rmsprop", 13 * 2),
        ("adagrad", 13 * 2),
        ("ademamix", 3 * 2 + 2 * 3 * 4),
        # Gradient and moments read twice; 4 bytes, or 12, and a block's largest value of each moment, twice.
        # The last but one of each: two code books.
        ("adamw_torch_8bit", 4 * 2 + 6 * (1 + 4 / 256) + 6 * 1024 / 4096**2 + 4 * (4 + 4 / 256)),
        ("adamw_torch_4bit", 4 * 2 + 6 * (1 / 2 + 4 / 256) + 6 * 64 / 4096**2 + 4 * (12 + 4 / 256)),
        ("schedule_free_adamw", 23 * 2),
        ("schedule_free_sgd", 9 * 2),
        # The moments' pass and the weights' pass; the compensation is read and written.
        ("stable_adamw", 5 * 2 + 4 * 2 + 2 * 2),
        # Two casts, the addition in float32, the copy back.
        ("lomo", 6 + 6 + 12 + 6),
        # Clipping and 30 passes beside six copies over PCIe.
        ("grokadamw", 33 * 2),
    ],
)
def test_traffic_of_a_large_bf16_matrix(name: str, bytes_per_element: float) -> None:
    spec = TensorSpec(shape=(4096, 4096), dtype="bfloat16")
    assert cost(name, spec).bytes_moved == pytest.approx(bytes_per_element * 4096**2, rel=1e-6)


@pytest.mark.parametrize(
    ("shape", "sizes_bytes"),
    [
        ((4096, 1024), [4 * 4096, 4 * 1024]),
        # A matrix for each of the first dimension.
        ((3, 4096, 1024), [3 * 4 * 4096, 3 * 4 * 1024]),
        ((1024,), [4 * 1024]),
    ],
)
def test_adalomo_keeps_a_sum_of_each_row_and_each_column(
    shape: tuple[int, ...], sizes_bytes: list[int]
) -> None:
    kept = OPTIMIZERS["adalomo"].algorithm.state(TensorSpec(shape=shape, dtype="bfloat16"))
    assert [tensor.size_bytes for tensor in kept] == sizes_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_first_step_leaves_each_parameters_state(name: str, dtype: str) -> None:
    algorithm = OPTIMIZERS[name].algorithm
    specs = [
        TensorSpec(shape=(1024, 512), dtype=dtype, linear=True),
        TensorSpec(shape=(512, 1024), dtype=dtype, linear=True),
        TensorSpec(shape=(512,), dtype=dtype, group=1),
        TensorSpec(shape=(4096, 512), dtype=dtype, embedding=True),
    ]
    tape = Tape()
    kept = algorithm.write_step(tape, specs, None)
    for spec, indices in zip(specs, kept, strict=True):
        assert [tape.sizes[index] for index in indices] == [
            tensor.size_bytes for tensor in algorithm.state(spec) if tensor.place == "device"
        ]
    alive = set(tape.events) - {~event for event in tape.events if event < 0}
    alive = {event for event in alive if event >= 0} - {index for each in kept for index in each}
    # What all parameters share: 8-bit bitsandbytes' code books.
    assert {tape.sizes[index] for index in alive} <= {1024}
    assert len(alive) <= 2


@pytest.mark.parametrize(
    ("shape", "kept_bytes", "product_bytes"),
    [
        # The right factor stays of a tall matrix, the left one of a wide one: both 512 x 512.
        ((1024, 512), 4 * 512 * 512, 4 * 128 * 1024),
        ((512, 1024), 4 * 512 * 512, 4 * 128 * 1024),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_galore_holds_the_three_factors_of_a_decomposition(
    shape: tuple[int, int], kept_bytes: int, product_bytes: int, dtype: str
) -> None:
    """torch.linalg.svd, in float32: U, the singular values and V, and a copy of the matrix beside them."""
    tape = Tape()
    spec = TensorSpec(shape=shape, dtype=dtype, linear=True)
    kept = SvdProjection().write_matrix(tape, spec, dtype)
    factors = [4 * shape[0] * 512, 4 * 512, 4 * 512 * shape[1]]
    made = [*factors, 4 * 1024 * 512, 4 * 128 * 128, product_bytes]
    if dtype == "float32":
        assert tape.sizes == made
        assert tape.sizes[kept] == kept_bytes
    else:
        # Its first 128 columns, in 16 bits; the matrix was cast before.
        assert tape.sizes == [4 * 1024 * 512, *made, 2 * 128 * 512]
        assert tape.sizes[kept] == 2 * 128 * 512
    assert replay(tape.sizes, tape.events).final_allocated_bytes == tape.sizes[kept]


@pytest.mark.parametrize(
    ("specs", "num_launches"),
    [
        ([ONE_LAUNCH], 1),
        ([TensorSpec(shape=(320 * CHUNK + 1,), dtype="float32")], 2),
        ([TensorSpec(shape=(960 * CHUNK,), dtype="float32")], 3),
        # Two lists: 64 tensors fit a launch.
        ([TensorSpec(shape=(8,), dtype="float32")] * 64, 1),
        ([TensorSpec(shape=(8,), dtype="float32")] * 65, 2),
        # A tensor carried over from a full launch keeps a slot of the next.
        (
            [TensorSpec(shape=(321 * CHUNK,), dtype="float32")]
            + [TensorSpec(shape=(8,), dtype="float32")] * 63,
            2,
        ),
        (
            [TensorSpec(shape=(321 * CHUNK,), dtype="float32")]
            + [TensorSpec(shape=(8,), dtype="float32")] * 64,
            3,
        ),
        ([TensorSpec(shape=(0,), dtype="float32")], 0),
        # Lists hold one dtype and one parameter group.
        ([TensorSpec(shape=(8,), dtype=dtype) for dtype in ("float32", "bfloat16")], 2),
        ([TensorSpec(shape=(8,), dtype="float32", group=group) for group in (0, 1, 0)], 2),
    ],
)
def test_launches_of_one_pass_over_two_lists(specs: list[TensorSpec], num_launches: int) -> None:
    assert cost("sgd", *specs).num_kernels == num_launches


def test_foreach_adamw_launches_seven_kernels_where_fused_launches_two() -> None:
    assert cost("adamw_torch", ONE_LAUNCH).num_kernels == 7
    # The update, and the step counts' += 1.
    assert cost("adamw_torch_fused", ONE_LAUNCH).num_kernels == 2


def test_bitsandbytes_waits_after_every_parameter() -> None:
    specs = [TensorSpec(shape=(5000,), dtype="float32")] * 10
    plain, paged = cost("adamw_bnb_8bit", *specs), cost("paged_adamw_8bit", *specs)
    assert (plain.num_kernels, plain.num_synchronizations) == (10, 10)
    assert (paged.num_kernels, paged.num_synchronizations) == (10, 11)
    assert cost("adamw_torch", *specs).num_synchronizations == 0


def test_grokadamw_copies_three_averages_to_the_device_and_back() -> None:
    assert cost("grokadamw", ONE_LAUNCH).host_bytes == 6 * ONE_LAUNCH.size_bytes
    assert cost("adamw_torch", ONE_LAUNCH).host_bytes == 0


@pytest.mark.parametrize(("name", "num_products"), [("galore_adamw", 2), ("apollo_adamw", 1)])
def test_a_projection_costs_its_products(name: str, num_products: int) -> None:
    """An SVD besides, as 450 x rows x columns x smaller side once in 200 steps."""
    spec = TensorSpec(shape=(4096, 1024), dtype="bfloat16", linear=True)
    flops = dict(cost(name, spec).matmul_flops)
    assert flops["bfloat16"] == num_products * 2 * 128 * 4096 * 1024
    assert flops.get("float32", 0) == (450 * 4096 * 1024**2 / 200 if num_products == 2 else 0)
    assert cost(name, TensorSpec(shape=(4096, 1024), dtype="bfloat16")).matmul_flops == ()


def test_costs_add_up_by_dtype() -> None:
    one = StepCost(bytes_moved=1, num_kernels=2, matmul_flops=(("float32", 3.0), ("bfloat16", 4)))
    two = StepCost(bytes_moved=10, num_kernels=20, host_bytes=5, matmul_flops=(("float32", 30),))
    assert one + two == StepCost(
        bytes_moved=11,
        num_kernels=22,
        host_bytes=5,
        matmul_flops=(("float32", 33), ("bfloat16", 4)),
    )


def test_clip_reads_gradients_twice_and_writes_them_once() -> None:
    specs = [ONE_LAUNCH, TensorSpec(shape=(8,), dtype="float32", group=1)]
    result = clip_cost(specs)
    assert result.bytes_moved == 3 * (ONE_LAUNCH.size_bytes + 32)
    # Groups do not matter: one list needs 321 blocks. Norm and mul twice each, and 8 small ones.
    assert result.num_kernels == 2 * 2 + 8


def test_clip_leaves_only_the_total_norm() -> None:
    tape = Tape()
    total = write_clip(tape, [ONE_LAUNCH, TensorSpec(shape=(8,), dtype="float32")])
    assert tape.sizes[total] == 4
    assert replay(tape.sizes, tape.events).final_allocated_bytes == 512
    # CUDA's partial sums: 320 chunks of the largest, for each of two tensors.
    assert tape.sizes[0] == 2 * 320 * 4
    assert max(tape.sizes) == tape.sizes[0]


def test_unscale_leaves_only_found_inf() -> None:
    tape = Tape()
    found_inf = write_unscale(tape)
    assert tape.sizes[found_inf] == 4
    assert replay(tape.sizes, tape.events).final_allocated_bytes == 512


def test_unscale_passes_once_and_waits_once() -> None:
    result = unscale_cost([ONE_LAUNCH])
    assert result.bytes_moved == 2 * ONE_LAUNCH.size_bytes
    assert result.num_synchronizations == 1
    assert result.num_kernels == 7


@pytest.mark.parametrize(("multiprocessors", "num_buffers"), [((132, 2048), 2), (None, 0)])
def test_adafactors_means_of_rows_need_buffers_on_a_card(
    multiprocessors: tuple[int, int] | None, num_buffers: int
) -> None:
    """PyTorch 2.13 for CUDA gave so many bytes on an H200 without one: partial sums, then semaphores."""
    tape = Tape(multiprocessors=multiprocessors)
    embedding = TensorSpec(shape=(49_152, 576), dtype="bfloat16")
    OPTIMIZERS["adafactor"].algorithm.write_step(tape, [embedding], None)
    assert [tape.sizes.count(size) for size in (124_747_776, 20)] == [num_buffers // 2] * 2


@pytest.mark.parametrize(
    ("name", "dtype", "peak_bytes"),
    [
        ("apollo_adamw", "float32", 9_177_088),
        ("apollo_adamw", "bfloat16", 8_849_408),
        ("galore_adamw", "float32", 12_452_864),
        ("galore_adamw", "bfloat16", 11_471_872),
        ("galore_adafactor", "bfloat16", 11_933_696),
        ("galore_adamw_8bit", "bfloat16", 11_471_360),
    ],
)
def test_a_product_has_its_workspace_where_each_makes_one(
    name: str, dtype: str, peak_bytes: int
) -> None:
    """PyTorch 2.15 for CUDA allocated so many bytes in a first step on an RTX 3090 that was not there.

    An SVD was answered with tensors of its shapes.
    """
    tape = Tape(multiprocessors=find_gpu("rtx-3090").multiprocessors, product_bytes=8320 * 1024)
    algorithm: Any = OPTIMIZERS[name].algorithm
    if name.startswith("galore"):
        algorithm = dataclasses.replace(algorithm, projection=SvdProjection(clones=False))
    specs = [
        TensorSpec(shape=(64,), dtype=dtype, group=1),
        TensorSpec(shape=(1024, 256), dtype=dtype, linear=True),
    ]
    algorithm.write_step(tape, specs, None)
    assert replay(tape.sizes, tape.events).peak_allocated_bytes == peak_bytes
