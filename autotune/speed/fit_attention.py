"""The model of attention kernels, fitted to calls of one kernel that were measured on one card.

As with products (fit_products), the rate begins at what makes the calls right in the middle, the other
parameters at what the card has without it; they are held there as firmly as cards that were measured agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from autotune.catalogue.own_rates import OwnAttention
from autotune.speed import least_squares
from autotune.speed.attention import REGIMES, AttentionRates, attention_seconds, regime_of, table
from autotune.speed.fit_products import RATE_DEVIATION, spread_80
from autotune.speed.matmul import Floats

_HEAD_DEVIATION = 0.15
"""Deviation of the rate with one size of head against the others'. [judgement] Cards differ so."""
_MOST_ALONE = 0.98
"""`alone` is searched as log-odds, which 1 has none of."""
FIGURES = ("start_columns", "alone", "blend", "chain_seconds")
_DEVIATIONS = {"start_columns": 0.5, "alone": 1.5, "blend": 0.7, "chain_seconds": 0.4}
"""Deviations as the figures are searched. [judgement] The cards of the table differ so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionTimes:
    """Measured calls of one kernel in one direction: arrays of one length."""

    shape: dict[str, Any]
    """Arguments of attention_seconds."""
    seconds: Floats
    beside: float | Floats = 0.0
    """Seconds of these that the kernel does not take."""


def predicted(rates: AttentionRates, rows: AttentionTimes) -> Floats:
    """Seconds of the rows, with what they take beside the kernel."""
    return np.asarray(attention_seconds(rates, **rows.shape) + rows.beside, float)


def fitted_attention(rates: AttentionRates, rows: AttentionTimes) -> AttentionRates:
    """Parameters that fit the rows."""
    num_heads = len(rates.flop_per_second)
    begin = [_TO_SEARCH.get(name, np.log)(getattr(rates, name)) for name in FIGURES]
    scale = float(np.median(np.log(predicted(rates, rows) / rows.seconds)))
    start = np.array([scale, *([0.0] * num_heads), *begin], float)
    expected = np.array(
        [RATE_DEVIATION, *([_HEAD_DEVIATION] * num_heads), *(_DEVIATIONS[n] for n in FIGURES)]
    )

    def with_figures(x: Floats) -> AttentionRates:
        figures = {
            name: float(_FROM_SEARCH.get(name, np.exp)(value))
            for name, value in zip(FIGURES, x[1 + num_heads :], strict=True)
        }
        known = tuple(
            (dim, rate * float(np.exp(x[0] + x[1 + number])))
            for number, (dim, rate) in enumerate(rates.flop_per_second)
        )
        return replace(rates, flop_per_second=known, **figures)  # type: ignore[arg-type]  # all floats

    def residuals(x: Floats) -> Floats:
        off = np.log(predicted(with_figures(x), rows) / rows.seconds)
        return np.concatenate([off, least_squares.LARGE * (x - start) / expected])

    return with_figures(
        least_squares.fit(residuals, start, np.ones(len(rows.seconds) + len(start)))
    )


def own_attention(
    rates: AttentionRates,
    rows: AttentionTimes,
    *,
    kernel: Literal["flash", "flash3", "cudnn", "efficient"],
    is_backward: bool,
) -> OwnAttention:
    """The record of fitted parameters; its spread is that of cards with tables, or the rows' if more."""
    usual = table()["spread"]["this_card"]["backward" if is_backward else "forward"]
    off = np.abs(np.log(predicted(rates, rows) / rows.seconds))
    of_rows = np.asarray(
        regime_of(
            rates,
            batch=rows.shape["batch"],
            heads=rows.shape["heads"],
            query_length=rows.shape["query_length"],
        )
    )
    short, few, many = (
        max(usual[number], spread_80(off[of_rows == number])) for number in range(len(REGIMES))
    )
    return OwnAttention(
        kernel=kernel,
        is_backward=is_backward,
        flop_per_second=rates.flop_per_second,
        start_columns=rates.start_columns,
        alone=rates.alone,
        blend=rates.blend,
        chain_seconds=rates.chain_seconds,
        spread=(short, few, many),
    )


def _log_odds(value: float) -> float:
    share = min(value, _MOST_ALONE)
    return float(np.log(share / (1 - share)))


_TO_SEARCH: dict[str, Callable[[float], float]] = {
    "alone": _log_odds,
    "blend": lambda value: float(np.log(value - 1)),
}
_FROM_SEARCH: dict[str, Callable[[float], float]] = {
    "alone": lambda x: float(1 / (1 + np.exp(-x))),
    "blend": lambda x: float(1 + np.exp(x)),
}
