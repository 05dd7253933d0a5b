"""Seconds of vLLM beside a step written by hand: what its engine reads, computes and copies."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from written_trace import Answer

from autotune.catalogue.gpus import find_gpu
from autotune.memory.traces import Trace
from autotune.predict import vllm_generation
from autotune.predict.vllm_generation import (
    LOAD_SECONDS,
    SEQUENCE_SECONDS,
    STEP_SECONDS,
    WAKE_SECONDS,
)
from autotune.space.config import TrainConfig
from autotune.speed import roofline

CARD = find_gpu("rtx-4090")
RATES = roofline.ceilings(CARD)
VOCABULARY, BASE, PER_RANK = 50_000, 10**9, 10**6
CACHE_BYTES = 4096
"""Bytes of a token's keys and values in 16 bits."""
LENGTH, NEW = 1025, 101
VLLM = TrainConfig(
    method="lora",
    lora_rank=16,
    lora_targets="all-linear",
    micro_batch_size=8,
    gradient_accumulation_steps=4,
    sequence_length=LENGTH,
    precision="bf16-true",
    optimizer="sgd",
    batching="padded",
    trainer="trl-grpo",
    num_generations=4,
    max_completion_length=NEW,
    kl_beta=0.0,
    vllm_gpu_memory_utilization=0.5,
)
FLOPS = {"prefill": 10**12, "decode": 10**10, "last": 3 * 10**10}
"""Operations of each phase's products for a completion; twice as many bytes as millionths of them."""


def trace(*, cache_bytes: int = CACHE_BYTES, grows: bool = False) -> Trace:
    a = Answer(full=0, traced=0)
    a.block("weights").alloc("w", [512, 0, 0], shape=[[256, 0, 0]], **_facts())
    a.alloc("v", [512, 0, 0], shape=[[256, 0, 0]], **_facts())
    a.block("prefill")
    _products(a, "prefill")
    a.block("decode").alloc("logits", [4 * VOCABULARY, 1, 0], category="logits").free("logits")
    a.alloc("scratch", [999, 1, 0])
    if not grows:
        a.alloc("cache", [cache_bytes * (LENGTH - 1), 1, 0])
    a.free("scratch")
    _products(a, "decode")
    if grows:
        a.block("grown").alloc("cache", [cache_bytes * (LENGTH - 1), 1, 0])
        a.alloc("passing", [77, 1, 0]).free("passing")
    a.block("last")
    _products(a, "last")
    counts = {"total": [[BASE, 0, 0], [PER_RANK, 0, 1]], "trainable": [[PER_RANK, 0, 1]]}
    a.parameters.append({"stack": 0, "layer": -1, **counts})
    return a.trace()


def _facts() -> dict[str, Any]:
    facts = {"category": "parameter", "dtype": "bfloat16", "trainable": True, "group": 0}
    return {**facts, "embedding": False, "linear": True}


def _products(a: Answer, phase: str) -> None:
    for name, dtype in (("mm", "float32"), ("softmax", "bfloat16")):
        flops, moved = [FLOPS[phase], 1, 0], [[4 * FLOPS[phase] // 10**6, 1, 0]]
        a.blocks[-1]["kernels"].append([name, dtype, flops, moved, False, 1, []])


def product(phase: str, count: int) -> float:
    """Seconds of a phase's product in 16 bits: half of the bytes that were traced in 32."""
    flops = FLOPS[phase] * count
    kernel = roofline.Kernel(
        name="mm", kind="matmul", dtype="bfloat16", flops=flops, bytes_moved=2 * flops // 10**6
    )
    found = roofline.seconds([kernel], RATES)
    assert found is not None
    return found.gpu_seconds


def moved(num_bytes: float) -> float:
    kernel = roofline.Kernel(
        name="copy", kind="elementwise", dtype="bfloat16", flops=0, bytes_moved=num_bytes
    )
    found = roofline.seconds([kernel], RATES)
    assert found is not None
    return found.gpu_seconds


def generated(
    num_running: int, *, num_sequences: int = 32, cache_bytes: int = CACHE_BYTES
) -> float:
    """An engine's step: products between the first's and the last's, the mean cache, logits eight times."""
    read = num_running * (LENGTH - NEW / 2) * cache_bytes + 8 * 4 * VOCABULARY * num_running
    products = (product("decode", num_running) + product("last", num_running)) / 2
    each = products + moved(read) + STEP_SECONDS + SEQUENCE_SECONDS * num_running
    return product("prefill", num_sequences // 4) + num_sequences / num_running * NEW * each


@pytest.mark.parametrize("grows", [False, True])
def test_a_generation_is_its_prompts_and_as_many_steps_as_new_tokens(grows: bool) -> None:
    written = trace(grows=grows)
    served = vllm_generation.served_of(written, VLLM, CARD)
    assert served.num_parameters == BASE
    assert served.vocab_size == VOCABULARY
    assert served.cache_bytes_per_token == CACHE_BYTES
    assert served.capacity_bytes == CARD.capacity_bytes
    assert vllm_generation.num_running(written, VLLM, CARD) == 32
    found = vllm_generation.generation_seconds(written, VLLM, CARD, RATES)
    assert found == pytest.approx(generated(32))
    # One prompt for each completion has no prefix in common.
    alone = dataclasses.replace(VLLM, num_generations=1)
    each = vllm_generation.generation_seconds(written, alone, CARD, RATES)
    assert each == pytest.approx(generated(32) - product("prefill", 8) + product("prefill", 32))


def test_sequences_wait_where_the_share_has_no_room_for_their_cache() -> None:
    half = CARD.capacity_bytes / 2
    left = half - 2 * BASE - 2**29 - 9 * 4 * VOCABULARY * 32
    for num_running in (3, 1):
        of_one = left / (num_running + 0.5) / LENGTH
        written = trace(cache_bytes=int(of_one))
        assert vllm_generation.num_running(written, VLLM, CARD) == num_running
        found = vllm_generation.generation_seconds(written, VLLM, CARD, RATES)
        assert found == pytest.approx(generated(num_running, cache_bytes=int(of_one)), rel=1e-6)
    # One runs where none would: the rule of vllm-has-room says that it does not start.
    tight = dataclasses.replace(VLLM, vllm_gpu_memory_utilization=0.01)
    assert vllm_generation.num_running(trace(), tight, CARD) == 1


def test_float32_has_its_cache_in_half_of_what_was_traced() -> None:
    """Compute in float32 is traced with a cache of 32 bits."""
    plain = dataclasses.replace(VLLM, precision="fp32")
    assert vllm_generation.served_of(trace(), plain, CARD).cache_bytes_per_token == CACHE_BYTES // 2


@pytest.mark.parametrize(
    ("changes", "copied_bytes"),
    [
        # Read and written once in 16 bits.
        ({"method": "full", "lora_rank": None, "lora_targets": None}, 4 * BASE),
        (
            {"method": "full", "lora_rank": None, "lora_targets": None, "precision": "fp32"},
            6 * BASE,
        ),
        # Merged and taken out: each time a product in float32 is written, read and cast, and added.
        ({}, 4 * BASE + 2 * BASE * (2 * 4 + 2 + 3 * 2)),
    ],
)
@pytest.mark.parametrize("sleeps", [False, True])
def test_weights_are_taken_over_each_step_and_asleep_with_each_generation(
    changes: dict[str, Any], copied_bytes: int, sleeps: bool
) -> None:
    written = trace()
    config = dataclasses.replace(VLLM, vllm_enable_sleep_mode=sleeps, **changes)
    for num_together, generations in ((None, 1), (1, 4)):
        each = dataclasses.replace(config, steps_per_generation=num_together)
        found = vllm_generation.seconds(written, each, CARD, RATES)
        alone = vllm_generation.generation_seconds(written, each, CARD, RATES)
        assert alone is not None
        syncs = generations if sleeps else 1
        expected = generations * (alone + WAKE_SECONDS * sleeps)
        expected += syncs * (moved(copied_bytes) + 2 * LOAD_SECONDS)
        assert found == pytest.approx(expected)
    # Trained on twice, half of a generation belongs to a step.
    twice = dataclasses.replace(config, num_iterations=2)
    halved = vllm_generation.seconds(written, twice, CARD, RATES)
    once = vllm_generation.seconds(written, config, CARD, RATES)
    assert once is not None
    assert halved == pytest.approx(once / 2)


def test_what_a_time_depends_on_beside_the_trace() -> None:
    """Two configurations of unlike facts may take unlike times, and are not taken for each other."""
    facts = vllm_generation.facts_of(VLLM)
    for change in (
        {"vllm_gpu_memory_utilization": 0.4},
        {"vllm_enable_sleep_mode": True},
        {"sequence_length": LENGTH + 1},
        {"max_completion_length": NEW + 1},
        {"num_generations": 8},
        {"micro_batch_size": 4},
        {"num_iterations": 2},
    ):
        assert vllm_generation.facts_of(dataclasses.replace(VLLM, **change)) != facts  # type: ignore[arg-type]
