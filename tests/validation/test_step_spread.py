"""Intervals of predicted steps hold for sources that their spread was not chosen with."""

from __future__ import annotations

import statistics

import pytest

from autotune.speed.sureness import STEP_SPREAD
from validation import step_spread
from validation.step_spread import Run


def test_80_percent_of_held_out_runs_lie_within() -> None:
    sources = step_spread.by_source(step_spread.runs())
    choosing = {name: its for name, its in sources.items() if its[0].chooses}
    assert len(choosing) >= 45
    assert step_spread.least_spread(choosing) == STEP_SPREAD
    shares = step_spread.held_out(choosing)
    assert statistics.mean(shares.values()) == pytest.approx(0.8, abs=0.05)
    within = sum(shares[name] * len(members) for name, members in choosing.items())
    assert within / sum(map(len, choosing.values())) >= 0.78


def test_probes_of_a_card_that_chose_nothing_lie_within() -> None:
    num_within, num_probes = step_spread.probes_within()
    assert num_within / num_probes >= 0.8


def test_each_source_counts_alike() -> None:
    def runs(source: str, ratio: float, count: int) -> list[Run]:
        run = Run(source=source, chooses=True, ratio=ratio, parts_spread=0, slow_share=0)
        return count * [run]

    # Four of five sources have to lie within, though four fifths of the runs are one source's.
    found = [run for name in "abcd" for run in runs(name, 0.9, 3)] + runs("e", 0.5, 48)
    spread = step_spread.least_spread(step_spread.by_source(found))
    assert spread == pytest.approx(0.085)  # ln(1 / 0.9) / 1.28
    assert step_spread.held_out(step_spread.by_source(found)) == {
        **dict.fromkeys("abcd", 1.0),
        "e": 0.0,
    }
    assert "f" not in step_spread.by_source(runs("f", 1, 2))
