"""Figures of autotune.speed.matmul, fitted to tables of measured products."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

import numpy as np

from autotune.catalogue.gpus import find_gpu
from autotune.catalogue.own_rates import Behaviour
from autotune.speed import least_squares
from autotune.speed.fit_products import weights_of
from autotune.speed.matmul import Floats, MatmulCard, matmul_seconds
from autotune.speed.matmul_cards import matmul_card
from autotune.speed.origin import RatesFrom
from autotune.speed.roofline import peaks_of
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
_UNUSED = Behaviour(**{name: _START[name] for name in _NAMES[1:]})

FLOAT32_CARDS = ("NVIDIA A100-PCIE-40GB", "NVIDIA V100-PCIE-32GB")
"""Cards of fp32_kernels.csv.gz that neither power nor heat slows down in its tests."""
WITHOUT_TENSOR_CORES = ("NVIDIA P100-PCIE-16GB",)
"""Cards of it without tensor cores: their rate is their own, the other figures those of FLOAT32_CARDS."""
_FLOAT32_FITTED = (
    "memory_share", "fill_steps", "whole_waves", "overlap", "split_seconds", "tile_exponent",
)  # fmt: skip
"""Figures that float32 has of its own; what the L2 cache gives is that of cards with HBM."""
_LEAST_SECONDS = 2e-4
"""Shorter rows of that table tell more of their launch."""

_ROWS_PER_CARD = 3000


def rested_card(name: str, figures: Mapping[str, float], *, dtype: str = "bfloat16") -> MatmulCard:
    """The card as the tables met it: `figures` are a Behaviour's and the share of the dtype's peak."""
    gpu = find_gpu(name)
    rate = figures[RATE] * gpu.peak_flop_per_second[dtype]
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
        float32=_UNUSED,
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
    at_waves = len(cards) + shared.index("whole_waves")
    start = _to_search([_START[RATE]] * len(cards) + [_START[name] for name in shared], at_waves)

    def figures(x: Floats) -> dict[str, dict[str, float]]:
        values = _from_search(x, at_waves)
        common = dict(zip(shared, values[len(cards) :], strict=True))
        return {card: {RATE: values[i], **common} for i, card in enumerate(cards)}

    def residuals(x: Floats) -> Floats:
        found = figures(x)
        errors = [
            np.log(predicted(rested_card(card, found[card]), rows) / rows.seconds)
            for card, rows in zip(cards, samples, strict=True)
        ]
        return np.concatenate([*errors, (x - start) / deviations])

    weights = [weights_of(rows.m, rows.n, rows.k) for rows in samples]
    found = least_squares.fit(residuals, start, np.concatenate([*weights, np.ones(len(start))]))
    return figures(found)


def fit_float32(
    tables: Sequence[Mapping[str, Products]], like: Mapping[str, float]
) -> dict[str, float]:
    """Return the figures of float32 products, of one Behaviour for these cards' tables.

    `like`: the figures that are not fitted. Each card has a rate and a launch of its own, which are dropped.
    """
    samples = [
        (card, rows.where(rows.seconds >= _LEAST_SECONDS).sample(_ROWS_PER_CARD))
        for table in tables
        for card, rows in table.items()
    ]
    cards = sorted({card for card, _ in samples})
    begin = [*([_START[RATE]] * len(cards)), *([_LAUNCH_SECONDS] * len(cards))]
    begin += [_START[name] for name in _FLOAT32_FITTED]
    at_waves = 2 * len(cards) + _FLOAT32_FITTED.index("whole_waves")
    start = _to_search(begin, at_waves)

    def residuals(x: Floats) -> Floats:
        values = _from_search(x, at_waves)
        figures = {**like, **dict(zip(_FLOAT32_FITTED, values[2 * len(cards) :], strict=True))}
        rates = dict(zip(cards, values, strict=False))
        launches = dict(zip(cards, values[len(cards) :], strict=False))
        errors = [
            np.log((launches[card] + _float32(card, rates[card], figures, rows)) / rows.seconds)
            for card, rows in samples
        ]
        return np.concatenate([*errors, (x - start) / _PRIOR_DEVIATION])

    weights = np.ones(sum(len(rows) for _, rows in samples) + len(start))
    values = _from_search(least_squares.fit(residuals, start, weights), at_waves)
    return {**like, **dict(zip(_FLOAT32_FITTED, values[2 * len(cards) :], strict=True))}


_LAUNCH_SECONDS = 2e-5


def rate_on_lanes(
    name: str, tables: Sequence[Mapping[str, Products]], figures: Mapping[str, float]
) -> float:
    """Return the rate of float32 products without end of a card that has no tensor cores.

    With it the middle row of each table is predicted as measured, in the mean of the tables.
    """
    gpu = find_gpu(name)
    peak = gpu.peak_flop_per_second["float32"]
    card = matmul_card(gpu, peaks_of(gpu), Behaviour(**figures))
    assert card is not None
    samples = [table[name].where(table[name].seconds >= _LEAST_SECONDS) for table in tables]

    def too_fast(per_mille: int) -> float:
        tried = card.with_rates({"float32": per_mille / 1000 * peak})
        shapes = ((rows.batch, rows.m, rows.n, rows.k) for rows in samples)
        seconds = (matmul_seconds(tried, "float32", *shape) for shape in shapes)
        ratios = zip(seconds, samples, strict=True)
        return -float(np.mean([np.median(np.log(each / rows.seconds)) for each, rows in ratios]))

    return bisect.bisect_left(range(1000), 0.0, lo=1, key=too_fast) / 1000 * peak


def _float32(card: str, of_peak: float, figures: Mapping[str, float], rows: Products) -> Floats:
    """Seconds of the rows on a card whose float32 products reach that share of their peak."""
    gpu = find_gpu(card)
    rate = of_peak * gpu.peak_flop_per_second["float32"]
    machine = replace(
        rested_card(card, {**_START}, dtype="float16"),
        float32=Behaviour(**figures),
        flop_per_second={"float32": rate},
    )
    return matmul_seconds(machine, "float32", rows.batch, rows.m, rows.n, rows.k)


def _to_search(values: Sequence[float], at_waves: int) -> Floats:
    """Figures as they are searched; `whole_waves` stands at that place."""
    x = np.log(values)
    x[at_waves] = np.log(values[at_waves] / (1 - values[at_waves]))
    return x


def _from_search(x: Floats, at_waves: int) -> list[float]:
    values = np.exp(x)
    values[at_waves] = 1 / (1 + np.exp(-x[at_waves]))
    return [float(value) for value in values]
