"""What a report draws beside an answer: memory over a step, and the way there, one change at a time."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import answers
import here
import pytest
import tiny_model

from autotune.common import json_records
from autotune.common.units import GIB
from autotune.memory.traces import Trace
from autotune.predict.estimator import Estimator
from autotune.predict.tracing import trace_all
from autotune.records.charts import MAX_POINTS, MIN_POINTS_OF_PHASE, Details, Timeline
from autotune.records.estimate import Estimate, TraceSpec
from autotune.search import waterfall
from autotune.space.config import TrainConfig
from autotune.space.rules import Context

pytestmark = pytest.mark.worker

ROOMY = 100 * 10**9
CONTEXT = Context(effective_batch_size=tiny_model.EFFECTIVE_BATCH_SIZE)
BASE = tiny_model.FULL
FASTER = dataclasses.replace(
    BASE,
    micro_batch_size=4,
    gradient_accumulation_steps=2,
    optimizer="adamw_bnb_8bit",
    activation_checkpointing=1,
)


ADAPTER = dataclasses.replace(
    BASE, method="lora", precision="bf16-autocast", lora_rank=8, lora_targets="all-linear"
)


@functools.cache
def traces() -> Mapping[TraceSpec, Trace]:
    """Of whatever these tests come by."""
    configs = [BASE, FASTER, ADAPTER, dataclasses.replace(BASE, precision="bf16-mixed")]
    configs += [dataclasses.replace(FASTER, activation_checkpointing=0)]
    configs += [dataclasses.replace(BASE, activation_checkpointing=1)]
    specs = {TraceSpec.of(config) for config in configs}
    length = tiny_model.SEQUENCE_LENGTH
    return trace_all(
        tiny_model.MODEL, "causal-lm", length, tiny_model.gpu(), specs, server=here.workers
    )


def estimator(budget_bytes: int = ROOMY) -> Estimator:
    return Estimator(traces(), tiny_model.gpu(), memory_budget_bytes=budget_bytes)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"micro_batch_size": 8, "gradient_accumulation_steps": 1},
        {"activation_checkpointing": 1, "micro_batch_size": 4, "gradient_accumulation_steps": 2},
        {"optimizer": "adamw_bnb_8bit", "precision": "bf16-mixed"},
    ],
    ids=lambda changed: "-".join(changed) or "base",
)
def test_a_timeline_peaks_where_the_estimate_does(changed: dict[str, Any]) -> None:
    config = dataclasses.replace(BASE, **changed)
    priced = estimator()
    timeline, estimate = priced.timeline(config), priced.estimate(config)
    totals = [timeline.at(point) for point in range(timeline.num_points)]
    assert max(totals) == totals[timeline.peak_point]
    # The allocator counts remainders that are too small to split (under 1 MiB each) on top.
    assert 0.98 * estimate.peak_allocated_bytes <= max(totals) <= estimate.peak_allocated_bytes
    alive = {name: row[timeline.peak_point] for name, row in timeline.bytes_by_category.items()}
    assert alive["parameter"] == pytest.approx(estimate.breakdown.parameters_bytes, rel=0.001)
    assert alive["activation"] == pytest.approx(
        estimate.breakdown.activations_bytes, rel=0.001, abs=512 * 1000
    )


@pytest.mark.parametrize("optimizer", ["sgd", "adafactor"])
def test_a_timeline_peaks_where_segments_that_grow_do(optimizer: str) -> None:
    """That is at another event than with segments of fixed size. Every remainder is split off: the peak
    is the sum of what is alive, to the byte."""
    config = dataclasses.replace(BASE, optimizer=optimizer, expandable_segments=True)
    timeline, estimate = estimator().timeline(config), estimator().estimate(config)
    assert timeline.at(timeline.peak_point) == estimate.peak_allocated_bytes
    parts = estimate.breakdown
    exact = parts.optimizer_state_bytes + parts.temporaries_bytes
    alive = timeline.bytes_by_category
    drawn = alive["optimizer_state"][timeline.peak_point] + alive["temporary"][timeline.peak_point]
    assert 0 <= drawn - exact <= parts.rounding_bytes


def test_a_timeline_has_the_phases_of_a_step() -> None:
    timeline = estimator().timeline(BASE)
    assert list(timeline.phases) == [
        "forward",
        "backward",
        "forward, further micro-batches",
        "backward, further micro-batches",
        "optimizer",
    ]
    assert timeline.num_points <= MAX_POINTS
    starts = [*timeline.phases.values(), timeline.num_points]
    assert all(
        after - before >= MIN_POINTS_OF_PHASE for before, after in itertools.pairwise(starts)
    )
    gradients = timeline.bytes_by_category["gradient"]
    # The backward pass makes them, the optimizer's zero_grad drops them.
    assert gradients[0] == 0
    assert gradients[timeline.phases["optimizer"]] > 10**8
    assert gradients[-1] < gradients[timeline.phases["optimizer"]] / 2
    # No second micro-batch, no such phase.
    alone = dataclasses.replace(BASE, micro_batch_size=8, gradient_accumulation_steps=1)
    assert list(estimator().timeline(alone).phases) == ["forward", "backward", "optimizer"]


def test_the_way_leads_from_the_base_to_the_answer_one_change_at_a_time() -> None:
    priced = estimator()
    steps = waterfall.path(priced, BASE, FASTER, CONTEXT)
    assert steps[0].changed == {}
    config = BASE
    for step in steps:
        config = dataclasses.replace(config, **step.changed)  # type: ignore[arg-type]
        estimate = priced.estimate(config)
        assert step.tokens_per_second == estimate.tokens_per_second
        assert step.peak_device_bytes == estimate.peak_device_bytes
        assert step.resident_bytes == estimate.resident_bytes
    assert config == FASTER
    # Micro-batch and accumulation are one change: apart they would be another effective batch.
    assert sorted(map(sorted, (step.changed for step in steps[1:]))) == [
        ["activation_checkpointing"],
        ["gradient_accumulation_steps", "micro_batch_size"],
        ["optimizer"],
    ]


def test_what_does_not_fit_is_made_smaller_first() -> None:
    smaller = dataclasses.replace(BASE, optimizer="sgd", activation_checkpointing=1)
    tight = estimator(10**9)
    assert tight.estimate(BASE).peak_device_bytes > 10**9
    first = waterfall.path(tight, BASE, smaller, CONTEXT)[1]
    # AdamW's two moments are larger than 512 tokens' activations of five layers.
    assert first.changed == {"optimizer": "sgd"}
    # With room for everything the slowing change comes last.
    roomy = waterfall.path(estimator(), BASE, smaller, CONTEXT)
    assert roomy[-1].changed == {"activation_checkpointing": 1}


def test_a_method_brings_its_settings_along() -> None:
    steps = waterfall.path(estimator(), BASE, ADAPTER, CONTEXT)
    by_method = next(step.changed for step in steps if "method" in step.changed)
    assert {"method", "lora_rank", "lora_targets"} <= set(by_method)


def test_there_is_no_way_to_oneself_nor_from_nowhere() -> None:
    assert waterfall.path(estimator(), BASE, BASE, CONTEXT) == ()
    details = waterfall.details(estimator(), None, BASE, CONTEXT, [])
    assert details.base is None
    assert details.path == ()


def test_details_are_read_back_from_json() -> None:
    priced = [(float(speed), 10**9 + speed) for speed in range(5000, 0, -1)]
    details = waterfall.details(estimator(), BASE, FASTER, CONTEXT, priced)
    text = json.dumps(json_records.plain(details))
    assert json_records.read(Details, json.loads(text)) == details
    # A row of MySQL's TEXT holds no more.
    assert len(text) < 65_535
    # A sample from the fastest to the slowest.
    assert 300 <= len(details.priced) <= 600
    assert details.priced[0][0] == 5000.0
    assert details.priced[-1][0] < 20


@pytest.mark.parametrize(
    "broken",
    [
        {"peak_point": 2},
        {"bytes_by_category": {"parameter": [1, 2], "gradient": [1]}},
        {"bytes_by_category": {}},
        {"phases": "forward"},
    ],
)
def test_a_timeline_that_is_none_is_refused(broken: dict[str, Any]) -> None:
    timeline = Timeline(
        phases={"forward": 0}, bytes_by_category={"parameter": (1, 2)}, peak_point=1
    )
    fields = {"answer": dataclasses.asdict(timeline) | broken, "base": None}
    with pytest.raises(ValueError, match=r"answer|figures|phases"):
        json_records.read(Details, {**fields, "path": [], "priced": []})


def test_the_way_is_the_smallest_while_nothing_fits_and_then_the_fastest_that_does() -> None:
    base = dataclasses.replace(BASE, sequence_length=1024)
    checkpointed = {"activation_checkpointing": 1}
    optimizer, eager, liger = {"optimizer": "sgd"}, {"attention": "eager"}, {"liger": True}
    answer = dataclasses.replace(base, **checkpointed, **optimizer, **eager, **liger)
    changes = (checkpointed, optimizer, eager, liger)
    # Bytes that each saves and tokens per second that it brings, in hundreds.
    saves, brings = (40, 20, 0, 10), (-3, 1, 4, 2)

    def sums(config: TrainConfig, of_changes: tuple[int, ...]) -> int:
        made = [
            all(getattr(config, name) == value for name, value in change.items())
            for change in changes
        ]
        return sum(each for each, is_made in zip(of_changes, made, strict=True) if is_made)

    def estimate(config: TrainConfig) -> Estimate:
        seconds = config.tokens_per_step / (1000 + 100 * sums(config, brings))
        return answers.estimate(
            config, step_seconds=seconds, device_gib=10 - 0.1 * sums(config, saves)
        )

    def fits(found: Estimate) -> bool:
        return found.peak_device_bytes <= 7 * GIB

    def fitting(config: TrainConfig) -> Estimate | None:
        # With eager attention it fits only where Liger is there, too.
        found = estimate(config)
        return found if fits(found) and (config.attention != "eager" or config.liger) else None

    priced: Any = SimpleNamespace(
        estimate=estimate,
        fits=fits,
        fitting=fitting,
        supports=lambda _: True,
        tokens_per_second=lambda config: estimate(config).tokens_per_second,
        floor_bytes=lambda config: estimate(config).peak_device_bytes,
    )
    context = Context(effective_batch_size=base.effective_batch_size)
    steps = waterfall.path(priced, base, answer, context)
    assert [step.changed for step in steps] == [{}, checkpointed, liger, eager, optimizer]
    speeds = [step.tokens_per_second for step in steps]
    assert speeds == pytest.approx([1000, 700, 900, 1300, 1400])
    assert waterfall.path(priced, answer, answer, context) == ()
    # Of an unknown speed there is no way to show.
    unknown = answers.estimate(step_seconds=None)
    priced.estimate = lambda config: unknown if config.liger else estimate(config)
    assert waterfall.path(priced, base, answer, context) == ()
