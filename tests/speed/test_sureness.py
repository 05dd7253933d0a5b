"""Spreads of predicted times, and the odds that one is the shortest."""

import math

import pytest

from autotune.speed.origin import RatesFrom
from autotune.speed.sureness import (
    STEP_SPREAD,
    Z_OF_80_PERCENT,
    Odds,
    Part,
    TimedWork,
    added,
    odds_of,
    slow_spread_of,
    spread_of,
    step_spread_of,
    within,
)
from autotune.speed.sureness import part as of_one


def part(seconds: float, spread: float) -> Part:
    return Part(seconds=seconds, spread=spread)


def test_causes_are_off_independently() -> None:
    parts = {"matmul": part(3, 0.1), "attention": part(4, 0.1)}
    assert spread_of(parts) == pytest.approx(0.1 * 5 / 7)
    assert spread_of({"matmul": part(0, 0.1)}) == 0


def test_one_cause_is_off_by_one_factor() -> None:
    twice = added({"matmul": part(1, 0.1)}, {"matmul": part(3, 0.3), "host": part(1, 0)})
    assert twice["matmul"] == part(4, pytest.approx(1 / 4 * 0.1 + 3 / 4 * 0.3))
    assert twice["host"].times(3) == part(3, 0)


def test_seconds_are_counted_by_their_evidence() -> None:
    this, like = RatesFrom.THIS_CARD, RatesFrom.CARDS_LIKE_IT
    both = added(
        {"a": of_one(1, 0.1, this)}, {"a": of_one(3, 0.1, like)}, {"a": of_one(2, 0, this)}
    )
    assert both["a"].times(2).seconds_from == {this: 6, like: 6}


def test_the_interval_holds_80_percent() -> None:
    low, high = within(10.0, 0.2)
    assert low * high == pytest.approx(100)
    inside = math.erf(math.log(high / 10) / 0.2 / math.sqrt(2))
    assert inside == pytest.approx(0.8, abs=1e-4)


def odds(*times: TimedWork, tolerance: float = 0) -> Odds:
    return odds_of(times[0], times[1:], tolerance=tolerance)


def of(cause: str, seconds: float, spread: float = 0.2, work: float = 1) -> TimedWork:
    return TimedWork(parts={cause: part(seconds, spread)}, work=work)


def test_times_of_one_kind_are_told_apart_by_less_than_times_of_two() -> None:
    """All times are 5 % apart and known to a fifth."""
    alike = odds(of("matmul", 1.00), of("matmul", 1.05))
    unlike = odds(of("matmul", 1.00), of("attention", 1.05))
    assert 0.5 < unlike.of_first < alike.of_first < 0.8
    assert unlike.of_first + unlike.of_rivals[0] == pytest.approx(1)


def test_a_part_that_times_have_in_common_is_off_alike() -> None:
    """As of two optimizers: the products, nearly all of the time, are the same."""
    first, rival, nearly = (
        TimedWork(parts={"matmul": part(matmul, 0.2), "memory": part(memory, 0.2)})
        for matmul, memory in ((9, 0.10), (9, 0.11), (8.995, 0.11))
    )
    assert odds(first, rival, tolerance=0.02).of_first == 1
    assert odds(first, nearly, tolerance=0.02).of_first == 1
    assert 0.5 < odds(first, rival).of_first < 0.9


def test_a_long_time_is_no_rival() -> None:
    assert odds(of("matmul", 1), of("matmul", 3)).of_first == 1
    # Three times the work in that time: the same speed.
    even = odds(of("matmul", 1), of("attention", 3, work=3))
    assert even.of_first == pytest.approx(0.5, abs=0.1)


def test_a_time_that_is_certain_loses_by_any_difference_beyond_the_tolerance() -> None:
    first, second = of("a", 1.001, spread=0), of("a", 1, spread=0)
    beaten = odds(first, second)
    assert (beaten.of_first, beaten.of_rivals.tolist()) == (0, [1])
    assert odds(first, second, tolerance=0.02).of_first == 1


def test_rivals_that_are_alike_count_once() -> None:
    rival = of("attention", 1)
    alone = odds(of("matmul", 1), rival)
    many = odds(of("matmul", 1), rival, rival, rival, of("matmul", 1))
    assert many.of_first == alone.of_first
    assert many.of_rivals.tolist() == [alone.of_rivals[0], 0, 0, 0]


def test_a_slow_host_widens_the_interval_upwards() -> None:
    parts = {"matmul": part(1, 0.1), "host": Part(seconds=0, spread=0.4, slow_seconds=0.5)}
    # The GPU hides the host: what it takes today says nothing of how slow it may be.
    assert spread_of(parts) == pytest.approx(0.1)
    assert step_spread_of(parts) == pytest.approx(math.hypot(0.1, STEP_SPREAD))
    known = math.hypot(0.1, STEP_SPREAD)
    assert slow_spread_of(parts) == pytest.approx(
        math.hypot(known, math.log(1.5) / Z_OF_80_PERCENT)
    )
    assert slow_spread_of({"matmul": part(1, 0.1)}) == step_spread_of({"matmul": part(1, 0.1)})
    low, high = within(1.0, 0.1, 0.3)
    assert (math.log(low), math.log(high)) == pytest.approx(
        (-0.1 * Z_OF_80_PERCENT, 0.3 * Z_OF_80_PERCENT)
    )


def test_what_a_slow_host_adds_is_added_up() -> None:
    host = Part(seconds=1, spread=0.4, slow_seconds=2)
    assert added({"host": host}, {"host": host.times(2)})["host"].slow_seconds == 6


def test_a_time_that_a_slow_host_makes_longer_is_less_sure_to_be_the_shortest() -> None:
    hidden = TimedWork(
        parts={
            "matmul": part(1, 0.05),
            "host": Part(seconds=0, spread=0.4, slow_seconds=1),
        }
    )
    # A quarter slower, and nothing that a slow host changes: the faster where the host is slow.
    steady = of("matmul", 1.25, spread=0.05)
    found = odds(hidden, steady)
    assert found.of_rivals[0] == pytest.approx(0.37, abs=0.05)  # off > 0.25 x 1.28, of a normal
    assert odds(of("matmul", 1, spread=0.05), steady).of_first == 1
