"""Dataclasses from JSON: what is not of its type is refused by name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from autotune.common.json_records import plain, read


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    name: str
    size_bytes: int | None
    share: float = 0.5
    here: bool = True
    pairs: tuple[tuple[str, str], ...] = ()
    next: Card | None = None


def test_what_is_of_its_type_is_taken() -> None:
    card = read(Card, {"name": "x", "size_bytes": None, "share": 1}, "card")
    assert card == Card(name="x", size_bytes=None, share=1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (None, "card is None and should be an object"),
        ([], "card is [] and should be an object"),
        ({"size_bytes": 1}, "card: Object missing required field name"),
        ({"name": "x", "size_bytes": 1, "colour": "red"}, "card.colour is unknown"),
        ({"name": 3, "size_bytes": 1}, "card.name: Expected str, got int"),
        ({"name": "x", "size_bytes": 1.5}, "card.size_bytes: Expected int | null, got float"),
        ({"name": "x", "size_bytes": True}, "card.size_bytes: Expected int | null, got bool"),
        ({"name": "x", "size_bytes": 1, "share": "half"}, "card.share: Expected float, got str"),
        ({"name": "x", "size_bytes": 1, "share": float("nan")}, "card.share is nan"),
        ({"name": "x", "size_bytes": 1, "share": float("inf")}, "card.share is inf"),
        ({"name": "x", "size_bytes": 1, "here": 1}, "card.here: Expected bool, got int"),
        (
            {"name": "x", "size_bytes": 1, "pairs": [["a", 2]]},
            "card.pairs[0][1]: Expected str, got int",
        ),
        (
            {"name": "x", "size_bytes": 1, "next": {"name": "y", "size_bytes": 1, "hue": 1}},
            "card.next.hue is unknown",
        ),
    ],
)
def test_what_is_not_is_refused_by_name(values: Any, message: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011  # the whole message is compared
        read(Card, values, "card")
    assert str(raised.value) == message


def test_what_was_written_is_read_back() -> None:
    inner = Card(name="y", size_bytes=2)
    card = Card(name="x", size_bytes=1, pairs=(("a", "b"),), next=inner)
    assert read(Card, json.loads(json.dumps(plain(card)))) == card
