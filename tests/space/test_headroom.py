"""The room that predictions leave: what fits by it, and with which odds."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class Run:
    batching: str = "packed"
    quantization: str = "none"
    is_compiled: bool = False


RUNS = [
    Run(batching, kind, is_compiled)
    for batching in ("packed", "padded")
    for kind in ("none", "nf4")
    for is_compiled in (False, True)
]
RUN = st.sampled_from(RUNS)


@given(ODDS, ODDS, RESERVED, RESERVED, RUN)
def test_more_memory_and_better_odds_need_no_less_room(
    odds: float, other_odds: float, reserved: int, other: int, run: Run
) -> None:
    low, high = sorted((odds, other_odds))
    small, large = sorted((reserved, other))
    assert room_bytes(low, small, run) <= room_bytes(high, large, run)


@given(ODDS, st.integers(GIB, 200 * GIB), st.integers(0, GIB), RUN)
def test_the_largest_peak_within_a_budget_fits_with_the_odds_and_a_larger_one_does_not(
    odds: float, budget: int, outside: int, run: Run
) -> None:
    headroom = Headroom(odds=odds)
    reserved = headroom.within(budget, outside, run) - outside
    assert outside + reserved + headroom.room_bytes(reserved, run) <= budget
    assert odds_of(budget - outside - reserved, reserved, run) >= odds - 1e-6
    # Rounding may leave a few bytes.
    more = reserved + 4
    assert outside + more + headroom.room_bytes(more, run) > budget


def test_the_odds_grow_with_what_is_spare() -> None:
    reserved = 10 * GIB
    spare = [0, GIB // 20, GIB // 10, GIB // 4, GIB // 2, 5 * GIB]
    odds = [odds_of(each, reserved, Run()) for each in spare]
    assert odds == sorted(odds)
    assert odds[0] == 0
    assert odds[-1] == MOST_ODDS
    assert odds_of(GIB // 2, reserved, Run(batching="padded")) < odds_of(GIB // 2, reserved, Run())


@pytest.mark.parametrize("run", RUNS)
def test_bytes_that_were_asked_for_are_left_whatever_the_odds(run: Run) -> None:
    assert NO_HEADROOM.within(12 * GIB, GIB, run) == 12 * GIB
    assert Headroom(spare_bytes=GIB).within(12 * GIB, GIB, run) == 11 * GIB
    assert Headroom(spare_bytes=GIB).room_bytes(9 * GIB, run) == GIB


@given(ODDS, RESERVED)
def test_weights_of_4_bits_need_more_room_and_others_do_not(odds: float, reserved: int) -> None:
    plain = room_bytes(odds, reserved, Run())
    assert room_bytes(odds, reserved, Run(quantization="int8")) == plain
    for name in ("nf4", "nf4-double", "fp4"):
        assert room_bytes(odds, reserved, Run(quantization=name)) >= plain
    if odds >= 0.99 and reserved >= GIB:
        assert room_bytes(odds, reserved, Run(quantization="nf4")) > plain + 0.05 * reserved


@pytest.mark.parametrize(
    ("run", "share"),
    [
        # 78 % of the runs reserved more, 0.47 % in the mean: 99 % less than 0.0047 x ln(0.78 / 0.01).
        (Run(), 0.02048),
        # 70 % and 1.85 %: 0.0185 x ln(70).
        (Run(quantization="nf4"), 0.07860),
        # A tenth more for lengths that vary; a tenth for what is compiled.
        (Run(batching="padded"), 0.12048),
        (Run(is_compiled=True), 0.12048),
        (Run(quantization="fp4", batching="grouped", is_compiled=True), 0.27860),
    ],
)
def test_the_room_for_99_percent_by_hand(run: Run, share: float) -> None:
    """Beside it 2.326 standard deviations of 34 MiB for the context."""
    context = 2.32635 * 34 * 2**20
    assert room_bytes(0.99, 100 * GIB, run) == pytest.approx(share * 100 * GIB + context, rel=1e-3)
    assert room_bytes(0.99, 0, run) == pytest.approx(context, rel=1e-4)
    assert room_bytes(0.5, 0, run) == 0
