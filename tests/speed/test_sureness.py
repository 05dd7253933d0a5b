"""Spreads of predicted times, and the odds that one is the shortest."""

import math

import pytest

from autotune.speed.sureness import Part, TimedWork, added, odds_of_shortest, spread_of, within


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


def test_the_interval_holds_80_percent() -> None:
    low, high = within(10.0, 0.2)
    assert low * high == pytest.approx(100)
    inside = math.erf(math.log(high / 10) / 0.2 / math.sqrt(2))
    assert inside == pytest.approx(0.8, abs=1e-4)


def odds(*times: TimedWork) -> list[float]:
    return odds_of_shortest(times).tolist()


def test_times_of_one_kind_are_told_apart_by_less_than_times_of_two() -> None:
    """All times are 5 % apart and known to a fifth."""
    alike = odds(
        TimedWork(parts={"matmul": part(1.00, 0.2)}), TimedWork(parts={"matmul": part(1.05, 0.2)})
    )
    unlike = odds(
        TimedWork(parts={"matmul": part(1.00, 0.2)}),
        TimedWork(parts={"attention": part(1.05, 0.2)}),
    )
    assert sum(alike) == sum(unlike) == 1
    assert 0.5 < unlike[0] < alike[0] < 0.8


def test_a_long_time_is_no_rival() -> None:
    parts = {"matmul": part(1, 0.1)}
    assert odds(TimedWork(parts=parts), TimedWork(parts={"matmul": part(3, 0.1)})) == [1, 0]
    # Twice the work in the longer time: the same speed.
    even = odds(TimedWork(parts=parts), TimedWork(parts={"matmul": part(2, 0.1)}, work=2))
    assert even[0] == pytest.approx(0.5, abs=0.1)


def test_a_time_that_is_certain_wins_by_any_difference() -> None:
    assert odds(TimedWork(parts={"a": part(1.001, 0)}), TimedWork(parts={"a": part(1, 0)})) == [
        0,
        1,
    ]
