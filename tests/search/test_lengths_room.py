"""A search is made again where the answer's steps run out of memory with samples of varied lengths."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from autotune.errors import NothingFitsError
from autotune.search import lengths_room
from autotune.search.prediction import Prediction
from autotune.space.headroom import VARIED_SHARE


@dataclass
class OneAnswer:
    elapsed_seconds: float = 0.0


@dataclass
class Predicted:
    """A prediction whose steps need that share besides what they reserve at full length."""

    needs: float
    has: float
    answer: OneAnswer = field(default_factory=OneAnswer)

    def goes_on(self) -> bool:
        return self.needs <= self.has

    def goes_on_with(self, share: float) -> bool:
        return self.needs <= share


def answered(needs: dict[float, float]) -> tuple[Any, list[float], list[str]]:
    """The answer, the shares that were searched with, and the notes. `needs`: of the answer, by share."""
    asked, notes = list[float](), list[str]()

    def search(share: float) -> Prediction:
        asked.append(share)
        if share not in needs:
            raise NothingFitsError("Nothing fits")
        return cast("Prediction", Predicted(needs[share], share))

    found = lengths_room.with_room(search, notes.append)
    return found, asked, notes


def test_what_goes_on_is_the_answer() -> None:
    found, asked, notes = answered({VARIED_SHARE: 0.05})
    assert (found.has, asked, notes) == (VARIED_SHARE, [VARIED_SHARE], [])


def test_more_room_is_kept_until_the_answer_goes_on() -> None:
    found, asked, notes = answered({VARIED_SHARE: 0.18, 0.2: 0.28, 0.3: 0.11})
    assert (found.has, asked) == (0.3, [VARIED_SHARE, 0.2, 0.3])
    (note,) = notes
    assert "30% of what is reserved is kept free for that, not the usual 10%" in note
    assert found.answer.elapsed_seconds > 0


@pytest.mark.parametrize("needs", [0.18, 9.0])
def test_where_nothing_leaves_it_the_answer_says_so(needs: float) -> None:
    found, _, (note,) = answered({VARIED_SHARE: needs})
    assert found.needs == needs
    assert "the answer may run out of memory" in note
