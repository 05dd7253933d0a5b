"""Figures of autotune.speed.matmul, fitted to tables of measured products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

import numpy as np

from autotune.catalogue.gpus import find_gpu
from autotune.speed.matmul import Behaviour, Floats, MatmulCard, matmul_seconds
from autotune.speed.origin import RatesFrom
from validation.kernels import least_squares
from validation.kernels.measured_products import Products

NUM_WEIGHTS = 6.0
"""Layers that took turns where gemm_bf16.csv.gz was measured."""

RATE = "of_peak"
_NAMES = (RATE, *(field.name for field in fields(Behaviour)))

# Where the search starts and what holds a figure that the rows say nothing of: what a first fit of all six
# cards gave. Figures are searched as logarithms, `whole_waves` as log-odds.
_START = {
    RATE: 0.85,
    "l2_bytes_per_flop": 0.02,
    "memory_share": 0.8,
    "fill_steps": 150,
    "start_seconds": 2.4e-6,
    "whole_waves": 0.25,
    "overlap": 3.2,
    "l2_share": 0.5,
    "l2_warm": 0.5,
    "split_seconds": 2.5e-6,
    "tile_exponent": 0.05,
}
_PRIOR_DEVIATION = 2.0
_OVERLAP_DEVIATION = 0.3
"""What the overlap tells cannot be told from the rates on the B200, where computing is seldom the limit."""
# Rows that a training step has more of count more.
_WEIGHT_LARGE, _WEIGHT_FEW_ROWS = 2.0, 0.2
_ROWS_PER_CARD = 3000


def rested_card(name: str, figures: Mapping[str, float]) -> MatmulCard:
    """The card as the tables met it: `figures` are a Behaviour's and the share of the peak."""
    gpu = find_gpu(name)
    rate = figures[RATE] * gpu.peak_flop_per_second["bfloat16"]
    bandwidth, cache_bytes = gpu.memory_bandwidth_bytes_per_second, gpu.l2_bytes
    assert gpu.num_sms is not None
    assert bandwidth is not None
    assert cache_bytes is not None
    return MatmulCard(
        name=name,
        num_sms=gpu.num_sms,
        l2_bytes=cache_bytes,
        memory_bytes_per_second=bandwidth,
        tensor_flop_per_second=rate,
        behaviour=Behaviour(**{f: v for f, v in figures.items() if f != RATE}),
        flop_per_second=dict.fromkeys(("bfloat16", "float16"), rate),
        rates_from={"bfloat16": RatesFrom.THIS_CARD},
    )


def predicted(card: MatmulCard, rows: Products) -> Floats:
    """Seconds of the rows of gemm_bf16.csv.gz on a card."""
    return matmul_seconds(
        card, "bfloat16", rows.batch, rows.m, rows.n, rows.k, num_weights=NUM_WEIGHTS
    )


def fit(tables: Mapping[str, Products]) -> dict[str, dict[str, float]]:
    """Return the figures by card, of one Behaviour for all of them; the share of the peak is each card's."""
    cards = list(tables)
    samples = [tables[card].sample(_ROWS_PER_CARD) for card in cards]
    shared = _NAMES[1:]
    deviations = np.full(len(cards) + len(shared), _PRIOR_DEVIATION)
    deviations[len(cards) + shared.index("overlap")] = _OVERLAP_DEVIATION
    start = _to_search([_START[RATE]] * len(cards) + [_START[name] for name in shared], len(cards))

    def figures(x: Floats) -> dict[str, dict[str, float]]:
        values = _from_search(x, len(cards))
        common = dict(zip(shared, values[len(cards) :], strict=True))
        return {card: {RATE: values[i], **common} for i, card in enumerate(cards)}

    def residuals(x: Floats) -> Floats:
        found = figures(x)
        errors = [
            np.log(predicted(rested_card(card, found[card]), rows) / rows.seconds)
            for card, rows in zip(cards, samples, strict=True)
        ]
        return np.concatenate([*errors, (x - start) / deviations])

    weights = [_weights(rows) for rows in samples]
    found = least_squares.fit(residuals, start, np.concatenate([*weights, np.ones(len(start))]))
    return figures(found)


def _weights(rows: Products) -> Floats:
    least = np.minimum(np.minimum(rows.m, rows.n), rows.k)
    return np.select([least >= 1024, rows.m < 128], [_WEIGHT_LARGE, _WEIGHT_FEW_ROWS], 1.0)


def _to_search(values: Sequence[float], num_cards: int) -> Floats:
    x = np.log(values)
    at = num_cards + _NAMES[1:].index("whole_waves")
    x[at] = np.log(values[at] / (1 - values[at]))
    return x


def _from_search(x: Floats, num_cards: int) -> list[float]:
    values = np.exp(x)
    at = num_cards + _NAMES[1:].index("whole_waves")
    values[at] = 1 / (1 + np.exp(-x[at]))
    return [float(value) for value in values]
