"""Parts of optimizer steps, from marks written by hand."""

from __future__ import annotations

import pytest

from autotune.worker.probe.steps import (
    CpuClock,
    Marks,
    TimedStep,
    spread,
    step_seconds,
    summarize,
    whole_step_seconds,
)

# fetch 2 for two batches | 10 | gap 1 | 12 | optimizer 5
TWO = Marks(0.0, [(2.0, 12.0), (13.0, 25.0)], 30.0)
ONE = Marks(0.0, [(1.0, 11.0)], 16.0)


def steps(*totals: float) -> list[TimedStep]:
    return [
        TimedStep(micro_step_seconds=t - 1, optimizer_step_seconds=1.0, total_seconds=t)
        for t in totals
    ]


def test_parts_add_up_to_what_was_seen() -> None:
    for marks, accumulation in ((ONE, 1), (TWO, 2)):
        assert step_seconds(CpuClock(), marks, accumulation).total_seconds == marks.ended
    assert step_seconds(CpuClock(), ONE, 1).optimizer_step_seconds == 5.0


@pytest.mark.parametrize("accumulation", [3, 8, 64])
def test_further_micro_steps_cost_what_the_second_does(accumulation: int) -> None:
    second = 1.0 + 1.0 + 12.0  # fetch, gap, forward and backward
    seen = step_seconds(CpuClock(), TWO, accumulation)
    assert seen.total_seconds == pytest.approx(30.0 + (accumulation - 2) * second)
    assert seen.optimizer_step_seconds == 5.0
    total = accumulation * seen.micro_step_seconds + seen.optimizer_step_seconds
    assert total == pytest.approx(seen.total_seconds)


def test_a_whole_step_is_what_it_was() -> None:
    three = Marks(0.0, [(2.0, 12.0), (13.0, 25.0), (25.0, 27.0)], 30.0)
    seen = whole_step_seconds(CpuClock(), three)
    assert (seen.micro_step_seconds, seen.optimizer_step_seconds) == (9.0, 3.0)
    assert seen.total_seconds == 30.0


def test_medians_ignore_one_slow_step() -> None:
    timings = summarize(steps(2.0, 2.0, 50.0))
    assert (timings.micro_step_seconds, timings.num_steps) == (1.0, 3)


def test_spread_is_the_relative_standard_error() -> None:
    # squares 4 x 4 over n - 1 = 3; mean 10; four steps
    assert spread(steps(8, 8, 12, 12)) == pytest.approx(4 / 3**0.5 / 10 / 2)
    assert spread(steps(3.0, 3.0)) == 0.0
    assert spread(steps(3.0)) is None
