"""The room that predictions leave: what fits by it, and with which odds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.common.units import GIB
from autotune.space.headroom import (
    MOST_ODDS,
    NO_HEADROOM,
    Headroom,
    odds_of,
    room_bytes,
)

ODDS = st.floats(0.5, MOST_ODDS)
RESERVED = st.integers(0, 200 * GIB)
BATCHING = st.sampled_from(["packed", "padded"])


@given(ODDS, ODDS, RESERVED, RESERVED, BATCHING)
def test_more_memory_and_better_odds_need_no_less_room(
    odds: float, other_odds: float, reserved: int, other: int, batching: str
) -> None:
    low, high = sorted((odds, other_odds))
    small, large = sorted((reserved, other))
    assert room_bytes(low, small, batching) <= room_bytes(high, large, batching)


@given(ODDS, st.integers(GIB, 200 * GIB), st.integers(0, GIB), BATCHING)
def test_the_largest_peak_within_a_budget_fits_with_the_odds_and_a_larger_one_does_not(
    odds: float, budget: int, outside: int, batching: str
) -> None:
    headroom = Headroom(odds=odds)
    reserved = headroom.within(budget, outside, batching) - outside
    assert outside + reserved + headroom.room_bytes(reserved, batching) <= budget
    assert odds_of(budget - outside - reserved, reserved, batching) >= odds - 1e-6
    # Rounding may leave a few bytes.
    more = reserved + 4
    assert outside + more + headroom.room_bytes(more, batching) > budget


def test_the_odds_grow_with_what_is_spare() -> None:
    reserved = 10 * GIB
    spare = [0, GIB // 20, GIB // 10, GIB // 4, GIB // 2, 5 * GIB]
    odds = [odds_of(each, reserved, "packed") for each in spare]
    assert odds == sorted(odds)
    assert odds[0] == 0
    assert odds[-1] == MOST_ODDS
    assert odds_of(GIB // 2, reserved, "padded") < odds_of(GIB // 2, reserved, "packed")


@pytest.mark.parametrize("batching", ["packed", "padded"])
def test_bytes_that_were_asked_for_are_left_whatever_the_odds(batching: str) -> None:
    assert NO_HEADROOM.within(12 * GIB, GIB, batching) == 12 * GIB
    assert Headroom(spare_bytes=GIB).within(12 * GIB, GIB, batching) == 11 * GIB
    assert Headroom(spare_bytes=GIB).room_bytes(9 * GIB, batching) == GIB
