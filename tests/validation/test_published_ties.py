"""Rules of ties on two published runs, worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from autotune.speed.sureness import Part, Parts
from validation.published import ties


@dataclass(frozen=True)
class Run:
    published: float
    parts: Parts


def run(published: float, predicted: float, *, cause: str = "matmul") -> Run:
    return Run(published, {cause: Part(seconds=predicted, spread=0.1)})


def choices(one: Run, other: Run) -> list[ties.Choice]:
    def seconds(run: Run) -> float:
        return sum(part.seconds for part in run.parts.values())

    return ties.choices(
        [one, other],
        lambda *_: "optimizer",
        lambda a, b: (b.published / a.published, seconds(b) / seconds(a)),
        lambda *_: 1.0,
    )


def test_each_pair_is_asked_with_either_as_the_base() -> None:
    # Published: the first is a quarter faster; predicted: twice as fast, which is beyond doubt.
    to_first, to_second = choices(run(0.8, 1.0), run(1.0, 2.0))
    assert to_first.published == pytest.approx(1.25)
    assert to_first.odds > 0.99
    assert to_first.is_changed(0.9)
    assert not to_second.is_changed(0.0)
    assert to_first.regret(0.9) == to_second.regret(0.9) == 0


def test_regret_of_a_change_that_does_not_pay_and_of_one_that_is_not_made() -> None:
    # Predicted 5 % faster in another kind of kernel, published a tenth slower.
    to_first, _ = choices(run(1.1, 1.0), run(1.0, 1.05, cause="memory"))
    assert 0.5 < to_first.odds < 0.75
    assert to_first.regret(0.0) == pytest.approx(0.1)
    assert to_first.regret(0.75) == 0
    # Published a tenth faster: now it is leaving the base that costs.
    to_first, _ = choices(run(1.0, 1.0), run(1.1, 1.05, cause="memory"))
    assert to_first.regret(0.0) == 0
    assert to_first.regret(0.75) == pytest.approx(0.1)


def test_a_gain_within_the_noise_is_no_change() -> None:
    to_first, to_second = choices(run(1.0, 1.0), run(1.1, 1.01))
    assert not to_first.is_changed(0.0)
    assert not to_second.is_changed(0.0)
    table = ties.markdown({"all": [to_first, to_second]}).splitlines()
    assert table[2] == "| any: today's rule | 5.00% | 0 of 2 | 0 |"
