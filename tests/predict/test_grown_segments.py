"""Segments that grow, in a room: sums over a few large blocks."""

from __future__ import annotations

import dataclasses
import random

import pytest

from autotune.common.units import MIB
from autotune.memory.allocator import EMPTY_CACHE, OVERSHOOT_BYTES, PAGE_BYTES
from autotune.memory.replayer import replay
from autotune.predict.expandable_segments import grown
from autotune.predict.steps import StepPart, Steps

X, Y, Z = range(3)
SIZES = [300 * MIB, 300 * MIB, 400 * MIB]
ONCE = [
    # X goes while Y stays: Z fits into no free block of the steps, however often they run.
    StepPart(-1, "set-up", [X, Y, ~X]),
    StepPart(0, "forward", [Z, ~Z]),
    StepPart(1, "forward", [Z, ~Z]),
]


def steps(parts: list[StepPart], sizes: list[int] = SIZES) -> Steps:
    return Steps(sizes=sizes, categories=["activation"] * 3, parts=parts, sure_step=0)


def room(mib: int) -> int:
    return mib * MIB + OVERSHOOT_BYTES


def test_with_room_nothing_is_given_back() -> None:
    found = grown(steps(ONCE), room(1000))
    assert (found.peak_reserved_bytes, found.num_alloc_retries) == (1000 * MIB, 0)


@pytest.mark.parametrize("mib", [700, 999])
def test_what_is_given_back_once_is_no_harm(mib: int) -> None:
    """Y and Z live together, and 700 MiB are enough; by segments of fixed size it is 1,000."""
    found = grown(steps(ONCE), room(mib))
    assert (found.peak_reserved_bytes, found.num_alloc_retries) == (700 * MIB, 1)
    assert found.peak_allocated_bytes == 700 * MIB
    assert replay(SIZES, steps(ONCE).events()).peak_reserved_bytes == 1000 * MIB


def test_what_does_not_fit_lacks_what_its_request_lacked() -> None:
    """The cap is held against 300 and 400 MiB, and what torch may map beyond it comes on top."""
    found = grown(steps(ONCE), room(699))
    assert found.peak_reserved_bytes == room(700)
    assert found.peak_allocated_bytes == 700 * MIB


def test_what_does_not_fit_lacks_what_is_live_at_least() -> None:
    """The first request that fails is of X alone."""
    assert grown(steps(ONCE), room(200)).peak_reserved_bytes == room(700)


@pytest.mark.parametrize("seed", range(20))
def test_its_peak_is_that_of_a_replay_without_a_limit(seed: int) -> None:
    """With sizes of both pools, none among them, and a cache that is emptied in between."""
    chance = random.Random(seed)
    sizes = [chance.choice([0, 1, 700, MIB, MIB + 1, 9 * MIB, 47 * MIB + 5]) for _ in range(60)]
    live: list[int] = []
    events: list[int] = []
    for tensor in range(60):
        events.append(tensor)
        live.append(tensor)
        while live and chance.random() < 0.45:
            events.append(~live.pop(chance.randrange(len(live))))
        if chance.random() < 0.1:
            events.append(EMPTY_CACHE)
    events += [~tensor for tensor in live]
    parts = [StepPart(0, "forward", events)]
    alone = replay(sizes, events, expandable_segments=True)
    found = grown(Steps(sizes=sizes, categories=[], parts=parts, sure_step=0), MIB)
    assert found.failed_event is not None
    assert found.peak_allocated_bytes == alone.peak_allocated_bytes
    assert found.peak_allocated_event == alone.peak_allocated_event


def test_what_is_given_back_in_every_step_does_not_fit() -> None:
    """Z needs the place of X, which needs it back."""
    step = [X, Y, ~X, Z, ~Z, ~Y]
    sizes = [500 * MIB, 300 * MIB, 800 * MIB]
    runs = replay(sizes, step * 30, cap_bytes=1100 * MIB, expandable_segments=True)
    assert (runs.failed_event, runs.num_alloc_retries) == (None, 30)
    found = grown(
        steps([StepPart(0, "forward", step), StepPart(1, "forward", step)], sizes), room(1100)
    )
    assert found.peak_reserved_bytes == room(1100) + PAGE_BYTES


@pytest.mark.parametrize(("sure_step", "last"), [(0, 3), (1, 3), (2, 4), (3, 5)])
@pytest.mark.parametrize("is_steady", [False, True])
def test_steps_run_until_one_is_steady_behind_those_that_make_the_state(
    sure_step: int, last: int, is_steady: bool
) -> None:
    """The first step may lack its state even if it is there from the second on; later steps are alike."""
    sizes = [300 * MIB, 300 * MIB, 400 * MIB, 900 * MIB]
    for large in (last, last + 1):
        parts = [StepPart(number, "forward", [0, ~0]) for number in range(8)]
        if not is_steady:
            parts[last - 1] = StepPart(last - 1, "forward", [2, ~2])
        parts[large] = StepPart(large, "forward", [3, ~3])
        of_four = dataclasses.replace(steps(parts, sizes), sure_step=sure_step)
        found = grown(of_four, room(2000))
        is_run = large == last and not is_steady
        assert found.peak_allocated_bytes == (900 if is_run else 300 if is_steady else 400) * MIB
