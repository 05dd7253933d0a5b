"""Likeness of cards: so that a new machine's first results have something beside them."""

from __future__ import annotations

import math
from collections.abc import Iterable

from autotune.catalogue import gpus
from autotune.catalogue.gpus import Gpu
from autotune.errors import ConfigError
from autotune.nightly.history import Night

_UNKNOWN = math.log(4)
"""Distance of a fact that one of the two cards lacks: as if it were four times as large. [judgement]"""


def nearest(device: str, nights: Iterable[Night]) -> Night | None:
    """Return the night of the machine whose card is most like this one; None without a card to compare."""
    card = _card(device)
    if card is None:
        return None
    compared = [
        (distance(card, other), night)
        for night in nights
        if (other := _card(night.fingerprint.device)) is not None and other.name != card.name
    ]
    return min(compared, key=lambda pair: pair[0], default=(0.0, None))[1]


def distance(card: Gpu, other: Gpu) -> float:
    """Return how far bandwidth, matrix rate, memory and architecture of two cards are apart, in logs.

    0 for the same facts.
    """
    facts = [
        (card.memory_bandwidth_bytes_per_second, other.memory_bandwidth_bytes_per_second),
        (_rate(card), _rate(other)),
        (card.capacity_bytes, other.capacity_bytes),
    ]
    apart = [_UNKNOWN if a is None or b is None else abs(math.log(a / b)) for a, b in facts]
    return math.hypot(*apart, 0.0 if card.architecture == other.architecture else math.log(1.5))


def bandwidth_ratio(device: str, other: str) -> float | None:
    """Return how much faster the memory of the one card is than the other's; None where it is unknown.

    By the catalogue's facts.
    """
    cards = [_card(device), _card(other)]
    rates = [None if c is None else c.memory_bandwidth_bytes_per_second for c in cards]
    return None if rates[0] is None or rates[1] is None else rates[0] / rates[1]


def _rate(card: Gpu) -> float | None:
    peaks = card.peak_flop_per_second
    return peaks.get("bfloat16") or peaks.get("float16")


def _card(device: str) -> Gpu | None:
    try:
        return gpus.find_gpu(device)
    except ConfigError:
        return None
