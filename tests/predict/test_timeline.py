"""Made-up steps: which of them are replayed, and the one that a chart draws."""

from __future__ import annotations

import dataclasses

import pytest
from test_dealt_layers import EMBEDDING, NORM, ROTARY_TABLE, WORKSPACE, step
from test_dealt_layers import WEIGHT as WEIGHT_BYTES

from autotune.catalogue.gpus import find_gpu
from autotune.common.units import MIB
from autotune.memory.allocator import EMPTY_CACHE
from autotune.predict.estimator import Estimator
from autotune.predict.steps import StepPart, Steps
from autotune.predict.timeline import timeline_of
from autotune.records.charts import StepPhase
from autotune.records.estimate import TraceSpec
from autotune.space.config import TrainConfig

WEIGHT, SMALL, LARGE, HUGE = range(4)
SIZES = [MIB, 30 * MIB, 50 * MIB, 90 * MIB]
CATEGORIES = ["parameter", "activation", "temporary", "activation"]


def steps(*tensors: int, sure_step: int) -> Steps:
    """Steps that make and free one tensor each."""
    return Steps(
        sizes=SIZES,
        categories=CATEGORIES,
        parts=[
            StepPart(-1, StepPhase.SETUP, [WEIGHT, EMPTY_CACHE]),
            *(
                StepPart(number, StepPhase.FORWARD, [each, ~each])
                for number, each in enumerate(tensors)
            ),
        ],
        sure_step=sure_step,
    )


def test_steps_run_until_one_reserves_no_more() -> None:
    peak = steps(SMALL, SMALL, LARGE, LARGE, HUGE, sure_step=1).replay().peak_allocated_bytes
    # The third reserves more than the second, the fourth no more: the fifth is not looked at.
    assert peak == 51 * MIB
    # The last of the sure steps runs, and what follows it is asked first whether it reserves more.
    assert steps(SMALL, SMALL, LARGE, sure_step=0).replay().peak_allocated_bytes == 31 * MIB
    assert steps(SMALL, SMALL, LARGE, sure_step=1).replay().peak_allocated_bytes == 51 * MIB
    assert steps(SMALL, SMALL, LARGE, sure_step=2).replay().peak_allocated_bytes == 51 * MIB


def test_the_step_that_peaks_is_drawn_phase_by_phase() -> None:
    made = Steps(
        sizes=SIZES,
        categories=CATEGORIES,
        parts=[
            StepPart(-1, StepPhase.SETUP, [WEIGHT]),
            StepPart(0, StepPhase.FORWARD, [SMALL, ~SMALL]),
            StepPart(1, StepPhase.FORWARD, [SMALL]),
            StepPart(1, StepPhase.BACKWARD, [LARGE, ~LARGE, ~SMALL]),
        ],
        sure_step=1,
    )
    drawn = timeline_of(made, 4)
    assert drawn.phases == {StepPhase.FORWARD: 0, StepPhase.BACKWARD: 1}
    assert drawn.bytes_by_category["parameter"] == (MIB,) * 4
    assert drawn.bytes_by_category["activation"] == (30 * MIB, 30 * MIB, 30 * MIB, 0)
    assert drawn.bytes_by_category["temporary"] == (0, 50 * MIB, 0, 0)
    assert drawn.peak_point == 1


def test_what_peaks_while_weights_are_loaded_peaks_before_the_first_step() -> None:
    drawn = timeline_of(steps(SMALL, LARGE, sure_step=1), 0)
    assert drawn.bytes_by_category["activation"] == (30 * MIB, 0)
    assert drawn.peak_point == 0


FULL = TrainConfig(
    method="full",
    micro_batch_size=1,
    gradient_accumulation_steps=1,
    sequence_length=64,
    precision="bf16-true",
    optimizer="adamw_torch",
)
ONE = (StepPhase.FORWARD, StepPhase.BACKWARD)
MORE = (StepPhase.FORWARD_AGAIN, StepPhase.BACKWARD_AGAIN)


def written(config: TrainConfig) -> Steps:
    """The first steps of a model of two layers that is written by hand."""
    spec, card = TraceSpec.of(config), find_gpu("rtx-4090")
    estimator = Estimator({spec: step(2)}, card, memory_budget_bytes=10**9)
    found, _ = estimator.replayed(config)
    return found


def left_after(steps: Steps) -> dict[int, list[int]]:
    """Sizes of the tensors that are there after each step; each comes once, and goes once it has come."""
    here, found = set[int](), dict[int, list[int]]()
    for part in steps.parts:
        for event in part.events.tolist():
            if event != EMPTY_CACHE:
                number = max(event, ~event)
                assert (number in here) == (event < 0)
                here ^= {number}
        found[part.step] = sorted(steps.sizes[number] for number in here)
    return found


@pytest.mark.parametrize("every", [0, 1, 3])
@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["adamw_torch", "sgd", "sgd in backward", "lomo"])
def test_a_step_has_its_phases_in_order_and_leaves_what_the_step_before_left(
    optimizer: str, accumulation: int, every: int
) -> None:
    name, _, in_backward = optimizer.partition(" in ")
    at_once = bool(in_backward) or name == "lomo"
    if at_once and accumulation > 1:
        return
    changes = {"optimizer": name, "update_in_backward": bool(in_backward)}
    config = dataclasses.replace(
        FULL,
        gradient_accumulation_steps=accumulation,
        torch_empty_cache_steps=every,
        **changes,  # type: ignore[arg-type]
    )
    steps = written(config)
    phases: dict[int, list[StepPhase]] = {}
    for part in steps.parts:
        phases.setdefault(part.step, []).append(part.phase)
    # Eight steps; those between the second and the one that empties the cache are like the second.
    numbers = [0, 1, *((3, 4, 5, 6, 7, 8) if every == 3 else (2, 3, 4, 5, 6, 7))]
    expected = [*ONE, *(MORE if accumulation > 1 else ()), StepPhase.OPTIMIZER]
    if at_once:
        expected = [StepPhase.FORWARD, StepPhase.BACKWARD_AND_OPTIMIZER]
    assert phases == {-1: [StepPhase.SETUP], **dict.fromkeys(numbers, expected)}
    assert [part.is_repeated for part in steps.parts] == [
        part.phase in MORE for part in steps.parts
    ]
    assert steps.sure_step == (3 if every == 3 else 0)
    # The cache is emptied once before the optimizer is made, and with each micro-batch of such a step.
    emptied = dict.fromkeys(phases, 0)
    for part in steps.parts:
        emptied[part.step] += part.events.tolist().count(EMPTY_CACHE)
        if part.step >= 0 and EMPTY_CACHE in part.events:
            assert part.phase in (*MORE, StepPhase.BACKWARD, StepPhase.BACKWARD_AND_OPTIMIZER)
            assert part.events[0] == EMPTY_CACHE
    of_each = len(expected) // 2
    assert emptied == {
        -1: 1,
        **{n: of_each if every and n % every == 0 else 0 for n in numbers},
    }
    left = left_after(steps)
    assert all(left[number] == left[1] for number in numbers[1:])
    # Before the first step there are weights, buffers and the sum of losses.
    assert left[-1] == sorted(
        [EMBEDDING, WEIGHT_BYTES, WEIGHT_BYTES, NORM, EMBEDDING, ROTARY_TABLE, 4]
    )
    # Then the batch, a copy of the loss, workspace and state, and the norm of the gradients.
    state = 2 * [EMBEDDING, WEIGHT_BYTES, WEIGHT_BYTES, NORM, EMBEDDING]
    more = [WORKSPACE, 4, *accumulation * [512, 512]]
    more += [] if at_once else [2]
    more += state if name == "adamw_torch" else []
    assert left[1] == sorted([*left[-1], *more])
    before = steps.num_events_before_update()
    assert (
        steps.order()[:before].tolist()
        == [
            event
            for part in steps.parts[: len(expected) + 1]
            for event in part.events.tolist()
            if part.phase != StepPhase.OPTIMIZER
        ]
        or at_once
    )


def test_lomo_gives_each_gradient_up_right_behind_its_copy_in_32_bits() -> None:
    steps = written(dataclasses.replace(FULL, optimizer="lomo"))
    gradients = {n for n, kind in enumerate(steps.categories) if kind == "gradient"}
    updates = [part for part in steps.parts if part.phase == StepPhase.BACKWARD_AND_OPTIMIZER]
    assert len(updates) == 8
    for part in updates:
        events = part.events.tolist()
        given_up = [at for at, event in enumerate(events) if ~event in gradients]
        assert len(given_up) == 5
        for at in given_up:
            before, copy, gradient = events[at - 2], events[at - 1], ~events[at]
            assert copy >= 0
            assert steps.sizes[copy] == 2 * steps.sizes[gradient]
            # The weight's copy, as large, comes behind it.
            assert before < 0 or steps.sizes[before] != steps.sizes[copy]


def test_micro_batches_beyond_64_stand_together() -> None:
    few, many = (
        left_after(written(dataclasses.replace(FULL, gradient_accumulation_steps=number)))[1]
        for number in (64, 100)
    )
    rest = list(many)
    for size in few:
        rest.remove(size)
    # 36 more of ids and as many labels, of a block each.
    assert sum(rest) == 36 * 2 * 512
    assert len(rest) < 36 * 2


def test_a_scaler_has_two_scalars_more() -> None:
    plain, scaled = (
        left_after(written(dataclasses.replace(FULL, precision=precision)))[-1]
        for precision in ("bf16-mixed", "fp16-mixed")
    )
    assert scaled == sorted([*plain, 4, 4])


@pytest.mark.parametrize("accumulation", [1, 2, 40])
def test_a_drawn_step_has_the_replays_peak_and_its_phases_in_order(accumulation: int) -> None:
    steps = written(dataclasses.replace(FULL, gradient_accumulation_steps=accumulation))
    found = steps.replay()
    drawn = timeline_of(steps, found.peak_allocated_event)
    points = list(zip(*drawn.bytes_by_category.values(), strict=True))
    assert sum(points[drawn.peak_point]) == found.peak_allocated_bytes
    assert max(map(sum, points)) == found.peak_allocated_bytes
    phases = [*ONE, *(MORE if accumulation > 1 else ()), StepPhase.OPTIMIZER]
    assert list(drawn.phases) == phases
    starts = list(drawn.phases.values())
    assert starts == sorted(starts)
    assert starts[0] == 0
    # Weights are there all the time; no gradient is as the step begins and ends.
    weights = sum(-(-size // 512) * 512 for size in (EMBEDDING, WEIGHT_BYTES, WEIGHT_BYTES))
    assert min(drawn.bytes_by_category["parameter"]) >= weights
    gradients = drawn.bytes_by_category["gradient"]
    assert gradients[0] == gradients[-1] == 0
    assert max(gradients) > 0
