"""Records that keep what was made of them."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.common.hashed_once import HashedOnce


@dataclass(frozen=True, eq=False)
class Pair(HashedOnce):
    """A record of two numbers."""

    first: int
    second: int


def test_each_function_gets_what_it_made_and_once_in_a_row() -> None:
    asked: list[str] = []

    def total(pair: Pair) -> int:
        asked.append("total")
        return pair.first + pair.second

    def difference(pair: Pair) -> int:
        asked.append("difference")
        return pair.first - pair.second

    pair = Pair(5, 3)
    found = [pair.derived(make) for make in (total, total, difference, total)]
    assert found == [8, 8, 2, 8]
    assert asked == ["total", "difference", "total"]
