"""Cards for autotune.speed.matmul: data/matmul.toml and the catalogue's rows -> MatmulCard.

`data/matmul.toml` is written by `python -m validation.kernels.fit_matmul`, which names the sources. What
a card's products reach is, in this order: the best rate of large products that the catalogue has of such a
card in this dtype; the share of the peak that it reached in another tensor dtype; the share that the cards
of its class reach. The classes: on GeForce cards, whose tensor rate is halved, the peak itself lasts, on all
others power or heat ends it before; float32 is slower where half of its lanes are shared with integers, and
where they are not, cards of one compute capability reach alike; bfloat16 is emulated before capability 8.0.
"""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from autotune.catalogue.gpus import Gpu, catalogue
from autotune.catalogue.own_rates import Behaviour, OwnProducts
from autotune.speed.matmul import (
    ELEMENT_BYTES,
    REGIMES,
    Floats,
    MatmulCard,
    matmul_seconds,
    regime_of,
    tensor_rate,
)
from autotune.speed.origin import RatesFrom

DATA = Path(__file__).with_name("data") / "matmul.toml"

_SQUARES: Floats = np.arange(1, 11, dtype=np.float64) * 1024
"""Sizes of square products whose best rate the catalogue's measured rates are."""

_HALF = ("bfloat16", "float16")
FLOAT32_OWN_LANES = "float32_own_lanes"
_OWN_LANES = frozenset({(6, 0), (7, 0), (7, 5), (8, 0), (9, 0), (10, 0), (10, 3)})
_WITH_HBM = _OWN_LANES - {(7, 5)}


@functools.cache
def data() -> dict[str, Any]:
    """Return data/matmul.toml as it is."""
    return tomllib.loads(DATA.read_text(encoding="utf-8"))


def matmul_card(
    gpu: Gpu, peaks: Mapping[str, float], float32: Behaviour | None = None
) -> MatmulCard | None:
    """Return the card for matmul_seconds; None where its SMs, bandwidth or float16 rate is unknown.

    An L2 whose size is not known is taken to be what cards like it have for each multiprocessor. `peaks`:
    dense peak by dtype of the operands, those that the card emulates included
    (roofline.peak_flop_per_second). `float32`: other figures of its products than the file's.
    """
    rates = {d: attainable_flop_per_second(gpu, d, peaks) for d in peaks if d in ELEMENT_BYTES}
    if (
        gpu.num_sms is None
        or gpu.memory_bandwidth_bytes_per_second is None
        or "float16" not in rates
    ):
        return None
    by_dtype = {dtype: rate for dtype, (rate, _) in rates.items()}
    table = data()["behaviour"]
    has_table = gpu.name in table
    card = MatmulCard(
        name=gpu.name,
        num_sms=gpu.num_sms,
        l2_bytes=gpu.l2_bytes or gpu.num_sms * _l2_bytes_of_sm(gpu.compute_capability),
        memory_bytes_per_second=gpu.memory_bandwidth_bytes_per_second,
        tensor_flop_per_second=tensor_rate(by_dtype, has_tensor_cores=has_tensor_cores(gpu)),
        behaviour=_behaviour(gpu),
        float32=float32 or Behaviour(**table["float32"]),
        has_tensor_cores=has_tensor_cores(gpu),
        flop_per_second=by_dtype,
        rates_from={
            dtype: RatesFrom.THIS_CARD if has_table and dtype in _HALF else rates_from
            for dtype, (_, rates_from) in rates.items()
        },
    )
    card = _no_faster_than(rested_flop_per_second(gpu.name), without_end(card))
    return card if gpu.rates is None else _with_own(card, gpu.rates.products)


def _behaviour(gpu: Gpu) -> Behaviour:
    """Figures of a card's products on tensor cores: its own, else those of its kind of memory."""
    table = data()["behaviour"]
    return Behaviour(**table.get(gpu.name) or table["HBM" if has_hbm(gpu) else "GDDR"])


def held_l2_bytes(gpu: Gpu) -> float:
    """Bytes of the L2 cache in which one kernel finds what another left; 0 where its size is not known.

    The share of the cache is that of measured products, whose first operand and results stay in it.
    """
    return _behaviour(gpu).l2_share * (gpu.l2_bytes or 0)


@functools.cache
def _l2_bytes_of_sm(capability: tuple[int, int] | None) -> float:
    """Bytes of L2 for each multiprocessor: the median of the cards of that compute capability.

    Of all cards where it has none, or is unknown.
    """
    known = [each for each in catalogue() if each.l2_bytes and each.num_sms]
    alike = [each for each in known if each.compute_capability == capability] or known
    return float(np.median([(each.l2_bytes or 0) / (each.num_sms or 1) for each in alike]))


def _with_own(card: MatmulCard, own: OwnProducts | None) -> MatmulCard:
    """The card with what was measured on it; a dtype that was not keeps its ratio to 16 bits."""
    if own is None:
        return card
    rates: dict[str, float] = {**own.flop_per_second}
    half = next((d for d in ("float16", "bfloat16") if d in rates), None)
    scale = 1.0 if half is None else rates[half] / card.flop_per_second[half]
    for dtype, rate in card.flop_per_second.items():
        rates.setdefault(dtype, scale * rate)
    return replace(
        card.with_rates(rates),
        behaviour=own.behaviour,
        rates_from={**card.rates_from, **dict.fromkeys(own.flop_per_second, RatesFrom.THIS_CARD)},
        spread=own.spread,
    )


def attainable_flop_per_second(
    gpu: Gpu, dtype: str, peaks: Mapping[str, float]
) -> tuple[float, RatesFrom]:
    """Return the rate of the best square product in a dtype of `peaks`, and its evidence."""
    best = gpu.measured_flop_per_second
    if dtype in best:
        return best[dtype], RatesFrom.CARDS_LIKE_IT
    of_peak = data()["of_peak"]
    if dtype == "float32" or (dtype == "tf32" and not gpu.has_bfloat16):
        share = of_peak["float32_shared_lanes"]
        if has_own_lanes(gpu):
            alike = of_capability(FLOAT32_OWN_LANES, gpu)
            share = of_peak.get(alike, of_peak[FLOAT32_OWN_LANES])
        return share * peaks[dtype], RatesFrom.DATASHEET
    if dtype == "bfloat16" and not gpu.has_bfloat16:
        return of_peak["bfloat16_emulated"] * peaks[dtype], RatesFrom.DATASHEET
    known = "bfloat16" if gpu.has_bfloat16 and "bfloat16" in peaks else "float16"
    if known in peaks and known in best:
        return best[known] / peaks[known] * peaks[dtype], RatesFrom.CARDS_LIKE_IT
    return of_peak["tensor" + ("_halved" if gpu.has_half_tensor_rate else "")] * peaks[dtype], (
        RatesFrom.DATASHEET
    )


def without_end(card: MatmulCard) -> MatmulCard:
    """Return the card with the rates at which its best square product reaches what they say now."""
    ones, flops = np.ones(len(_SQUARES)), 2 * _SQUARES**3

    def share(dtype: str) -> float:
        seconds = matmul_seconds(card, dtype, ones, _SQUARES, _SQUARES, _SQUARES, num_weights=1)
        return float((flops / seconds).max()) / card.flop_per_second[dtype]

    rates = {dtype: rate / share(dtype) for dtype, rate in card.flop_per_second.items()}
    return card.with_rates(rates)


def _no_faster_than(rested: float | None, card: MatmulCard) -> MatmulCard:
    """A card that lasts at a rate no higher than the one it had rested."""
    if rested is None:
        return card
    limited = _HALF if card.has_tensor_cores else card.flop_per_second
    rates = {d: min(r, rested) if d in limited else r for d, r in card.flop_per_second.items()}
    return card.with_rates(rates)


def rested_flop_per_second(name: str) -> float | None:
    """Rate without end that the tables' products had on a rested card; None without a table.

    They are of 16 bits, on a card without tensor cores of float32.
    """
    rested = data()["rested_tflop_per_second"].get(name)
    return None if rested is None else rested * 1e12


def log_spread(card: MatmulCard, dtype: str, m: Floats, n: Floats, k: Floats) -> Floats:
    """Return the standard deviation of each time's logarithm: 80 % of held-out rows are within 1.28 of it."""
    rates_from, spreads = card.rates_from[dtype], data()["log_spread"]
    of_card: Sequence[float] | None = card.spread
    if rates_from is not RatesFrom.THIS_CARD or of_card is None:
        of_regime = spreads[card.name if rates_from is RatesFrom.THIS_CARD else rates_from.name]
        of_card = [of_regime[regime] for regime in REGIMES]
    by_row: Floats = np.array(of_card)[regime_of(m, n, k)]
    return by_row


def of_capability(name: str, gpu: Gpu) -> str:
    """Key of `of_peak` for the cards of a class that have this one's compute capability."""
    return f"{name}_{'.'.join(map(str, gpu.compute_capability or ()))}"


def has_tensor_cores(gpu: Gpu) -> bool:
    """Whether it has tensor cores: from Volta on, but for the GTX cards of Turing.

    A card whose capability is unknown is taken to have some.
    """
    capability = gpu.compute_capability
    if capability == (7, 5):
        peaks = gpu.peak_flop_per_second
        return peaks.get("float16", math.inf) > 3 * peaks.get("float32", 0.0)
    return capability is None or capability >= (7, 0)


def has_own_lanes(gpu: Gpu) -> bool:
    """Whether its float32 lanes are all float32's own, rather than half of them shared with integers."""
    return gpu.compute_capability in _OWN_LANES


def has_hbm(gpu: Gpu) -> bool:
    """Whether its memory is stacked on its package."""
    return gpu.compute_capability in _WITH_HBM
