"""Steps whose micro-batches differ in length, replayed by the allocator model."""

from __future__ import annotations

import dataclasses

import here
import pytest
import tiny_model

from autotune.common.units import MIB
from autotune.memory.traces import Trace
from autotune.predict import varied_steps
from autotune.predict.estimator import Estimator
from autotune.predict.tracing import trace_all
from autotune.records.estimate import TraceSpec
from autotune.space.config import TrainConfig

pytestmark = pytest.mark.worker

PADDED = {
    (config.method, config.activation_checkpointing): dataclasses.replace(
        config, batching="padded", gradient_accumulation_steps=1
    )
    for config in tiny_model.configs()
    if config.micro_batch_size == 4
}
"""One of each kind of step."""


@pytest.fixture(scope="module")
def estimator() -> Estimator:
    card = tiny_model.gpu()
    specs = {TraceSpec.of(config) for config in PADDED.values()}
    traces = trace_all(
        tiny_model.MODEL,
        "causal-lm",
        tiny_model.SEQUENCE_LENGTH,
        card,
        specs,
        server=here.workers,
    )
    return Estimator(traces, card, memory_budget_bytes=10**11)


def trace_of(estimator: Estimator, config: TrainConfig) -> Trace:
    trace = estimator.trace_of(config)
    assert isinstance(trace, Trace)
    return trace


@pytest.mark.parametrize("accumulation", [1, 3, 64])
@pytest.mark.parametrize("config", PADDED.values(), ids=map(str, PADDED))
def test_of_full_length_they_reserve_what_is_predicted(
    config: TrainConfig, accumulation: int, estimator: Estimator
) -> None:
    config = dataclasses.replace(config, gradient_accumulation_steps=accumulation)
    steps, known = estimator.replayed(config)
    full = [config.sequence_length] * len(varied_steps.longest(config, (), 0))
    found = varied_steps.replay(steps, trace_of(estimator, config), config, full)
    assert found.failed_event is None
    # Of many micro-batches fewer are replayed.
    least_bytes = 0 if accumulation <= varied_steps.NUM_MICRO_BATCHES // 2 else 2 * MIB
    assert abs(found.peak_reserved_bytes - known.peak_reserved_bytes) <= least_bytes
    assert found.peak_allocated_bytes == known.peak_allocated_bytes


def test_shorter_ones_live_in_less_and_leave_more_pieces(estimator: Estimator) -> None:
    config = PADDED["full", 0]
    steps, known = estimator.replayed(config)
    trace = trace_of(estimator, config)
    half = [config.sequence_length // 2] * varied_steps.NUM_MICRO_BATCHES
    halved = varied_steps.replay(steps, trace, config, half)
    few = dataclasses.replace(config, micro_batch_size=config.micro_batch_size // 2)
    assert halved.peak_allocated_bytes == pytest.approx(
        estimator.replayed(few)[1].peak_allocated_bytes, rel=0.002
    )
    lengths = varied_steps.longest(config, (), 0)
    assert len(set(lengths)) > varied_steps.NUM_MICRO_BATCHES // 2
    free = varied_steps.replay(steps, trace, config, lengths)
    assert free.peak_reserved_bytes > known.peak_reserved_bytes
    # Under a cap the cache is given back, as torch does it; at the peak itself nothing helps.
    capped = varied_steps.replay(steps, trace, config, lengths, known.peak_reserved_bytes)
    assert capped.num_alloc_retries > 0 or capped.failed_event is not None
    least = known.peak_allocated_bytes // 2
    assert not estimator.goes_on(config, (), least)
    assert estimator.goes_on(config, (), 2 * free.peak_reserved_bytes)


def test_a_micro_batch_is_as_long_as_its_longest_sample() -> None:
    config = PADDED["full", 0]
    short, long = 100, config.sequence_length
    lengths = (short,) * 96 + (long,) * 5
    padded = varied_steps.longest(config, lengths, 0)
    alone = varied_steps.longest(dataclasses.replace(config, micro_batch_size=1), lengths, 0)
    assert padded.count(long) > alone.count(long) > 0
    grouped = varied_steps.longest(dataclasses.replace(config, batching="grouped"), lengths, 0)
    assert grouped == sorted(grouped, reverse=True)
    assert 0 < grouped.count(long) < padded.count(long)


@pytest.mark.parametrize(
    "change",
    [{"batching": "packed"}, {"batching": "by-tokens"}, {"torch_compile": "default"}],
    ids=str,
)
def test_others_are_not_replayed(change: dict[str, str], estimator: Estimator) -> None:
    config = dataclasses.replace(PADDED["full", 0], **change)
    assert not varied_steps.is_replayed(config)
    assert estimator.most_for_lengths(config) is None
