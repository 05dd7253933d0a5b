"""Dataclasses from JSON: what is not of its type is refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from autotune.common.json_records import record


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    name: str
    size_bytes: int | None
    share: float = 0.5
    here: bool = True
    pairs: tuple[tuple[str, str], ...] = ()


def test_what_is_of_its_type_is_taken() -> None:
    card = record(Card, {"name": "x", "size_bytes": None, "share": 1}, "card")
    assert card == Card(name="x", size_bytes=None, share=1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (None, "card is None and should be an object"),
        ([], "card is [] and should be an object"),
        ({"size_bytes": 1}, "card.name is missing"),
        ({"name": "x", "size_bytes": 1, "colour": "red"}, "card.colour is unknown"),
        ({"name": 3, "size_bytes": 1}, "card.name is 3 and should be of type str"),
        (
            {"name": "x", "size_bytes": 1.5},
            "card.size_bytes is 1.5 and should be of type int or None",
        ),
        (
            {"name": "x", "size_bytes": True},
            "card.size_bytes is True and should be of type int or None",
        ),
        (
            {"name": "x", "size_bytes": 1, "share": "half"},
            "card.share is 'half' and should be of type float",
        ),
        ({"name": "x", "size_bytes": 1, "share": float("nan")}, "card.share is nan"),
        ({"name": "x", "size_bytes": 1, "share": float("inf")}, "card.share is inf"),
        ({"name": "x", "size_bytes": 1, "here": 1}, "card.here is 1 and should be of type bool"),
        (
            {"name": "x", "size_bytes": 1, "pairs": [["a", "b"]]},
            "card.pairs is [['a', 'b']] and should be of type tuple",
        ),
    ],
)
def test_what_is_not_is_refused_by_name(values: Any, message: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011  # the whole message is compared
        record(Card, values, "card")
    assert str(raised.value) == message


def test_a_long_value_is_cut() -> None:
    with pytest.raises(ValueError, match="size_bytes") as raised:
        record(Card, {"name": "x", "size_bytes": "y" * 10_000}, "card")
    assert len(str(raised.value)) < 200
