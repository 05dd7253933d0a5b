"""Drift and noise: worked examples, and the target over simulated nights with recorded noise."""

from __future__ import annotations

import math
import random

import pytest
from nights_of import night

from autotune.nightly import drift
from autotune.nightly.drift import IMPROVEMENT, REGRESSION, SUSPECT, UNCHANGED, Level, Noise
from autotune.nightly.history import levels
from validation import nights as simulation

QUIET = Noise(process_sd=0.005, night_sd=0.0)
STEADY = ((1000.0, 1005.0, 995.0),) * 4


def around(speed: float) -> tuple[float, ...]:
    return (speed, speed * 1.005, speed * 0.995)


def test_one_night_never_decides_and_two_alike_do() -> None:
    first = drift.judge(around(950.0), Level(baseline=STEADY), prior=QUIET)
    assert first.kind == SUSPECT
    assert first.change == pytest.approx(-0.05, abs=0.001)
    second = drift.judge(
        around(950.0), Level(baseline=STEADY, suspects=(around(950.0),)), prior=QUIET
    )
    assert (second.kind, second.num_nights) == (REGRESSION, 2)
    assert second.low < -0.05 < second.high < 0


def test_a_suspect_that_comes_back_was_a_bad_night() -> None:
    back = drift.judge(
        around(1001.0), Level(baseline=STEADY, suspects=(around(930.0),)), prior=QUIET
    )
    assert back.kind == UNCHANGED


def test_two_suspects_of_opposite_signs_are_no_change() -> None:
    other = drift.judge(
        around(1050.0), Level(baseline=STEADY, suspects=(around(950.0),)), prior=QUIET
    )
    assert other.kind == SUSPECT


def test_an_improvement_is_called_like_a_regression() -> None:
    faster = Level(baseline=STEADY, suspects=(around(1060.0),))
    assert drift.judge(around(1060.0), faster, prior=QUIET).kind == IMPROVEMENT


def test_what_is_sure_but_small_is_of_no_interest() -> None:
    sharp = Noise(process_sd=1e-5, night_sd=0.0)
    exact = ((1000.0, 1000.0),) * 10
    level = Level(baseline=exact, suspects=((995.0, 995.0),))
    assert drift.judge((995.0, 995.0), level, prior=sharp).kind == UNCHANGED


def test_the_standard_error_is_the_formula_of_the_docstring() -> None:
    """n = 1 night of 3 processes against N = 4 of 3, with 0.5 % between nights and 1 % between processes."""
    se = math.sqrt(0.005**2 * (1 + 1 / 4) + 0.01**2 * (1 / 3 + 1 / 12))
    same = ((1000.0, 1000.0, 1000.0),) * 4
    # What is measured has no spread at all, so that the prior, of weight 4, is diluted: of processes by
    # 5 nights of 2, of nights by 3, whose excess is -0.01^2 / 3 each.
    prior = Noise(
        process_sd=math.sqrt(0.01**2 * (4 + 10) / 4),
        night_sd=math.sqrt((0.005**2 * (4 + 3) + 3 * 0.01**2 / 3) / 4),
    )
    verdict = drift.judge((1000.0, 1000.0, 1000.0), Level(baseline=same), prior=prior)
    assert verdict.change == pytest.approx(0.0, abs=1e-12)
    assert math.log1p(verdict.high) == pytest.approx(4.0 * se)
    assert math.log1p(verdict.low) == pytest.approx(-4.0 * se)


# No spread in what is measured: the standard errors are those of the docstring's formula, with 0.5 %
# between nights and 1 % between processes, diluted by what is measured as above.
FLAT = ((1000.0, 1000.0, 1000.0),) * 4
FLAT_PRIOR = Noise(
    process_sd=math.sqrt(0.01**2 * (4 + 10) / 4),
    night_sd=math.sqrt((0.005**2 * (4 + 3) + 3 * 0.01**2 / 3) / 4),
)
SE_OF_ONE = math.sqrt(0.005**2 * (1 + 1 / 4) + 0.01**2 * (1 / 3 + 1 / 12))
SE_OF_TWO = math.sqrt(0.005**2 * (1 / 2 + 1 / 4) + 0.01**2 * (1 / 6 + 1 / 12))


def changed_by(log_change: float) -> tuple[float, ...]:
    return (1000.0 * math.exp(log_change),) * 3


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize(("num_se", "kind"), [(2.4, UNCHANGED), (2.6, SUSPECT), (40.0, SUSPECT)])
def test_a_night_is_a_suspect_from_two_and_a_half_standard_errors_on(
    num_se: float, kind: str, sign: int
) -> None:
    """studies/nights has the thresholds."""
    verdict = drift.judge(
        changed_by(sign * num_se * SE_OF_ONE), Level(baseline=FLAT), prior=FLAT_PRIOR
    )
    assert verdict.kind == kind


@pytest.mark.parametrize(
    ("num_se", "kind"), [(3.9, SUSPECT), (4.1, REGRESSION), (-4.1, IMPROVEMENT)]
)
def test_two_nights_are_called_from_four_standard_errors_on(num_se: float, kind: str) -> None:
    tonight = changed_by(-num_se * SE_OF_TWO)
    level = Level(baseline=FLAT, suspects=(tonight,))
    assert drift.judge(tonight, level, prior=FLAT_PRIOR).kind == kind


@pytest.mark.parametrize(("before", "tonight"), [(-0.03, 0.30), (0.03, -0.30)])
def test_a_suspect_of_the_other_sign_confirms_nothing_however_large_the_change(
    before: float, tonight: float
) -> None:
    """Both together are far beyond four standard errors, and still the first night said the opposite."""
    level = Level(baseline=FLAT, suspects=(changed_by(before),))
    verdict = drift.judge(changed_by(tonight), level, prior=FLAT_PRIOR)
    assert (verdict.kind, verdict.num_nights) == (SUSPECT, 1)


@pytest.mark.parametrize(("log_change", "kind"), [(0.0095, UNCHANGED), (0.0105, SUSPECT)])
def test_a_sure_change_is_of_interest_from_one_percent_on(log_change: float, kind: str) -> None:
    sharp = Noise(process_sd=1e-5, night_sd=0.0)
    verdict = drift.judge(changed_by(-log_change), Level(baseline=FLAT), prior=sharp)
    assert verdict.kind == kind


@pytest.mark.parametrize(
    ("num_se", "kind"), [(3.4, UNCHANGED), (3.6, IMPROVEMENT), (-3.6, REGRESSION)]
)
def test_a_challenger_takes_the_place_from_three_and_a_half_standard_errors_on(
    num_se: float, kind: str
) -> None:
    """Three processes of each on one night, which both share: that it is another night counts nothing."""
    noise = Noise(process_sd=0.01, night_sd=0.5)
    se = 0.01 * math.sqrt(1 / 3 + 1 / 3)
    assert drift.gain(changed_by(num_se * se), changed_by(0.0), noise).kind == kind


def test_both_deviations_are_found_in_what_they_made() -> None:
    rng = random.Random(7)
    history = [
        [
            [1000 * math.exp(shift + rng.gauss(0, 0.02)) for _ in range(4)]
            for shift in (rng.gauss(0, 0.01) for _ in range(200))
        ]
    ]
    noise = drift.noise_of(history)
    assert noise.process_sd == pytest.approx(0.02, rel=0.1)
    assert noise.night_sd == pytest.approx(0.01, rel=0.2)


def test_one_bad_night_is_no_reason_to_expect_more() -> None:
    def with_one(log_change: float) -> float:
        steady = [[1000.0, 1010.0, 990.0] for _ in range(6)]
        bad = [speed * math.exp(log_change) for speed in steady[0]]
        return drift.noise_of([[*steady, bad]], Noise(process_sd=0.01, night_sd=0.005)).night_sd

    assert with_one(-0.5) == pytest.approx(with_one(-0.05))
    # Within three standard errors each night counts as it is.
    assert with_one(-0.01) < with_one(-0.015) < with_one(-0.02) < with_one(-0.05)


def test_how_many_processes_follows_from_the_spread_alone() -> None:
    """Twice the speed, or half: as many. A wider spread: more, until the most."""
    history = [[[1000.0, 1003.0, 998.0]] * 5]

    def num(speeds: list[float]) -> int:
        taken: list[float] = []
        while drift.wants_more(taken, history, at_least=3, at_most=12):
            taken.append(speeds[len(taken)])
        return len(taken)

    narrow = [1000.0, 1002.0, 999.0, 1001.0] * 4
    wide = [1000.0, 1150.0, 860.0, 1080.0] * 4
    assert num(narrow) == num([s * 0.5 for s in narrow]) == num([s * 2 for s in narrow]) == 3
    assert num(wide) == 12


def test_the_first_night_may_take_twice_as_many() -> None:
    wide = [1000.0, 1150.0, 860.0, 1080.0] * 6
    assert drift.wants_more(wide[:23], [], at_least=3, at_most=12)
    assert not drift.wants_more(wide[:24], [], at_least=3, at_most=12)


def test_a_challenger_is_compared_on_the_same_night() -> None:
    old = (1000.0, 1005.0, 995.0)
    assert drift.gain((1030.0, 1035.0, 1025.0), old, QUIET).kind == IMPROVEMENT
    assert drift.gain((1008.0, 1004.0, 1006.0), old, QUIET).kind == UNCHANGED
    assert (
        drift.gain((1030.0, 1035.0, 1025.0), old, Noise(process_sd=0.03, night_sd=0)).kind
        == UNCHANGED
    )


def test_the_digest_can_say_what_would_be_noticed() -> None:
    """6 standard errors: at 4 it is called, and 2 more make that likely."""
    verdict = drift.judge(around(1000.0), Level(baseline=STEADY), prior=QUIET)
    reach = (math.log1p(verdict.high) - math.log1p(verdict.low)) / 2
    assert math.log1p(verdict.detectable) == pytest.approx(1.5 * reach)


def test_levels_start_anew_with_each_change() -> None:
    nights = [
        night(9, (10.0, 11.0)),
        night(8, (10.5, 10.6), kind=UNCHANGED),
        night(7, (20.0, 21.0), kind=SUSPECT),
        night(6, (10.2, 10.3), kind=UNCHANGED),
        night(5, (8.0, 8.1), kind=SUSPECT),
        night(4, (8.2, 8.3), kind=REGRESSION, num_nights=2),
        night(3, (8.1, 8.2), kind=UNCHANGED),
        night(2, (9.9, 9.8), kind=SUSPECT),
    ]
    level, earlier = levels(nights)
    assert level.baseline == ((8.0, 8.1), (8.2, 8.3), (8.1, 8.2))
    assert level.suspects == ((9.9, 9.8),)
    assert earlier == [[(10.0, 11.0), (10.5, 10.6), (10.2, 10.3), (20.0, 21.0)]]


def test_thirty_nights_with_recorded_noise() -> None:
    """Every regression of 5 % within two nights, one false alarm at most: studies/nights has the rates."""
    drawn_from = simulation.recorded()
    assert len(drawn_from.residuals) == 36
    runs = [simulation.simulate(simulation.SCENARIOS[0], drawn_from, seed) for seed in range(4)]
    assert [run.num_found for run in runs] == [simulation.NUM_REGRESSIONS] * 4
    assert max(run.num_false for run in runs) <= 1
    # Those that came with a change of a library are said to.
    assert sum(run.num_attributed for run in runs) == sum(run.num_with_change for run in runs) > 0
