"""The model of matrix products, fitted to some that were measured on one card.

Rates begin at what makes the large products right in the middle. The figures begin at what the card has
without this (from its kind's table, from cards like it, or by its datasheet), and are held there as firmly as
the cards with tables agree: a figure one standard deviation of these away counts as much as a product that
is 10 % off.
What this brings a card that no table has: studies/calibration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from autotune.catalogue.own_rates import MOST_SPREAD, Behaviour, OwnProducts
from autotune.speed import least_squares
from autotune.speed.matmul import REGIMES, Floats, MatmulCard, matmul_seconds, regime_of
from autotune.speed.matmul_cards import data
from autotune.speed.sureness import Z_OF_80_PERCENT

FIGURES = tuple(field.name for field in fields(Behaviour))

RATE_DEVIATION = 0.3
"""Standard deviation of a rate's logarithm around where it begins. [judgement]"""
_KINDS_OF_CARDS = ("HBM", "GDDR")
"""Rows of the table that are no card's."""
_WEIGHT_LARGE, _WEIGHT_FEW_ROWS = 2.0, 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductTimes:
    """Measured products of one dtype: arrays of one length."""

    batch: Floats
    m: Floats
    n: Floats
    k: Floats
    seconds: Floats
    num_weights: float | Floats
    """Second operands that took turns."""


def deviations(without: str = "") -> dict[str, float]:
    """Standard deviation of each figure as it is searched, over the cards with a table but for one."""
    cards = [
        figures
        for name, figures in data()["behaviour"].items()
        if name not in (without, *_KINDS_OF_CARDS)
    ]
    return {
        name: float(np.std([_to_search(name, figures[name]) for figures in cards], ddof=1))
        for name in FIGURES
    }


def predicted(card: MatmulCard, dtype: str, rows: ProductTimes) -> Floats:
    """Seconds of the rows on a card."""
    shape = (rows.batch, rows.m, rows.n, rows.k)
    return matmul_seconds(card, dtype, *shape, num_weights=rows.num_weights)


def fitted_products(
    card: MatmulCard, rows: Mapping[str, ProductTimes], *, deviation: Mapping[str, float]
) -> MatmulCard:
    """The card with rates and figures that fit the rows, which are given by dtype."""
    dtypes = list(rows)
    begin = [_to_search(name, getattr(card.behaviour, name)) for name in FIGURES]
    start = np.array([*(_log_scale(card, dtype, rows[dtype]) for dtype in dtypes), *begin])
    expected = np.array([*([RATE_DEVIATION] * len(dtypes)), *(deviation[n] for n in FIGURES)])

    def with_figures(x: Floats) -> MatmulCard:
        scales = dict(zip(dtypes, np.exp(x[: len(dtypes)]).tolist(), strict=True))
        half = next((d for d in ("float16", "bfloat16") if d in scales), None)
        others = 1.0 if half is None else scales[half]
        rates = {d: rate * scales.get(d, others) for d, rate in card.flop_per_second.items()}
        figures = zip(FIGURES, x[len(dtypes) :], strict=True)
        return replace(
            card.with_rates(rates),
            behaviour=Behaviour(**{name: _from_search(name, value) for name, value in figures}),
        )

    def residuals(x: Floats) -> Floats:
        tried = with_figures(x)
        off = [np.log(predicted(tried, d, each) / each.seconds) for d, each in rows.items()]
        return np.concatenate([*off, least_squares.LARGE * (x - start) / expected])

    weights = [weights_of(each.m, each.n, each.k) for each in rows.values()]
    held = np.ones(len(start))
    return with_figures(least_squares.fit(residuals, start, np.concatenate([*weights, held])))


def weights_of(m: Floats, n: Floats, k: Floats) -> Floats:
    """Weight of each row in a fit: a training step has more of large products, and few of few rows."""
    least = np.minimum(np.minimum(m, n), k)
    weights: Floats = np.select([least >= 1024, m < 128], [_WEIGHT_LARGE, _WEIGHT_FEW_ROWS], 1.0)
    return weights


def _log_scale(card: MatmulCard, dtype: str, rows: ProductTimes) -> float:
    """Logarithm of the factor on a rate that makes the large products right, in the middle; else all."""
    ratio = np.log(predicted(card, dtype, rows) / rows.seconds)
    is_large = regime_of(rows.m, rows.n, rows.k) == REGIMES.index("large")
    return float(np.median(ratio[is_large] if is_large.any() else ratio))


def spreads(
    card: MatmulCard, rows: Mapping[str, ProductTimes], *, without: str = ""
) -> tuple[float, ...]:
    """Spread of other products on the card, by REGIMES; the table of one card may be left out.

    It is that of cards with tables, of rows that were left out, or that of the fitted rows where it is more.
    """
    tables = [
        spread
        for name, spread in data()["log_spread"].items()
        if name in data()["behaviour"] and name != without
    ]
    found = []
    for number, regime in enumerate(REGIMES):
        usual = float(np.sqrt(np.mean([spread[regime] ** 2 for spread in tables])))
        off = [
            np.abs(np.log(predicted(card, dtype, each) / each.seconds))[
                regime_of(each.m, each.n, each.k) == number
            ]
            for dtype, each in rows.items()
        ]
        found.append(max(usual, spread_80(np.concatenate(off) if off else ())))
    return tuple(found)


def spread_80(off: Floats | Sequence[float]) -> float:
    """Standard deviation of a normal distribution that holds 80 % of these sizes of errors; 0 of none."""
    return min(float(np.percentile(off, 80)) / Z_OF_80_PERCENT, MOST_SPREAD) if len(off) else 0.0


def own_products(
    card: MatmulCard, rows: Mapping[str, ProductTimes], spread: Sequence[float]
) -> OwnProducts:
    """The record of a fitted card."""
    large, thin, few_rows, other = spread
    return OwnProducts(
        flop_per_second={dtype: card.flop_per_second[dtype] for dtype in rows},
        behaviour=card.behaviour,
        spread=(large, thin, few_rows, other),
    )


def _to_search(name: str, value: float) -> float:
    return float(np.log(value / (1 - value)) if name == "whole_waves" else np.log(value))


def _from_search(name: str, x: float) -> float:
    return float(1 / (1 + np.exp(-x)) if name == "whole_waves" else np.exp(x))
