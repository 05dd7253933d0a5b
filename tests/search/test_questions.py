"""The searches for a limit, on made-up memory: quick, against trying every value."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.errors import ConfigError, NothingFitsError
from autotune.search.inverse import questions

BUDGET = 1000


class Table:
    """Stands for a Pricer. `lines`: (bytes without a value, bytes of each) of each configuration."""

    host_memory_bytes = None

    def __init__(self, lines: list[tuple[int, int]], *, room: int = BUDGET) -> None:
        self.lines, self.room = lines, room
        self.num_tried = 0

    def peak_bytes(self, case: Any, config: int) -> int:
        base, slope = self.lines[config]
        return base + slope * int(case.value)

    def room_for(self, _: Any, __: int) -> int:
        return self.room

    def fitting(self, case: Any) -> Any:
        """The first that fits, whatever it needs."""
        self.num_tried += 1
        for config in range(len(self.lines)):
            peak = self.peak_bytes(case, config)
            if peak <= self.room:
                return SimpleNamespace(config=config, peak_device_bytes=peak)
        return None

    def smallest(self, case: Any) -> tuple[Any, int]:
        needed = min(self.peak_bytes(case, config) for config in range(len(self.lines)))
        return f"the smallest of {case.value}", needed


def at(value: Any) -> Any:
    return SimpleNamespace(value=value, budget_bytes=BUDGET)


def fail(case: Any, _: Any) -> NothingFitsError:
    return NothingFitsError(f"not even {case.value}")


@pytest.fixture(autouse=True, scope="module")
def _errors() -> Any:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(questions, "_nothing_fits", fail)
        yield


@given(
    lines=st.lists(st.tuples(st.integers(0, 1200), st.integers(1, 90)), min_size=1, max_size=4),
    low=st.integers(1, 3),
    num=st.integers(1, 60),
)
def test_the_largest_is_that_of_any_configuration(
    lines: list[tuple[int, int]], low: int, num: int
) -> None:
    table, high = Table(lines), low + num - 1
    fitting = [n for n in range(low, high + 1) if table.fitting(at(n)) is not None]
    if not fitting:
        with pytest.raises(NothingFitsError, match=f"not even {low}"):
            questions._largest(at, high, "no more", table, low=low)  # type: ignore[arg-type]
        return
    table.num_tried = 0
    found = questions._largest(at, high, "no more", table, low=low)  # type: ignore[arg-type]
    assert found.case.value == fitting[-1]
    # Each configuration is followed to its own end, and all are tried behind that.
    assert table.num_tried <= 1 + len(lines)
    if fitting[-1] == high:
        assert (found.limit, found.beyond) == ("no more", None)
        return
    assert found.limit == "memory"
    assert found.beyond is not None
    assert found.beyond.value == fitting[-1] + 1
    assert found.beyond.needed_bytes == table.smallest(at(fitting[-1] + 1))[1] > BUDGET
    assert found.beyond.budget_bytes == BUDGET


class Cases:
    """Stands for a Pricer. A case's value says what becomes of it, and which it is: `fits 3`."""

    host_memory_bytes = None

    def __init__(self) -> None:
        self.priced: list[str] = []

    def is_possible(self, case: Any) -> bool:
        return not case.value.startswith("hopeless")

    def fitting(self, case: Any) -> Any:
        self.priced.append(case.value)
        return case if case.value.startswith("fits") else None

    def refusal(self, case: Any) -> Any:
        return SimpleNamespace(why="odd") if case.value.startswith("refused") else None

    def smallest(self, case: Any) -> tuple[Any, int]:
        if case.value.startswith("unpriced"):
            raise ConfigError("No", why="no trace")
        return "an estimate", 7


KINDS = ("fits", "large", "hopeless", "refused", "unpriced")


@given(kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=8))
def test_the_first_that_fits_and_the_last_before_it_that_does_not(kinds: list[str]) -> None:
    cases = [at(f"{kind} {number}") for number, kind in enumerate(kinds)]
    pricer = Cases()
    first = kinds.index("fits") if "fits" in kinds else len(kinds)
    before = [case.value for case in cases[:first] if not case.value.startswith("hopeless")]
    large = [value for value in before if value.startswith("large")]
    too_large = [value for value in before if not value.startswith("refused")]
    if "fits" not in kinds:
        last = too_large[-1] if too_large else cases[-1].value
        with pytest.raises(NothingFitsError, match=f"not even {last}"):
            questions._first(cases, "nothing larger", pricer)  # type: ignore[arg-type]
        return
    found = questions._first(cases, "nothing larger", pricer)  # type: ignore[arg-type]
    assert found.case is cases[first]
    assert pricer.priced == [*before, cases[first].value]
    assert (None if found.beyond is None else found.beyond.value) == (large[-1] if large else None)
    assert found.limit == ("memory" if large else "nothing larger")
    # Said to be left out: what is refused, and what would be next but cannot be priced.
    behind = too_large[too_large.index(large[-1]) :] if large else too_large
    assert found.left_out == {
        **{value: "odd" for value in before if value.startswith("refused")},
        **{value: "no trace" for value in behind if value.startswith("unpriced")},
    }


def test_positions_end_where_the_model_says() -> None:
    def model(learned: int | None, stated: Any) -> Any:
        config = {} if stated is None else {"max_position_embeddings": stated}
        return SimpleNamespace(max_sequence_length=learned, text_config=config)

    most = questions.MAX_SEQUENCE_LENGTH
    for learned, stated, found, why in (
        (512, 99, 512, "learned positions"),
        (None, 1, 1, "the model's configuration"),
        (None, 99, 99, "the model's configuration"),
        (None, 0, most, "no longer sequence"),
        (None, "many", most, "no longer sequence"),
        (None, None, most, "no longer sequence"),
    ):
        number, said = questions.positions(model(learned, stated))
        assert number == found
        assert why in said
