"""Layers dealt out over GPUs, from a step written by hand: what each holds, makes, frees and sends."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from typing import Any

import pytest
from written_trace import Answer

from autotune.memory.traces import Trace
from autotune.predict.sharding import pipeline
from autotune.predict.sharding.dealt_layers import DealtTrace
from autotune.predict.sharding.layer_counts import can_deal, layers_per_gpu
from autotune.predict.sharding.pipeline import PipelineTrace, even_counts
from autotune.predict.sharding.shared_trace import SharedTrace
from autotune.records.estimate import TraceSpec

HIDDEN, ROTARY, POSITIONS, KEPT, LOGITS = 2048, 3072, 512, 4096, 10_240
"""Bytes for a sample, whole blocks each: positions go with the forward pass, rotary embeddings stay."""
WEIGHT, EMBEDDING, NORM, LOSS, WORKSPACE = 1024, 5120, 512, 512, 6144
ROTARY_TABLE = 1536
SPEC = TraceSpec(
    method="full",
    lora_targets=None,
    quantization="none",
    precision="bf16-true",
    activation_checkpointing=0,
    activation_offloading=False,
    attention="sdpa",
    single=True,
)


def step(
    num_layers: int,
    *,
    tied: bool = False,
    trainable: bool = True,
    norms_apart: bool = False,
    packs: bool = False,
    compared: bool = False,
) -> Trace:
    """`norms_apart`: whether the norm is in a parameter group of its own, as the Trainer has it.

    `packs`: whether each layer's weight passes through memory before it is packed. `compared`: whether the
    model goes through the batch again as its own reference, and its norm is left to FSDP2's root, as in PEFT.
    """
    a = Answer(full=num_layers, traced=num_layers)

    def weight(name: str, size: int, *shape: int) -> None:
        group = int(norms_apart and len(shape) == 1)
        facts: dict[str, Any] = {"dtype": "bfloat16", "trainable": trainable, "group": group}
        facts |= {"embedding": name == "embedding", "linear": len(shape) > 1}
        facts["is_tied"] = tied and name == "embedding"
        facts["of_root"] = compared and name == "norm"
        sides = [[side, 0, 0] for side in shape]
        a.alloc(name, [size, 0, 0], category="parameter", shape=sides, **facts)

    def gradient(name: str, size: int) -> None:
        a.alloc(f"g {name}", [size, 0, 0], category="gradient", of=a.number[name])
        a.blocks[-1]["accumulate"].append([len(a.blocks[-1]["events"]), a.number[f"g {name}"]])

    a.block("weights")
    weight("embedding", EMBEDDING, 320, 8)
    for n in range(num_layers):
        a.block("weights", n)
        if packs:
            a.alloc(f"loaded{n}", [2048, 0, 0])
        weight(f"w{n}", WEIGHT, 16, 32)
        if packs:
            a.free(f"loaded{n}")
    a.block("weights")
    weight("norm", NORM, 256)
    if not tied:
        weight("head", EMBEDDING, 320, 8)
    a.block("buffers").alloc("table", [ROTARY_TABLE, 0, 0])
    a.block("batch").alloc("ids", [512, 1, 0]).alloc("labels", [512, 1, 0])
    a.block("embed").alloc("rotary", [ROTARY, 1, 0]).alloc("positions", [POSITIONS, 1, 0])
    a.alloc("out-1", [HIDDEN, 1, 0])
    for n in range(num_layers):
        a.block("forward", n)
        if n == 0:
            a.alloc("workspace", [WORKSPACE, 0, 0], category="workspace")
        a.alloc(f"kept{n}", [KEPT, 1, 0]).alloc(f"passing{n}", [7 * 512, 1, 0])
        a.alloc(f"out{n}", [HIDDEN, 1, 0]).free(f"passing{n}")
    a.block("head").free("positions").alloc("logits", [LOGITS, 1, 0], category="logits")
    a.alloc("loss", [LOSS, 0, 0])
    if compared:
        a.block("reference").alloc("r-1", [HIDDEN, 1, 0])
        for n in range(num_layers):
            a.block("reference", n).alloc(f"r{n}", [HIDDEN, 1, 0]).free(f"r{n - 1}")
        a.block("reference").free(f"r{num_layers - 1}")
    a.block("head_backward").free("logits").alloc(f"d{num_layers}", [HIDDEN, 1, 0])
    for name, size in (("norm", NORM), *((("head", EMBEDDING),) if not tied else ())):
        if trainable:
            gradient(name, size)
    for n in reversed(range(num_layers)):
        a.block("backward", n)
        if trainable:
            gradient(f"w{n}", WEIGHT)
        a.alloc(f"d{n}", [HIDDEN, 1, 0]).free(f"d{n + 1}", f"kept{n}", f"out{n - 1}")
    a.block("embed_backward")
    if trainable:
        gradient("embedding", EMBEDDING)
    a.free("d0", "rotary")
    a.block("end").free(f"out{num_layers - 1}")
    return a.trace(loss=a.number["loss"])


def alive(part: SharedTrace, name: str, micro_batch: int = 1) -> list[int]:
    """Bytes after each event, in blocks; each tensor comes once and goes once, after it has come."""
    sizes = [-(-size // 512) * 512 for size in part.sizes(micro_batch, 0)]
    total, found = 0, list[int]()
    here = set[int]()
    for event in getattr(part, name):
        number = max(event, ~event)
        assert (number in here) == (event < 0), (name, number)
        here ^= {number}
        total += sizes[number] if event >= 0 else -sizes[number]
        found.append(total)
    assert found == part.running_bytes(name, micro_batch, 0).tolist()
    assert found[-1] == part.left_bytes(name, micro_batch, 0)
    return found


def check(whole: DealtTrace | PipelineTrace, trace: Trace, *, tied: bool = False) -> None:
    """Every tensor of the step is made on one GPU, and what stays is what should."""
    num_own, head = len(trace.template), 0 if tied else len(whole.stages) - 1
    for name in ("setup", "first", "again", "next"):
        made = [event for part in whole.stages for event in getattr(part, name) if event >= 0]
        numbers = Counter(number for number in made if number < num_own)
        if name == "setup":
            buffers = {n for n, kind in enumerate(trace.categories) if kind == "parameter"}
            assert {*numbers} == buffers
        elif isinstance(whole, DealtTrace):
            expected = {event for event in getattr(trace, name) if event >= 0}
            assert numbers == Counter(expected), name
    for gpu, part in enumerate(whole.stages):
        assert len(part.categories) == len(part.operations) == len(part.sizes(1, 0))
        gradients = sum(part.sizes(1, 0)[number] for number in part.gradients)
        loss = LOSS if part.loss is not None else 0
        assert alive(part, "again")[-1] == gradients + loss
        assert alive(part, "first")[-1] == gradients + loss + WORKSPACE
        assert alive(part, "next")[-1] == loss
        layers = whole.counts[gpu]
        of_head = NORM + EMBEDDING * (not tied)
        weights = WEIGHT * layers + EMBEDDING * (gpu == 0) + of_head * (gpu == head)
        specs = part.trainable(0)
        assert gradients == weights == sum(spec.size_bytes for spec in specs)
    assert sum(part.loss is not None for part in whole.stages) == 1


@pytest.mark.parametrize("counts", [(2, 2), (1, 3), (3, 1), (1, 1, 2), (1, 1, 1, 1)])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("checkpointing", [0, 1, 2])
def test_gpus_in_turn_make_all_of_a_step_once(
    counts: tuple[int, ...], tied: bool, checkpointing: int
) -> None:
    trace, num_gpus = step(4, tied=tied), len(counts)
    spec = _spec(checkpointing)
    whole = DealtTrace(trace, spec, num_gpus=num_gpus, counts=counts)
    assert whole.counts == counts
    check(whole, trace, tied=tied)
    # Hidden states there, and back to a tied head; each layer that is not on the first GPU is given what
    # all of them are given; the logits go back to where the forward pass began.
    away = 4 - counts[0]
    hops = num_gpus - 1 + (1 if tied else 0)
    expected = Counter({2 * HIDDEN: 2 * hops, 2 * ROTARY: away, 2 * POSITIONS: away})
    expected += Counter({2 * LOGITS: int(not tied)})
    sent = whole.exchange(1, 0)
    assert {each.num_bytes: each.count for each in sent.messages_per_micro_step} == expected
    assert sent.num_gpus == num_gpus
    assert sent.layers == counts
    assert not sent.messages_per_step
    # Nothing is shared out: no buffers, and nothing on the host.
    assert (sent.host_copy_bytes_per_micro_step, sent.host_copy_bytes_per_step) == (0, 0)
    assert (sent.host_bytes, sent.host_update_elements) == (0, 0)
    assert (sent.gathered_bytes, sent.buffers_bytes) == (0, 0)


def _spec(checkpointing: int) -> TraceSpec:
    return dataclasses.replace(
        SPEC, parallelism="device-map", activation_checkpointing=checkpointing
    )


def test_a_gpu_in_turn_keeps_what_its_layers_keep_and_copies_of_what_they_are_given() -> None:
    trace = step(4)
    first, last = DealtTrace(trace, _spec(0), num_gpus=2, counts=(1, 3)).stages
    made = [event for event in last.again if event >= 0]
    logits = next(n for n in made if last.categories[n] == "logits")
    at = last.again.index(logits)
    layer = KEPT + HIDDEN + ROTARY
    assert alive(last, "again")[at] == HIDDEN + 3 * layer + LOGITS
    # The logits came back to the first GPU, whose output has gone.
    copy = next(n for n in first.again if n >= 0 and first.categories[n] == "logits")
    own = HIDDEN + KEPT + ROTARY + POSITIONS
    assert alive(first, "again")[first.again.index(copy)] in (
        own + LOGITS,
        own + LOGITS - POSITIONS,
    )
    # All weights are asked for in one piece as a GPU begins to load, then one by one.
    for part, weights in ((first, EMBEDDING + WEIGHT), (last, 3 * WEIGHT + NORM + EMBEDDING)):
        assert alive(part, "setup")[0] == weights
        assert alive(part, "setup")[1] == 0
        # There is no adapter: all of it is prepared, and its own.
        assert part.num_prepared_events == part.num_own_events == len(part.setup)
        assert alive(part, "setup")[-1] in (weights, weights + ROTARY_TABLE)
    assert (len(first.batch), len(last.batch)) == (2, 0)


def test_what_a_weight_passes_through_is_of_the_gpu_that_has_it() -> None:
    """What the first block asks for in one piece, and gives back, each GPU asks for itself."""
    whole = DealtTrace(step(4, packs=True), _spec(0), num_gpus=2, counts=(1, 3))
    for part, count in zip(whole.stages, whole.counts, strict=True):
        sizes = part.sizes(1, 0)
        passing = [event for event in part.setup if sizes[max(event, ~event)] == 2048]
        assert [event >= 0 for event in passing] == count * [True, False]
        assert passing[1::2] == [~event for event in passing[::2]]
        alive(part, "setup")


@pytest.mark.parametrize("num_gpus", [2, 3, 4])
@pytest.mark.parametrize("releases", [False, True])
def test_a_pipelines_gpus_hold_their_layers(
    num_gpus: int, releases: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "releases_messages", lambda: releases)
    trace = step(4)
    spec = dataclasses.replace(SPEC, parallelism="pp")
    whole = PipelineTrace(trace, spec, num_gpus=num_gpus)
    assert whole.counts == even_counts(4, num_gpus)
    check(whole, trace)
    sent = whole.exchange(3, 0)
    there_and_back = [(each.num_bytes, each.count) for each in sent.messages_per_micro_step]
    assert there_and_back == [(3 * HIDDEN, 2)]
    filled = [(each.num_bytes, each.count) for each in sent.messages_per_step]
    assert filled == ([(3 * HIDDEN, 2 * (num_gpus - 2))] if num_gpus > 2 else [])
    # The first GPU has the ids, the last the labels.
    assert [len(part.batch) for part in whole.stages] == [1, *[0] * (num_gpus - 2), 1]
    for gpu, part in enumerate(whole.stages):
        layers, later = whole.counts[gpu], num_gpus - 1 - gpu
        is_first, is_last = gpu == 0, later == 0
        # So many micro-batches are on their way behind it. Of each it keeps what its layers keep, the last
        # output among it; where torch releases that, it keeps what arrived.
        of_each = layers * (KEPT + HIDDEN) + ROTARY + HIDDEN * is_first
        of_each += HIDDEN * ((not is_first) - 1) * releases
        messages = (not is_first) + (not is_last)
        if releases:
            messages = (not is_first) * (1 if is_last else 2)
        given = 0 if is_first else ROTARY + POSITIONS
        own = next(at for at, event in enumerate(part.again) if 0 <= event < len(trace.template))
        waits = alive(part, "again")[own - 1] if own else 0
        assert waits == later * of_each + messages * HIDDEN + given
        # Hidden states that came and gradients that came back stay, one of each micro-batch; where torch
        # lets go of what arrived, only what the last GPU got stays, with its loss.
        num_left = len(part.of_micro_batches), len(part.of_losses)
        assert num_left == ((0, int(is_last)) if releases else ((gpu > 0) + (not is_last), 0))


def test_even_counts_differ_by_one_at_most() -> None:
    for num_layers, num_gpus in itertools.product(range(1, 12), range(1, 6)):
        counts = even_counts(num_layers, num_gpus)
        assert sum(counts) == num_layers
        assert len(counts) == num_gpus
        assert list(counts) == sorted(counts, reverse=True)
        assert counts[0] - counts[-1] <= 1


@pytest.mark.parametrize("num_layers", [3, 4, 5, 7, 9])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("trainable", [False, True])
def test_layers_are_dealt_so_that_the_fullest_gpu_is_as_empty_as_can_be(
    num_layers: int, tied: bool, trainable: bool
) -> None:
    """AdamW's two moments in float32 are four times the weights, and a gradient is once more."""
    trace = step(num_layers, tied=tied, trainable=trainable)
    times = 6 if trainable else 1
    for num_gpus, micro_batch in itertools.product((2, 3), (1, 2, 3, 5, 8, 13, 64)):
        layer = times * WEIGHT + micro_batch * (KEPT + HIDDEN) + WORKSPACE / num_layers
        ends = [times * EMBEDDING, *[0] * (num_gpus - 1)]
        # The head frees the positions before it makes the logits.
        at_head = micro_batch * (LOGITS - POSITIONS) + LOSS
        ends[0 if tied else -1] += at_head + times * (NORM + EMBEDDING * (not tied))

        def fullest(counts: tuple[int, ...]) -> float:
            return max(end + count * layer for end, count in zip(ends, counts, strict=True))  # noqa: B023

        every = (
            counts
            for counts in itertools.product(range(1, num_layers), repeat=num_gpus)
            if sum(counts) == num_layers
        )
        found = layers_per_gpu(trace, num_gpus, micro_batch=micro_batch)
        assert sum(found) == num_layers
        assert fullest(found) == min(map(fullest, every))
    assert can_deal(trace, num_layers)
    assert can_deal(trace, num_layers - 1)
    assert not can_deal(trace, num_layers + 1)
