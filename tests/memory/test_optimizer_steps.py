"""Costs of an optimizer step, of clipping and of unscaling, worked out by hand."""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from autotune.memory.optimizers.kernels import BitsAndBytes
from autotune.memory.optimizers.low_rank import SvdProjection
from autotune.memory.optimizers.torch_lists import (
    OneByOne,
    ScheduleFree,
    TensorLists,
    launches_over,
)
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


def launched(numbers: list[int], depth: int) -> list[tuple[int, int, int]]:
    """multi_tensor_apply of MultiTensorApply.cuh, chunk by chunk: elements, blocks and the longest chunk."""
    found, blocks, num_tensors = list[tuple[int, int, int]](), list[int](), 0
    for number in filter(None, numbers):
        num_tensors += 1
        chunks = [min(CHUNK, number - start) for start in range(0, number, CHUNK)]
        for position, chunk in enumerate(chunks):
            blocks.append(chunk)
            is_last = position == len(chunks) - 1
            if (num_tensors == {1: 110, 2: 64, 3: 48, 4: 36}[depth] and is_last) or len(
                blocks
            ) == 320:
                found.append((sum(blocks), len(blocks), max(blocks)))
                blocks.clear()
                num_tensors = 0 if is_last else 1
    return [*found, *([(sum(blocks), len(blocks), max(blocks))] if blocks else [])]


@given(
    numbers=st.lists(
        st.sampled_from(
            [0, 1, 2047, 2049, CHUNK - 1, CHUNK, CHUNK + 1, 300 * CHUNK, 700 * CHUNK + 5]
        ),
        max_size=12,
    ),
    repeats=st.sampled_from([1, 12]),
    depth=st.integers(1, 4),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_launches_over_lists_are_those_of_torchs_loop(
    numbers: list[int], repeats: int, depth: int, dtype: str
) -> None:
    numbers *= repeats
    specs = [TensorSpec(shape=(number,), dtype=dtype) for number in numbers]
    item_bytes = 4 if dtype == "float32" else 2
    expected = launched(numbers, depth)
    assert list(launches_over(specs, depth)) == [(item_bytes * n, *rest) for n, *rest in expected]
    algorithm = TensorLists(num_moments=0, passes=((depth, 3),), step_on_device=depth == 4)
    found = algorithm.cost(specs)
    of_weights = [each for each in found.lists if each.is_fused == (depth == 4)]
    for is_full in (False, True):
        alike = [each for each in expected if (each[1] == 320) == is_full]
        sums = [each for each in of_weights if each.is_full == is_full]
        assert len(sums) == bool(alike)
        for each in sums:
            assert (each.count, each.num_moved) == (len(alike), 3)
            assert each.bytes_moved == 3 * item_bytes * sum(n for n, *_ in alike)
            assert each.num_blocks == sum(blocks for _, blocks, _ in alike)
            assert each.num_rounds == sum(-(-longest // 2048) for *_, longest in alike)
    if depth < 4:
        assert found.num_kernels == len(expected)
        assert found.bytes_moved == 3 * item_bytes * sum(numbers)
        return
    # One count more for each weight, which is raised by itself.
    counts = launched([1] * len(specs), 1)
    assert found.num_kernels == len(expected) + len(counts)
    assert found.bytes_moved == 3 * item_bytes * sum(numbers) + 8 * len(specs)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_calls_cost_as_many_times_as_much(name: str) -> None:
    found = cost(name, *MANY)
    three, added = found.times(3), found + found + found
    flops = dict(added.matmul_flops)
    assert dict(three.matmul_flops) == pytest.approx(flops)
    assert all(
        count == pytest.approx(3 * dict(found.matmul_flops)[at]) for at, count in flops.items()
    )
    assert dataclasses.replace(three, matmul_flops=()) == dataclasses.replace(
        added, matmul_flops=()
    )
    for field in dataclasses.fields(StepCost):
        if field.name not in ("lists", "matmul_flops"):
            assert getattr(three, field.name) == 3 * getattr(found, field.name)
    for one, many in zip(found.lists, three.lists, strict=True):
        assert one.alike == many.alike
        for each in ("count", "bytes_moved", "num_blocks", "num_rounds"):
            assert getattr(many, each) == 3 * getattr(one, each)


MANY = [
    TensorSpec(shape=(400, 300), dtype="bfloat16", linear=True),
    TensorSpec(shape=(300, 400), dtype="float32", linear=True),
    TensorSpec(shape=(100_000,), dtype="float32", group=1),
    TensorSpec(shape=(4095,), dtype="bfloat16", group=1),
    TensorSpec(shape=(4097,), dtype="bfloat16"),
    TensorSpec(shape=(1000, 50), dtype="bfloat16", embedding=True),
]
ONE_BY_ONE = [
    name
    for name, row in OPTIMIZERS.items()
    if not isinstance(row.algorithm, TensorLists | ScheduleFree)
]


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_what_updates_weights_one_by_one_costs_the_sum_of_them(name: str) -> None:
    """But for the wait at the end that paged state needs."""
    waits = int(OPTIMIZERS[name].paged)
    whole, parts = cost(name, *MANY), [cost(name, spec) for spec in MANY]
    added = functools.reduce(operator.add, parts)
    assert whole.num_synchronizations - waits == added.num_synchronizations - len(MANY) * waits
    assert dict(whole.matmul_flops) == pytest.approx(dict(added.matmul_flops))
    for field in dataclasses.fields(StepCost):
        if field.name not in ("matmul_flops", "num_synchronizations", "lists"):
            assert getattr(whole, field.name) == getattr(added, field.name), field.name


def test_what_the_host_does_beside_launches_is_as_much_as_was_timed() -> None:
    """In operations of a forward pass, for each weight (studies/host-time/OPTIMIZERS.md)."""
    for name, each in (("adamw_torch_8bit", 35), ("adamw_torch_4bit", 36), ("lion_32bit", 3)):
        assert cost(name, *MANY).host_operations == each * len(MANY)
    assert cost("adamw_torch", *MANY).host_operations == 0


QUANTISED = (120_000, 120_000, 100_000, 4097)
"""Elements of those that 8-bit bitsandbytes keeps in 8 bits."""


@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize(
    ("name", "averages", "bits"),
    [
        ("adamw_8bit", (1, 1), 8),
        ("lion_8bit", (1,), 8),
        ("ademamix_8bit", (2, 1), 8),
        ("adamw_32bit", (1, 1), 32),
        ("lion_32bit", (1,), 32),
        ("ademamix_32bit", (2, 1), 32),
    ],
)
def test_bitsandbytes_reads_and_writes_its_state_and_pages_what_is_large(
    name: str, averages: tuple[int, ...], bits: int, is_paged: bool
) -> None:
    """8-bit averages have a float32 scale for each 256."""
    algorithm = OPTIMIZERS[f"paged_{name}"].algorithm
    assert isinstance(algorithm, BitsAndBytes)
    algorithm = dataclasses.replace(algorithm, paged=is_paged)
    moved_bytes = dict.fromkeys((False, True), 0)
    for spec in MANY:
        count = spec.num_elements
        is_8bit = bits == 8 and count in QUANTISED
        place = "managed" if is_paged and count >= 100_000 else "device"
        held = [(n * count * (1 if is_8bit else 4), place) for n in averages]
        scales = [(4 * n * -(-count // 256), "device") for n in averages if is_8bit]
        state = [(each.size_bytes, each.place) for each in algorithm.state(spec)]
        assert state == (scales + held if len({*averages}) > 1 else held + scales)
        moved_bytes[is_8bit] += 3 * spec.size_bytes + 2 * sum(n for n, _ in held + scales)
    found = algorithm.cost(MANY)
    assert found.bytes_moved == sum(moved_bytes.values())
    assert found.quantized_bytes == moved_bytes[True]
    assert found.num_kernels == len(MANY)
    assert found.num_synchronizations == len(MANY) + is_paged
    num_quantised = len(QUANTISED) if bits == 8 else 0
    assert found.num_quantized_kernels == num_quantised
    assert found.num_quantized_values == (sum(averages) * sum(QUANTISED) if bits == 8 else 0)
    assert found.host_operations == 3 * len(MANY)


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
    found, clipping = cost("grokadamw", ONE_LAUNCH), clip_cost([ONE_LAUNCH])
    assert found.host_bytes == 6 * ONE_LAUNCH.size_bytes
    # Each copy is waited for, and launched beside the update's twelve kernels.
    assert found.num_synchronizations == 6
    assert found.num_kernels == clipping.num_kernels + 12 + 6
    assert found.bytes_moved == clipping.bytes_moved + 30 * ONE_LAUNCH.size_bytes
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
    assert sorted((each.num_moved, each.num_blocks) for each in result.lists) == [
        (1, 1), (1, 320), (2, 1), (2, 320)
    ]  # fmt: skip


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


def test_a_loop_over_weights_runs_each_pass_for_each_weight() -> None:
    """AdamW's seven passes read and write 18 values for each; two weights have 16 B together."""
    specs = [TensorSpec(shape=(n,), dtype="bfloat16") for n in (3, 5)]
    lists = OPTIMIZERS["adamw_torch"].algorithm
    assert isinstance(lists, TensorLists)
    assert OneByOne(lists=lists).cost(specs) == StepCost(bytes_moved=18 * 16, num_kernels=7 * 2)
