"""A step written by hand, shared by four GPUs: what each holds, leaves and sends, worked out by hand.

The weights have 2 bytes each: an embedding and a head of 2,560 elements, four layers of 512, a norm of 256.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from test_dealt_layers import (
    EMBEDDING,
    LOSS,
    NORM,
    ROTARY_TABLE,
    SPEC,
    WEIGHT,
    WORKSPACE,
    alive,
    step,
)

from autotune.catalogue.gpus import find_gpu
from autotune.predict.estimator import Estimator
from autotune.predict.sharding.rank_trace import RankTrace
from autotune.predict.sharding.zero_step import ZeroMicroStep
from autotune.predict.tracing import shared_trace
from autotune.records.estimate import TraceSpec, and_several
from autotune.space.config import TrainConfig
from autotune.space.lengths import Filling
from autotune.space.parallelisms import PARALLELISMS
from autotune.speed.links import Message

P = 2 * EMBEDDING + 4 * WEIGHT + NORM
"""Bytes of all weights in 16 bits, 7,424 elements."""
MASTERS = 7680
"""Bytes of a quarter in float32, in whole blocks."""
BUCKET = 2 * 16 * 16
"""DeepSpeed's bucket has as many elements as the square of the hidden size, 16 here."""
QUARTER = 2 * 1536 + 4 * 512 + 512
"""Blocks of a quarter of each weight's rows: 1,280 bytes of the embedding take 1,536."""
HALF = 2 * 2560 + 4 * 512 + 512


@functools.cache
def shared(name: str, checkpointing: int = 0, *, norms_apart: bool = False) -> RankTrace:
    precision = "bf16-mixed" if name.startswith("zero") else "bf16-true"
    spec = dataclasses.replace(SPEC, parallelism=name, precision=precision)
    spec = dataclasses.replace(spec, activation_checkpointing=checkpointing)
    trace = step(4, norms_apart=norms_apart)
    found = shared_trace(trace, spec, num_gpus=4, hidden_size=16)
    assert isinstance(found, RankTrace)
    return found


@pytest.mark.parametrize("checkpointing", [0, 1])
@pytest.mark.parametrize(
    ("name", "held", "gradients", "left"),
    [
        ("ddp", P, {P}, 0),
        # A unit's gradients are of one piece: those of norm and head share blocks.
        ("fsdp2", QUARTER, {QUARTER - 512}, 0),
        ("cp", QUARTER, {QUARTER - 512}, 0),
        ("hsdp", HALF, {HALF}, 0),
        ("fsdp2-offload", 0, {0}, 0),
        ("zero1", P + MASTERS, {P}, BUCKET),
        # A GPU keeps all of each weight of which it has a part: the embedding alone, or the rest of it and
        # three layers.
        ("zero2", P + MASTERS, {EMBEDDING, EMBEDDING + 3 * WEIGHT}, 0),
        # A quarter of the weights and of their gradients in 16 bits, 3,712 bytes each, and the bucket.
        ("zero3", 2 * 4096 + MASTERS + BUCKET, {0}, 0),
        # The largest weight as it comes back from the host.
        ("zero1-offload", P + EMBEDDING, {P}, BUCKET),
        ("zero2-offload", P + EMBEDDING, {0}, 0),
        ("zero3-offload", BUCKET, {0}, 0),
    ],
)
def test_what_a_gpu_holds_and_what_a_micro_step_leaves(
    name: str, held: int, gradients: set[int], left: int, checkpointing: int
) -> None:
    whole = shared(name, checkpointing)
    found = set[int]()
    for part in (whole, *whole.stages):
        buckets = P if name == "ddp" else 0
        assert alive(part, "setup")[-1] == held + ROTARY_TABLE + buckets
        own = part.bytes_of(part.gradients, 1, 0)
        found.add(own)
        assert part.bytes_of(part.left, 1, 0) == left
        assert alive(part, "again")[-1] == own + LOSS + left
        assert alive(part, "first")[-1] == own + LOSS + left + WORKSPACE
        assert alive(part, "next")[-1] == LOSS
        assert len(part.categories) == len(part.sizes(1, 0)) == len(part.operations)
        # What sharing adds is told apart from what the model makes, and keeps every layer.
        num_added = len(part.operations) - len(step(4).operations)
        assert part.operations[-num_added:] == [name] * num_added
        assert name not in part.operations[:-num_added]
        assert part.layers == step(4).layers
        assert {*part.layers.values()} == {0, 1, 2, 3}
        whole_weights = sum(each.size_bytes for each in part.trainable_by_all(0))
        assert whole_weights == P
    assert found == gradients


@pytest.mark.parametrize(
    "name", [name for name, row in PARALLELISMS.items() if row.stage or name == "ddp"]
)
def test_what_a_weight_passes_through_as_it_is_loaded_changes_nothing_behind_it(name: str) -> None:
    def found(*, packs: bool) -> RankTrace:
        precision = "bf16-mixed" if name.startswith("zero") else "bf16-true"
        spec = dataclasses.replace(SPEC, parallelism=name, precision=precision)
        made = shared_trace(step(4, packs=packs), spec, num_gpus=4, hidden_size=16)
        assert isinstance(made, RankTrace)
        return made

    plain, packed = found(packs=False), found(packs=True)
    assert alive(packed, "setup")[-1] == alive(plain, "setup")[-1]
    assert max(alive(packed, "setup")) >= max(alive(plain, "setup"))
    for events in ("first", "again", "next"):
        assert alive(packed, events) == alive(plain, events)
    assert packed.exchange(1, 0) == plain.exchange(1, 0)
    assert packed.trainable(0) == plain.trainable(0)


@pytest.mark.parametrize(
    ("name", "held"),
    [
        ("zero1", P + MASTERS),
        ("zero2", P + MASTERS),
        ("zero1-offload", P + EMBEDDING),
        ("zero2-offload", P + EMBEDDING),
        # A part of each weight has blocks of its own; the gradients' quarter is of one piece.
        ("zero3", QUARTER + 4096 + MASTERS + BUCKET),
        ("zero3-offload", BUCKET),
    ],
)
def test_beside_4_bit_weights_that_are_there_already_nothing_passes_through(
    name: str, held: int
) -> None:
    spec = dataclasses.replace(SPEC, parallelism=name, precision="bf16-mixed", quantization="nf4")
    found = shared_trace(step(4), spec, num_gpus=4, hidden_size=16)
    for part in (found, *found.stages):
        setup = alive(part, "setup")
        assert setup[-1] == max(setup) == held + ROTARY_TABLE


@pytest.mark.parametrize(
    ("name", "has_nccl"),
    [("none", False), ("ddp", True), ("fsdp2", True), ("device-map", False)],
)
def test_nccl_takes_memory_where_every_gpu_has_a_process(name: str, has_nccl: bool) -> None:
    gpu = find_gpu("a100")
    config = TrainConfig(
        method="full",
        micro_batch_size=1,
        gradient_accumulation_steps=2,
        sequence_length=8,
        precision="bf16-true",
        optimizer="adamw_torch",
        parallelism=name,
        num_gpus=1 if name == "none" else 2,
    )
    spec, trace = TraceSpec.of(config), step(4)
    found = trace if name == "none" else shared_trace(trace, spec, num_gpus=2, hidden_size=16)
    estimate = Estimator({spec: found}, gpu, memory_budget_bytes=10**10).estimate(config)
    assert gpu.nccl_bytes > 0
    assert estimate.nontorch_bytes == gpu.context_bytes + has_nccl * gpu.nccl_bytes


def test_fewer_gpus_are_priced_as_if_they_were_asked_for() -> None:
    config = TrainConfig(
        method="full",
        micro_batch_size=1,
        gradient_accumulation_steps=1,
        sequence_length=8,
        precision="bf16-true",
        optimizer="adamw_torch",
        parallelism="ddp",
        num_gpus=4,
    )

    def filling(config: TrainConfig) -> Filling:
        return Filling(full_share=0.5, num_micro_batches=config.gradient_accumulation_steps)

    def estimator(config: TrainConfig, memory_budget_bytes: int = 10**9) -> Estimator:
        spec = TraceSpec.of(config)
        one = step(4)
        whole = config.num_gpus == 1
        traces = {
            each: one if whole else shared_trace(one, each, num_gpus=config.num_gpus)
            for each in and_several(spec)
        }
        card = find_gpu("rtx-4090")
        return Estimator(traces, card, memory_budget_bytes=memory_budget_bytes, filling=filling)

    for count, parallelism in ((1, "none"), (2, "ddp")):
        fewer = dataclasses.replace(
            config,
            num_gpus=count,
            parallelism=parallelism,
            gradient_accumulation_steps=4 // count,
        )
        expected = estimator(fewer).estimate(fewer)
        assert estimator(config).on_fewer_gpus(config, count) == expected
        assert estimator(config, 10**8).on_fewer_gpus(config, count) is None


@pytest.mark.parametrize("events", ["again", "next"])
def test_fsdp2_gathers_each_unit_there_and_back_but_norm_and_head_once(events: str) -> None:
    whole = shared("fsdp2")
    num_own, sizes = len(step(4).template), whole.sizes(1, 0)
    gathered = [
        n for n, kind in enumerate(whole.categories) if n >= num_own and kind == "parameter"
    ]
    order = [event for event in getattr(whole, events) if max(event, ~event) in gathered]
    made = [sizes[event] for event in order if event >= 0]
    layers = 4 * [WEIGHT]
    assert made == [EMBEDDING, *layers, NORM, EMBEDDING, *layers, EMBEDDING]
    assert {event for event in order if event >= 0} == {~event for event in order if event < 0}
    # Going there each has gone when the next one comes.
    forward = order[: order.index(next(n for n in order if n >= 0 and sizes[n] == NORM))]
    assert [event >= 0 for event in forward] == (6 * [True, False])[: len(forward)]


@functools.cache
def compared(name: str) -> RankTrace:
    """A step of DPO with an adapter, whose own model is the reference."""
    precision = "bf16-mixed" if name.startswith("zero") else "bf16-true"
    spec = dataclasses.replace(SPEC, parallelism=name, precision=precision, trainer="trl-dpo")
    found = shared_trace(step(4, compared=True), spec, num_gpus=4, hidden_size=16)
    assert isinstance(found, RankTrace)
    return found


def gathered_in(whole: RankTrace, events: list[int]) -> list[tuple[int, bool, int]]:
    """Return what is gathered: its bytes, whether the stream that computes has it, and how long it stays.

    That is how many others are gathered before it goes.
    """
    num_own, sizes = len(step(4, compared=True).template), whole.sizes(1, 0)
    aside = {number for stream in whole.aside for number in stream}
    order = [
        event
        for event in events
        if (number := max(event, ~event)) >= num_own and whole.categories[number] == "parameter"
    ]
    made = [event for event in order if event >= 0]
    gone = {each: sum(e >= 0 for e in order[: order.index(~each)]) for each in made}
    return [(sizes[e], e not in aside, gone[e] - n - 1) for n, e in enumerate(made)]


def test_under_fsdp2_the_loss_gathers_a_head_that_is_a_unit_by_itself() -> None:
    """Each pass has its own, and the embedding; that of the trained pass stays until it has gone backward."""
    layers = 4 * [(WEIGHT, True, 0)]
    whole = compared("fsdp2")
    assert gathered_in(whole, whole.again) == [
        (NORM, True, 17),
        (EMBEDDING, True, 0),
        *layers,
        (EMBEDDING, True, 6),
        # The reference.
        (EMBEDDING, True, 0),
        *layers,
        (EMBEDDING, True, 0),
        # Going backward.
        *layers,
        (EMBEDDING, True, 0),
    ]
    # It comes by the stream that computes, without the buffer in which a unit arrives.
    arrived = [whole.sizes(1, 0)[n] for n in whole.again if n in whole.aside[0]]
    assert arrived.count(EMBEDDING) == 3


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize(
    ("trainer", "in_base_dtype", "held", "most"),
    [
        ("transformers", True, QUARTER, P + QUARTER),
        # PEFT casts to float32, whose quarter takes as much as half in 16 bits.
        ("transformers", False, HALF, 2 * P + HALF),
        # TRL casts back one weight after the other, the first while all others are in float32.
        ("trl-sft", False, QUARTER, 2 * P + EMBEDDING),
    ],
)
def test_under_fsdp2_weights_beside_4_bit_ones_are_whole_until_all_are_cut(
    trainer: str, in_base_dtype: bool, held: int, most: int, packs: bool
) -> None:
    """What a weight passes through as it is loaded is gone before the most is there."""
    spec = dataclasses.replace(
        SPEC,
        parallelism="fsdp2",
        precision="bf16-autocast",
        method="qlora",
        quantization="nf4",
        trainer=trainer,
        adapter_in_base_dtype=in_base_dtype,
    )
    found = shared_trace(step(4, packs=packs), spec, num_gpus=4, hidden_size=16)
    assert isinstance(found, RankTrace)
    setup = alive(found, "setup")
    assert setup[-1] == held + ROTARY_TABLE
    assert max(setup) == most + ROTARY_TABLE


def test_zero3_gathers_a_head_as_it_is_read_and_then_for_whole_passes() -> None:
    """With the reference's pass behind the other one it drops nothing before the backward pass has ended."""
    whole = compared("zero3")
    embedding, there = (EMBEDDING, False, 0), 4 * [(WEIGHT, False, 0)]
    back = [(WEIGHT, False, n) for n in (4, 3, 2, 1)]
    own, of_reference = [embedding, *there], [(EMBEDDING, False, 5), embedding, *there]
    backward = [(EMBEDDING, False, 5), *back, embedding]
    assert gathered_in(whole, whole.again) == [*of_reference, *of_reference, *backward]
    read = (EMBEDDING, True, 0)
    assert gathered_in(whole, whole.first) == [*own, read, *of_reference, *backward]


@pytest.mark.parametrize("checkpointing", [0, 1])
def test_from_the_host_comes_each_shard_before_its_unit_is_gathered(checkpointing: int) -> None:
    """A quarter of each weight; norm and head are one unit. All have gone by the end."""
    order = [EMBEDDING, *4 * [WEIGHT], NORM + EMBEDDING, *4 * [WEIGHT], EMBEDDING]
    shards = {unit: [unit // 4] for unit in (EMBEDDING, WEIGHT)}
    shards[NORM + EMBEDDING] = [NORM // 4, EMBEDDING // 4]
    for name, before in (("fsdp2", {}), ("fsdp2-offload", shards)):
        whole = shared(name, checkpointing)
        sizes, here = whole.sizes(1, 0), set[int]()
        for events in (whole.again, whole.next):
            sent = [event for event in events if max(event, ~event) in whole.aside[0]]
            made = [sizes[event] for event in sent if event >= 0 and sizes[event]]
            assert made == [size for unit in order for size in (*before.get(unit, ()), unit)]
            for event in sent:
                here ^= {max(event, ~event)}
                if event >= 0 and sizes[event] in order:
                    # The shards of this one are there, and of no other.
                    waiting = sorted(sizes[n] for n in here if 0 < sizes[n] not in order)
                    assert waiting == sorted(before.get(sizes[event], []))
            assert not here


def test_fsdp2_has_a_unit_arrive_beside_what_is_computed() -> None:
    """There a buffer stays until the next unit has come; back the next one comes before it is used."""
    whole, num_own = shared("fsdp2"), len(step(4).template)
    sizes, here = whole.sizes(1, 0), set[int]()
    beside: dict[str, list[int]] = {"activation": [], "gradient": []}
    for event in whole.again:
        here ^= {max(event, ~event)}
        if 0 <= event < num_own and whole.categories[event] in beside:
            arriving = (n for n in here & {*whole.aside[0]} if whole.categories[n] == "temporary")
            beside[whole.categories[event]].append(sum(sizes[n] for n in arriving))
    # Two activations of the embedding, two of each layer, the loss.
    assert beside["activation"] == [EMBEDDING] * 2 + [WEIGHT] * 8 + [NORM + EMBEDDING]
    # Norm and head, four layers, the embedding.
    assert beside["gradient"] == [WEIGHT] * 2 + [WEIGHT] * 3 + [EMBEDDING, 0]


@pytest.mark.parametrize("name", ["zero1", "zero2"])
@pytest.mark.parametrize(
    ("norms_apart", "beside"),
    # Beside the first of two groups' float32 there is the last group, whole.
    [(False, [(7424, 3712)]), (True, [(7168, NORM), (256, 128)])],
)
def test_zero_copies_its_part_of_the_last_group_in_16_bits_first(
    name: str, norms_apart: bool, beside: list[tuple[int, int]]
) -> None:
    whole = shared(name, norms_apart=norms_apart)
    sizes, here, found = whole.sizes(1, 0), set[int](), []
    for event in whole.setup:
        here ^= {max(event, ~event)}
        if event >= 0 and whole.categories[event] == "optimizer_state":
            passing = (n for n in here if whole.categories[n] == "temporary")
            found.append((sizes[event], sum(sizes[n] for n in passing)))
    assert found == beside


def test_zero3_casts_its_part_to_float32_before_that_is_the_optimizers() -> None:
    whole = shared("zero3")
    sizes, here, beside = whole.sizes(1, 0), set[int](), []
    for event in whole.setup:
        here ^= {max(event, ~event)}
        if event >= 0 and whole.categories[event] == "optimizer_state":
            passing = [sizes[n] for n in here if whole.categories[n] == "temporary"]
            beside.append((sizes[event], passing))
    # A quarter of 7,424 elements, of 4 bytes.
    assert beside == [(7424, [7424])]


def test_zero3_keeps_the_last_that_a_frozen_head_has_read() -> None:
    read_by_head = ZeroMicroStep._read_by_head
    for name, read in (("zero3", [6]), ("zero2", [])):
        step: Any = SimpleNamespace(_shares=SimpleNamespace(row=PARALLELISMS[name]))
        # 7 are the logits; 4 goes before them.
        assert read_by_head(step, [4, 5, 6, ~4, 7], [~7, ~5, ~6]) == read


@pytest.mark.parametrize(
    ("name", "layer", "every", "is_backward", "is_whole"),
    [
        ("zero3", 2, 2, True, True),
        ("zero3", 2, 1, True, True),
        ("zero3", 0, 2, True, True),
        # Neither there, nor of a layer that is not computed again, nor outside the layers.
        ("zero3", 2, 2, False, False),
        ("zero3", 1, 2, True, False),
        ("zero3", 2, 0, True, False),
        ("zero3", -1, 1, True, False),
        ("zero2", 2, 1, True, None),
    ],
)
def test_zero3_gathers_all_of_a_layer_to_compute_it_again_and_else_its_largest(
    name: str, layer: int, every: int, is_backward: bool, is_whole: bool | None
) -> None:
    unit: Any = ("layer", (0, layer))
    shares = SimpleNamespace(
        row=PARALLELISMS[name],
        checkpoint_every=every,
        members={unit: [0, 1]},
        largest_gathered_bytes=lambda rank, unit: 300,
        gathered_bytes=lambda rank, unit: 400,
    )
    step: Any = SimpleNamespace(_shares=shares, _gather_of=lambda *sizes: [s(1) for s in sizes])
    found = ZeroMicroStep._gather(step, unit, is_backward=is_backward)
    assert found == (None if is_whole is None else [400 if is_whole else 300, 300])  # type: ignore[comparison-overlap]
    assert ZeroMicroStep._gather(step, ("other", unit[1]), is_backward=is_backward) is None


@pytest.mark.parametrize(
    ("name", "num_gpus", "sent"),
    [("zero3", 4, []), ("zero3-offload", 4, [75]), ("zero3-offload", 1, [])],
)
def test_zero3_sends_its_part_of_the_largest_from_the_host(
    name: str, num_gpus: int, sent: list[int]
) -> None:
    passed, made = list[int](), list[int]()
    step: Any = SimpleNamespace(
        _shares=SimpleNamespace(row=PARALLELISMS[name], num_gpus=num_gpus),
        _is_of_copy=False,
        _new=lambda category, size, **_: made.append(size(1)) or 7,
        _pass=lambda size, stream: passed.append(size(1)),
    )
    assert ZeroMicroStep._gather_of(step, lambda _: 400, lambda _: 303) == 7
    assert (made, passed) == ([400], sent)
    assert all(isinstance(each, int) for each in passed)


@pytest.mark.parametrize(
    ("name", "num_streams"),
    [("ddp", 0), ("fsdp2", 2), ("zero1", 0), ("zero2", 0), ("zero3", 2), ("zero2-offload", 0)],
)
def test_what_gathers_and_reduces_layer_by_layer_has_streams_of_its_own(
    name: str, num_streams: int
) -> None:
    """DeepSpeed's earlier stages reduce on the stream that computes."""
    whole = shared(name)
    own = {event for event in whole.again if event >= 0}
    streams = [own.intersection(tensors) for tensors in whole.aside]
    assert len(whole.aside) == num_streams
    assert all(streams)
    assert len(set().union(*streams)) == sum(map(len, streams))


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_a_quarter_of_the_gradients_is_in_float32_as_deepspeed_updates(name: str) -> None:
    """It comes of one piece in 16 bits; one group of weights has all of them given up before."""
    for part in (shared(name), *shared(name).stages):
        before, after = part.around_update()
        sizes = part.sizes(1, 0)
        made = [sizes[event] for event in before if event >= 0]
        assert made[-2:] == [7424 // 4 * 2, 7424 // 4 * 4]
        here = {event for event in part.again if event >= 0}
        here -= {~event for event in part.again if event < 0}
        for event in before:
            assert (max(event, ~event) in here) == (event < 0)
            here ^= {max(event, ~event)}
        assert sorted(sizes[number] for number in here) == [LOSS, 7424]
        assert [sizes[~event] for event in after] == [7424]
    assert shared(f"{name}-offload").around_update()[1] == []


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_gradients_of_16_bits_stay_as_deepspeed_updates_one_group_after_the_other(
    name: str,
) -> None:
    """The largest group's are in float32 meanwhile. ZeRO 1 has given up the whole ones before."""
    whole = shared(name, norms_apart=True)
    assert [spec.num_elements for spec in whole.trainable(0)] == [(7424 - 256) // 4, 256 // 4]
    for part in (whole, *whole.stages):
        before, after = part.around_update()
        sizes = part.sizes(1, 0)
        made = [sizes[event] for event in before if event >= 0]
        assert made[-2:] == [(7424 - 256) // 4 * 2, (7424 - 256) // 4 * 4]
        float32 = max(event for event in before if event >= 0)
        assert sizes[float32] == 7424 - 256
        assert after[0] == ~float32
        assert [*part.step_buffers] == ([] if name == "zero1" else [float32])
        here = {event for event in part.again if event >= 0}
        here -= {~event for event in part.again if event < 0}
        for event in (*before, *after):
            assert (max(event, ~event) in here) == (event < 0)
            here ^= {max(event, ~event)}
        assert [sizes[number] for number in here] == [LOSS]
        if name == "zero2":
            assert {~event for event in after[1:]} >= {*part.gradients}


@pytest.mark.parametrize(
    ("name", "elements", "dtype"),
    [
        ("ddp", [2560, 512, 512, 512, 512, 256, 2560], "bfloat16"),
        ("fsdp2", [640, 128, 128, 128, 128, 64, 640], "bfloat16"),
        ("hsdp", [1280, 256, 256, 256, 256, 128, 1280], "bfloat16"),
        ("fsdp2-offload", [], ""),
        ("zero1", [7424 // 4], "float32"),
        ("zero3", [7424 // 4], "float32"),
        ("zero2-offload", [], ""),
    ],
)
def test_what_a_gpus_optimizer_updates(name: str, elements: list[int], dtype: str) -> None:
    specs = shared(name).trainable(0)
    assert [spec.num_elements for spec in specs] == elements
    assert {spec.dtype for spec in specs} == ({dtype} if dtype else set())


GATHERED = {"all_gather": (11, 2 * P - NORM - EMBEDDING)}
"""FSDP2's six units, twice, but for norm and head: once."""


@pytest.mark.parametrize(
    ("name", "per_micro_step", "per_step", "host_bytes"),
    [
        ("ddp", {}, {"all_reduce": (1, P)}, 0),
        ("fsdp2", GATHERED | {"reduce_scatter": (6, P)}, {}, 0),
        # The halves are added up among the groups.
        ("hsdp", GATHERED | {"reduce_scatter": (6, P), "all_reduce": (6, P // 2)}, {}, 0),
        # Weights, gradients and both moments, of 16 bits.
        ("fsdp2-offload", GATHERED | {"reduce_scatter": (6, P)}, {}, 8 * 7424 // 4),
        # Each weight but the norm is larger than a bucket, and is reduced by itself.
        ("zero1", {}, {"all_reduce": (7, P), "all_gather": (1, P)}, 0),
        ("zero2", {"all_reduce": (7, P)}, {"all_gather": (1, P)}, 0),
        ("zero3", {"all_gather": (14, 2 * P), "reduce_scatter": (7, P)}, {}, 0),
        (
            "zero3-offload",
            {"all_gather": (14, 2 * P), "reduce_scatter": (7, P)},
            {},
            16 * 7424 // 4 + P // 4,
        ),
        ("zero1-offload", {}, {"all_reduce": (7, P), "all_gather": (1, P)}, 18 * 7424 // 4),
        # Those in float32 and a copy in 16 bits.
        ("zero2-offload", {"all_reduce": (7, P)}, {"all_gather": (1, P)}, 18 * 7424 // 4),
    ],
)
def test_what_gpus_send_and_keep_on_the_host(
    name: str,
    per_micro_step: dict[str, tuple[int, int]],
    per_step: dict[str, tuple[int, int]],
    host_bytes: int,
) -> None:
    exchange = shared(name).exchange(1, 0)
    assert summed(exchange.messages_per_micro_step) == per_micro_step
    assert summed(exchange.messages_per_step) == per_step
    assert exchange.host_bytes == host_bytes
    # In a ring of four each GPU sends three quarters, and for a sum twice.
    shares = {"all_reduce": 1.5, "all_gather": 0.75, "reduce_scatter": 0.75}
    if name != "hsdp":
        micro, once = (
            sum(shares[operation] * num_bytes for operation, (_, num_bytes) in sent.items())
            for sent in (per_micro_step, per_step)
        )
        for accumulation in (1, 3):
            assert exchange.sent_bytes(accumulation) == pytest.approx(accumulation * micro + once)


@pytest.mark.parametrize(
    ("name", "gathered", "buffers", "copied", "copied_per_step"),
    [
        ("ddp", 0, P, 0, 0),
        # Norm and head, and the buffers in which they and the layer before them arrive.
        ("fsdp2", 2 * (NORM + EMBEDDING) + WEIGHT, 0, 0, 0),
        ("hsdp", 2 * (NORM + EMBEDDING) + WEIGHT, 0, 0, 0),
        # A quarter of the weights comes twice, but norm and head once; of the gradients it goes once.
        ("fsdp2-offload", 2 * (NORM + EMBEDDING) + WEIGHT, 0, (3 * P - NORM - EMBEDDING) // 4, 0),
        ("zero1", 0, BUCKET, 0, 0),
        ("zero2", 0, BUCKET, 0, 0),
        ("zero3", EMBEDDING, BUCKET, 0, 0),
        # Gradients go as each is reduced, and updated weights come back by way of the largest one's buffer.
        ("zero1-offload", 0, BUCKET + EMBEDDING, P // 4, P // 4),
        ("zero2-offload", 0, BUCKET + EMBEDDING, P // 4, P // 4),
        ("zero3-offload", EMBEDDING, BUCKET, 3 * P // 4, 0),
    ],
)
def test_what_is_gathered_at_a_time_and_what_goes_to_the_host_and_comes_back(
    name: str, gathered: int, buffers: int, copied: int, copied_per_step: int
) -> None:
    exchange = shared(name).exchange(1, 0)
    assert (exchange.gathered_bytes, exchange.buffers_bytes) == (gathered, buffers)
    assert exchange.host_copy_bytes_per_micro_step == copied
    assert exchange.host_copy_bytes_per_step == copied_per_step
    # The host's CPU updates the weights of all GPUs.
    assert exchange.host_update_elements == (7424 if name.endswith("offload") else 0)
    assert exchange.num_gpus == 4


def summed(messages: Iterable[Message]) -> dict[str, tuple[int, int]]:
    counts, sizes = Counter[str](), Counter[str]()
    for each in messages:
        counts[each.operation] += each.count
        sizes[each.operation] += each.count * each.num_bytes
    return {name: (counts[name], sizes[name]) for name in counts}
