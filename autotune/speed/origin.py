"""RatesFrom: which evidence a predicted kernel time rests on."""

from __future__ import annotations

from enum import StrEnum


class RatesFrom(StrEnum):
    """Evidence behind a rate, best first."""

    THIS_CARD = "this card"
    """Published times of this card."""
    CARDS_LIKE_IT = "cards like it"
    """Published times of other cards with the same kernel, scaled by the datasheets of both; of what the host
    takes, times of other hosts."""
    DATASHEET = "datasheet"
    """No published times that apply: a share of the datasheet's rate, by judgement."""
