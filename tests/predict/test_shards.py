"""The libraries' rules of who gets what, by figures worked out by hand."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.memory.traces import Phase, TracedParameter
from autotune.predict.sharding.added_tensors import SizesByRank
from autotune.predict.sharding.layer_counts import USUAL_RANK
from autotune.predict.sharding.library_rules import (
    Weight,
    ddp_broadcasts,
    ddp_buckets,
    ddp_first_buckets,
    ddp_rebuilt_buckets,
    fsdp2_shard_shape,
    zero3_partition_elements,
    zero_buckets,
    zero_partition_elements,
)
from autotune.predict.sharding.shards import EMBED, TAIL, Shares
from autotune.predict.sharding.zero_parts import ZeroParts
from autotune.predict.sharding.zero_step import positions_of
from autotune.records.estimate import TraceSpec
from autotune.space.parallelisms import PARALLELISMS


@pytest.mark.parametrize(
    ("shape", "num_gpus", "expected"),
    [
        ((67, 48), 2, (34, 48)),
        ((67, 48), 3, (23, 48)),
        ((64, 48), 4, (16, 48)),
        ((7,), 4, (2,)),
        # Fewer rows than GPUs: the last of them keep nothing but padding.
        ((3, 5), 8, (1, 5)),
    ],
)
def test_fsdp2_deals_out_rows(
    shape: tuple[int, ...], num_gpus: int, expected: tuple[int, ...]
) -> None:
    assert fsdp2_shard_shape(shape, num_gpus) == expected


@pytest.mark.parametrize(
    ("elements", "num_gpus", "zero1", "zero3"),
    [
        # Padded to 16 = 2 x (2 x 4) elements, a quarter each; by itself 10 / 4 rounded up.
        (10, 4, 4, 3),
        (16, 4, 4, 4),
        (17, 2, 10, 9),
        (1000, 1, 1000, 1000),
    ],
)
def test_zero_pads_to_equal_parts(elements: int, num_gpus: int, zero1: int, zero3: int) -> None:
    assert zero_partition_elements(elements, num_gpus) == zero1
    assert zero3_partition_elements(elements, num_gpus) == zero3


def weight(*shape: int, dtype: str = "float32", trainable: bool = True) -> Weight:
    return Weight(shape=shape, dtype=dtype, trainable=trainable, group=0)


WEIGHTS = [
    weight(1000, 100),  # 400,000 bytes
    weight(50, 50, trainable=False),
    weight(3000, 1000),  # 12,000,000: with the first past 1 MiB
    weight(7),
    weight(2000, 2000),  # 16,000,000: below 25 MiB
    weight(500, 1000, dtype="bfloat16"),  # 1,000,000, below 1 MiB, in a bucket of its dtype
]


def test_ddp_fills_buckets_in_the_order_of_the_model() -> None:
    # It makes the one with the last weights first.
    assert ddp_buckets(WEIGHTS) == [1_000_000, 16_000_028, 12_400_000]


def test_ddp_rebuilds_them_in_the_order_of_the_gradients() -> None:
    arriving = [each for each in reversed(WEIGHTS) if each.trainable]
    assert ddp_rebuilt_buckets(arriving) == [16_000_000, 1_000_000, 12_400_028]


def test_before_that_ddp_has_one_bucket_of_each_dtype() -> None:
    assert ddp_first_buckets(WEIGHTS) == [1_000_000, 28_400_028]


def test_a_bucket_after_the_first_takes_25_mib() -> None:
    eight_mib = [weight(2 * 2**20) for _ in range(6)]
    # The first passes 1 MiB at once; four fill 32 MiB; one is left.
    assert ddp_buckets(eight_mib) == [8 * 2**20, 32 * 2**20, 8 * 2**20]


def test_ddp_copies_what_it_sends_but_for_a_weight_that_goes_by_itself() -> None:
    embedding, half = weight(2**26), weight(2**17, dtype="bfloat16")
    weights = [embedding, half, weight(7), half, weight(9)]
    assert ddp_broadcasts(weights) == [0, 2 * 2 * 2**17, 4 * (7 + 9)]


HIDDEN, VOCABULARY = 64, 1001
SPEC = TraceSpec(
    method="full",
    lora_targets=None,
    quantization="none",
    precision="bf16-autocast",
    activation_checkpointing=0,
    activation_offloading=False,
    attention="sdpa",
    single=False,
)


def shares(
    parallelism: str,
    *,
    dtype: str = "float32",
    num_rows: int = VOCABULARY,
    adapters: bool = False,
    **spec: Any,
) -> Shares:
    """Four GPUs' shares of an embedding, two layers of a matrix and a bias each, a norm and a head.

    `adapters`: behind these, a matrix in float32 for each layer.
    """

    def parameter(layer: int, *shape: int, embedding: bool = False) -> TracedParameter:
        return TracedParameter(
            number=0,
            place=(0, layer),
            shape=tuple((size, 0, 0) for size in shape),
            dtype=dtype,
            trainable=True,
            group=int(len(shape) == 1),
            embedding=embedding,
        )

    layers = [(layer, *shape) for layer in (0, 1) for shape in ((HIDDEN, HIDDEN), (HIDDEN,))]
    return Shares(
        [
            parameter(-1, num_rows, HIDDEN, embedding=True),
            *(parameter(*layer) for layer in layers),
            parameter(-1, HIDDEN),
            parameter(-1, VOCABULARY, HIDDEN),
            *(
                dataclasses.replace(parameter(layer, HIDDEN, 8), dtype="float32")
                for layer in (0, 1)
                if adapters
            ),
        ],
        dataclasses.replace(SPEC, parallelism=parallelism, **spec),
        num_gpus=4,
        hidden_size=HIDDEN,
        is_one_unit=False,
    )


def test_ddp_sends_adapters_where_the_first_layer_has_its_own() -> None:
    found = shares("ddp", dtype="bfloat16", num_rows=2**21, adapters=True)
    layers = 2 * (2 * HIDDEN * (HIDDEN + 1) + HIDDEN + VOCABULARY * HIDDEN)
    # The embedding goes by itself; then the first layer's bucket, and that of its adapters.
    expected = [0, layers, 2 * 4 * 8 * HIDDEN]
    assert found.num_ddp_broadcasts(0) == 3
    assert [found.ddp_broadcast_bytes(0, index) for index in range(4)] == [*expected, 0]


@pytest.mark.parametrize(
    ("parallelism", "precision", "dtype", "element_bytes"),
    [
        # DDP computes with what is there; autocast casts within the step.
        ("ddp", "bf16-autocast", "float32", 4),
        ("fsdp2", "bf16-autocast", "float32", 2),
        ("fsdp2", "bf16-true", "bfloat16", 2),
        ("fsdp2", "fp32", "float32", 4),
        ("zero2", "bf16-mixed", "float32", 2),
        ("zero3", "fp32", "float32", 4),
        # Packed codes are no numbers to cast.
        ("fsdp2", "bf16-autocast", "uint8", 1),
        ("zero2", "fp32", "uint8", 1),
    ],
)
def test_weights_are_gathered_in_what_is_computed_with(
    parallelism: str, precision: str, dtype: str, element_bytes: int
) -> None:
    found = shares(parallelism, precision=precision)
    assert found.working_bytes(weight(10, 10, dtype=dtype, trainable=False)) == 100 * element_bytes


MATRICES = 2 * VOCABULARY * HIDDEN + 2 * HIDDEN * HIDDEN
BIASES = 3 * HIDDEN


def test_fsdp2_gathers_a_unit_at_a_time() -> None:
    found = shares("fsdp2")
    # 251 rows of 1,001 for each GPU: three too many in all, and two bytes for each element.
    assert found.gathered_bytes(0, EMBED) == 2 * 1004 * HIDDEN
    assert found.gathered_bytes(0, TAIL) == 2 * (1004 * HIDDEN + HIDDEN)
    assert found.gathered_bytes(0, ("layer", (0, 1))) == 2 * (HIDDEN * HIDDEN + HIDDEN)
    assert found.gathered_bytes(0) == 2 * (MATRICES + BIASES + 6 * HIDDEN)
    assert found.reduced_bytes(0, EMBED) == found.gathered_bytes(0, EMBED)
    # Under autocast the shards are float32.
    assert found.gradient_shard_bytes(0, EMBED) == 4 * 251 * HIDDEN
    assert (
        shares("fsdp2", precision="bf16-true", dtype="bfloat16").gradient_shard_bytes(0, EMBED)
        == 2 * 251 * HIDDEN
    )
    assert shares("ddp").gathered_bytes(0) == shares("zero2").gathered_bytes(0) == 0


@pytest.mark.parametrize(
    ("parallelism", "precision", "dtype", "is_cast"),
    [
        ("fsdp2", "bf16-autocast", "float32", True),
        ("fsdp2", "bf16-true", "bfloat16", False),
        ("fsdp2", "fp32", "float32", False),
        ("ddp", "bf16-autocast", "float32", False),
    ],
)
def test_a_shard_is_cast_where_another_dtype_is_gathered(
    parallelism: str, precision: str, dtype: str, is_cast: bool
) -> None:
    found = shares(parallelism, precision=precision, dtype=dtype)
    assert found.casts_shard(0) is is_cast
    # The embedding's 251 rows of a GPU, and 16 of the first layer's matrix, in 16 bits.
    sizes = [2 * 251 * HIDDEN, 2 * HIDDEN // 4 * HIDDEN]
    for positions in ((0,), (0, 1)):
        expected = sum(sizes[: len(positions)]) * is_cast
        assert found.cast_shards_bytes(0, positions) == expected


def test_zero3_keeps_small_weights_and_gathers_the_others_one_by_one() -> None:
    found = shares("zero3", precision="bf16-mixed")
    # Up to 10 x 64 elements stay whole: the biases.
    assert found.persistent_bytes(0) == 2 * BIASES
    assert found.gathered_bytes(0, EMBED) == 2 * VOCABULARY * HIDDEN
    # Of final norm and head.
    assert found.largest_gathered_bytes(0, TAIL) == 2 * VOCABULARY * HIDDEN
    assert found.bucket_bytes(0) == 2 * HIDDEN * HIDDEN


@pytest.mark.parametrize(
    "parallelism", [name for name, row in PARALLELISMS.items() if row.stage == 3]
)
def test_what_is_gathered_of_each_weight_adds_up_to_units_and_to_all(parallelism: str) -> None:
    found = shares(parallelism, precision="bf16-true", dtype="bfloat16")
    positions = range(len(found.parameters))
    gathered = [found.gathered_weight_bytes(0, each) for each in positions]
    assert sum(gathered) == found.gathered_bytes(0) > 0
    for unit, members in found.members.items():
        of_unit = [gathered[each] for each in members]
        assert sum(of_unit) == found.gathered_bytes(0, unit) == sum(found.gathers(0, unit))
        assert max(of_unit) == found.largest_gathered_bytes(0, unit)
    # What is not gathered is whole, and the GPUs' equal parts are the whole.
    whole = [found.whole_bytes(0, each) for each in positions]
    kept = [size for size, part in zip(whole, gathered, strict=True) if not part]
    assert sum(kept) == sum(whole) - sum(gathered) == found.persistent_bytes(0)
    parts = [found.part_bytes(0, each) for each in positions]
    assert whole == [found.num_gpus * part for part in parts]
    assert found.trained_parts_bytes(0) == sum(parts)


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_zero_parts_the_optimizers_groups(name: str) -> None:
    found = shares(name, precision="bf16-mixed")
    total = MATRICES
    assert found.partitions(0) == {0: total // 4, 1: BIASES // 4}
    assert [spec.shape for spec in found.optimizer_specs([], 0)] == [(total // 4,), (BIASES // 4,)]
    assert found.master_bytes(0, 0) == total
    assert found.partition_bytes(0, 1) == 2 * BIASES // 4
    assert found.partition_bytes(0, 1, 4) == 2 * BIASES
    assert found.step_gradient_bytes(0) == total


def test_offloaded_state_takes_host_memory() -> None:
    elements = (MATRICES + BIASES) // 4
    # Weights, gradients and two moments in float32; ZeRO 2 has a copy in 16 bits to fetch, too.
    offloaded = shares("fsdp2-offload")
    assert offloaded.host_bytes(0) == 16 * (2 * 251 * HIDDEN + 2 * 16 * HIDDEN + 3 * HIDDEN // 4)
    assert offloaded.optimizer_specs([], 0) == []
    assert shares("zero2-offload", precision="bf16-mixed").host_bytes(0) == 18 * elements
    assert (
        shares("zero2-offload", precision="bf16-mixed").largest_bytes(0) == 2 * VOCABULARY * HIDDEN
    )
    assert shares("zero2").host_bytes(0) == shares("fsdp2").host_bytes(0) == 0


@pytest.mark.parametrize(
    ("method", "checkpointing", "rebuilds"),
    [("full", 0, False), ("full", 1, True), ("full", 2, True), ("lora", 1, False)],
)
def test_ddp_rebuilds_its_buckets_where_it_looks_for_no_unused_parameters(
    method: str, checkpointing: int, rebuilds: bool
) -> None:
    found = shares("ddp", num_rows=5000, method=method, activation_checkpointing=checkpointing)
    embedding, rest = 4 * 5000 * HIDDEN, 4 * (MATRICES + BIASES - VOCABULARY * HIDDEN)
    # The embedding alone passes 1 MiB: as the first gradient it has a bucket of its own.
    expected = [embedding + rest, 0] if rebuilds else [rest, embedding]
    assert [found.ddp_bucket_bytes(0, index) for index in (0, 1, 2)] == [*expected, 0]
    firsts = [found.ddp_first_bucket_bytes(0, index) for index in (0, 1)]
    assert firsts == [embedding + rest, 0]


def test_deepspeed_reduces_in_buckets_and_large_gradients_by_themselves() -> None:
    # reduce_independent_p_g_buckets_and_remove_grads: what would overfill a bucket opens the next.
    assert zero_buckets([3, 4, 2, 11, 5, 5], cap_bytes=10) == [9, 11, 10]
    assert zero_buckets([], cap_bytes=10) == []


@given(
    sizes=st.lists(st.tuples(st.integers(1, 40), st.booleans(), st.integers(0, 1)), min_size=1),
    num_gpus=st.integers(1, 5),
    stage=st.sampled_from(["zero1", "zero2", "zero3"]),
)
@settings(max_examples=60, deadline=None)
def test_zeros_parts_are_those_of_each_element_dealt_out_by_itself(
    sizes: list[tuple[int, bool, int]], num_gpus: int, stage: str
) -> None:
    weights = [
        Weight(shape=(size,), dtype="float32", trainable=trainable, group=group)
        for size, trainable, group in sizes
    ]
    trained = [n for n, weight in enumerate(weights) if weight.trainable]
    groups = sorted({weights[n].group for n in trained})
    part_of = {
        group: zero_partition_elements(
            sum(weights[n].num_elements for n in trained if weights[n].group == group), num_gpus
        )
        for group in groups
    }
    held: list[Counter[int]] = [Counter() for _ in range(num_gpus)]
    for group in groups:
        elements = [
            n for n in trained if weights[n].group == group for _ in range(weights[n].num_elements)
        ]
        for place, number in enumerate(elements):
            held[place // part_of[group]][number] += 1
    shares: Any = SimpleNamespace(
        num_gpus=num_gpus,
        row=PARALLELISMS[stage],
        groups=groups,
        partitions=lambda rank: part_of,
        weights=lambda rank: weights,
        trained=lambda rank: [weights[n] for n in trained],
        working_bytes=lambda weight: 2 * weight.num_elements,
    )
    parts = ZeroParts(shares)
    kept = [sum(2 * weights[n].num_elements for n in each) for each in held]
    assert [parts.held_bytes(1, gpu) for gpu in range(num_gpus)] == kept
    assert parts.fullest_gpu(1) == kept.index(max(kept))
    of_one = {n: -(-weights[n].num_elements // num_gpus) for n in trained}
    for gpu, own in enumerate(held):
        assert [parts.is_held(1, gpu, n) for n in range(len(weights))] == [
            n in own for n in range(len(weights))
        ]
        largest = max(of_one.values() if stage == "zero3" else own.values(), default=0)
        assert parts.norm_bytes(1, gpu) == 8 * largest
    for n in trained:
        most = of_one[n] if stage == "zero3" else max(each[n] for each in held)
        assert parts.sent_elements(1, n) == most
        assert parts.gradient_bytes(1, n) == 2 * weights[n].num_elements
        assert parts.part_bytes(1, n) == 2 * of_one[n]
        # A bucket is copied where several GPUs get a slice of it, or where ZeRO 3 pads it.
        owners = sum(n in each for each in held)
        copied = 2 * weights[n].num_elements if owners > 1 else 0
        if stage == "zero3":
            padded = num_gpus * of_one[n]
            copied = 0 if padded == weights[n].num_elements else 2 * padded
        assert parts.reduced_bytes(1, [n]) == copied
    if stage == "zero3" and len(trained) > 1:
        assert parts.reduced_bytes(1, trained) == sum(2 * num_gpus * of_one[n] for n in trained)
    assert parts.normed_bytes(100) == 800
    assert parts.normed_bytes(10**9) == 8 * (250_000_000 if stage == "zero3" else 10**9)


def test_each_pass_of_an_embedder_goes_through_the_same_weights() -> None:
    """A gradient that a further pass makes is of the first one's layer, as those of BERT's norms."""
    held = shares("zero2")
    matrix, bias = held.members["layer", (0, 1)]
    sizes = [held.weights(USUAL_RANK)[position].num_elements for position in (bias, matrix)]
    blocks = [(Phase.BACKWARD, (1, 1), [0]), (Phase.BACKWARD, (0, 1), [1])]
    assert positions_of(blocks, held, {0, 1}, sizes.__getitem__) == {0: bias, 1: matrix}


def test_sizes_that_are_alike_are_worked_out_once_for_each_rank() -> None:
    """Of three weights the first and the last are alike, and so are two units of two of them."""
    asked: list[tuple[str, int]] = []

    def of_weight(rank: int, position: int) -> int:
        asked.append(("weight", rank))
        return rank * (10, 20, 10)[position]

    def of_unit(rank: int, unit: str) -> int:
        asked.append(("unit", rank))
        return rank * {"first": 30, "second": 30, "last": 10}[unit]

    units = {"first": (0, 1), "second": (0, 1), "last": (0,)}
    shares: Any = SimpleNamespace(like=[0, 1, 0], like_unit=units.__getitem__)
    sizes = [
        *(functools.partial(of_weight, position=position) for position in (0, 1, 2, 0)),
        *(functools.partial(of_unit, unit=unit) for unit in units),
        lambda rank: 7 * rank,
    ]
    by_rank = SizesByRank(shares, sizes)
    assert len(by_rank) == len(sizes)
    assert by_rank.at(3).tolist() == [30, 60, 30, 30, 90, 90, 30, 21]
    assert asked == [("weight", 3), ("weight", 3), ("unit", 3), ("unit", 3)]
    by_rank.add(functools.partial(of_weight, position=1))
    assert by_rank.at(2).tolist() == [20, 40, 20, 20, 60, 60, 20, 14, 40]
