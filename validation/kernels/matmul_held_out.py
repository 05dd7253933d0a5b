"""Times of measured products, predicted by figures that were fitted without them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import numpy as np

from autotune.catalogue.gpus import find_gpu
from autotune.speed.matmul import REGIMES, Floats, MatmulCard, regime_of
from autotune.speed.matmul_cards import has_hbm, without_end
from validation.kernels.matmul_behaviour import RATE, fit, predicted, rested_card
from validation.kernels.matmul_rates import log_spread_80
from validation.kernels.measured_products import Products

NUM_FOLDS = 5


def folds(rows: Products) -> Floats:
    """Fold of each row. All rows of one n and k are in the same: m has neighbours that say it all."""
    return (rows.n * 7919 + rows.k * 104729) % 97 % NUM_FOLDS


def by_shape(card: str, rows: Products) -> Floats:
    """Seconds of each row, by the card's own table without the rows of its fold."""
    fold, seconds = folds(rows), np.empty(len(rows))
    for i in range(NUM_FOLDS):
        figures = fit({card: rows.where(fold != i)})[card]
        seconds[fold == i] = predicted(rested_card(card, figures), rows.where(fold == i))
    return seconds


def cards_of_kind(tables: Mapping[str, Products], *, hbm: bool) -> dict[str, Products]:
    """Return the tables of the cards with HBM memory, or with the other."""
    return {card: rows for card, rows in tables.items() if has_hbm(find_gpu(card)) == hbm}


def card_left_out(card: str, tables: Mapping[str, Products]) -> Floats:
    """Seconds of a card's rows, by the tables of the others and the card's rate of square products."""
    return predicted(as_left_out(card, tables), tables[card])


def as_left_out(card: str, tables: Mapping[str, Products]) -> MatmulCard:
    """The card by the tables of the others and its rate of square products."""
    others = {c: rows for c, rows in tables.items() if c != card}
    hbm, capability = has_hbm(find_gpu(card)), find_gpu(card).compute_capability
    quicker = {}
    for is_hbm in (not hbm, hbm):
        fitted = fit(cards_of_kind(others, hbm=is_hbm))
        for c, figures in fitted.items():
            quicker[c] = figures[RATE] / lasting_of_peak(c, figures)
    alike = [q for c, q in quicker.items() if find_gpu(c).compute_capability == capability]
    rested = statistics.median(alike or quicker.values()) * lasting_of_peak(card, figures)
    return rested_card(card, {**figures, RATE: rested})


def lasting_of_peak(card: str, figures: Mapping[str, float]) -> float:
    """Share of the peak, of products without end, that a card's best square product stands for."""
    gpu = find_gpu(card)
    peak = gpu.peak_flop_per_second["bfloat16"]
    of_peak = gpu.measured_flop_per_second["bfloat16"] / peak
    like = without_end(rested_card(card, {**figures, RATE: of_peak}))
    return like.flop_per_second["bfloat16"] / peak


def spreads(rows: Products, seconds: Floats) -> dict[str, float]:
    """Standard deviation of the logarithm of the predicted times, by regime."""
    errors, regime = np.log(seconds / rows.seconds), regime_of(rows.m, rows.n, rows.k)
    return {name: round(log_spread_80(errors[regime == i]), 3) for i, name in enumerate(REGIMES)}


def pooled(parts: Mapping[str, tuple[Products, Floats]]) -> dict[str, float]:
    """The spreads of several cards' rows together, each card's counting alike."""
    by_card = [spreads(rows, seconds) for rows, seconds in parts.values()]
    return {
        name: round(float(np.sqrt(np.mean([s[name] ** 2 for s in by_card]))), 3) for name in REGIMES
    }
