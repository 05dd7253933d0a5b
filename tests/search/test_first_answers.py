"""First answers: what is told while training steps are still traced, and how much time that takes."""

from __future__ import annotations

import dataclasses

import answers
import pytest

from autotune.records.estimate import Estimate
from autotune.search.first_answers import MOST_SHARE, PAUSE_SECONDS, FirstAnswers

GOOD = answers.estimate()
BETTER = dataclasses.replace(GOOD, config=answers.ADAPTER)


class Search:
    """Stands in for a search: the seconds that have passed, and what a look finds and takes."""

    def __init__(self, *, look_seconds: float = 0.0) -> None:
        self.seconds = 0.0
        self.look_seconds = look_seconds
        self.found: Estimate | None = None
        self.num_looks = 0
        self.told: list[Estimate] = []
        self.first = FirstAnswers(self.best, self.told.append, clock=lambda: self.seconds)

    def best(self) -> Estimate | None:
        self.num_looks += 1
        self.seconds += self.look_seconds
        return self.found

    def wait(self, seconds: float) -> None:
        self.seconds += seconds
        self.first.look()


def test_what_is_another_one_than_before_is_told() -> None:
    search = Search()
    for search.found in (None, GOOD, GOOD, BETTER, GOOD):
        search.wait(PAUSE_SECONDS)
    assert search.told == [GOOD, BETTER, GOOD]


def test_traces_that_come_at_once_are_not_looked_at() -> None:
    search = Search()
    for _ in range(60):
        search.wait(PAUSE_SECONDS / 100)
    assert search.num_looks == 0


@pytest.mark.parametrize("look_seconds", [0.01, 1.0, 10.0])
def test_looks_take_their_share_of_the_time_at_most(look_seconds: float) -> None:
    search = Search(look_seconds=look_seconds)
    while search.seconds < 100 * max(look_seconds, PAUSE_SECONDS):
        search.wait(0.1)
    assert search.num_looks >= 10
    assert search.num_looks * look_seconds <= MOST_SHARE * search.seconds + look_seconds
    # And as often as that, but for a pause.
    most = search.seconds / max(look_seconds / MOST_SHARE, PAUSE_SECONDS + look_seconds)
    assert search.num_looks == pytest.approx(most, abs=2 + 0.15 * most)
