"""Fit autotune/speed/data/matmul.toml to the tables of studies/kernels/tables.

Run: python -m validation.kernels.fit_matmul   (half a minute on two CPU cores, no GPU)

Nothing is fitted to a training step. The spreads are those of rows that were held out: by shape for the
cards with a table, whole cards for those without, and the spread of rates within a class of cards on top for
those of which nobody published a rate.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping

import numpy as np

from autotune.catalogue.gpus import find_gpu
from autotune.speed import matmul_cards
from autotune.speed.origin import RatesFrom
from validation.kernels import matmul_held_out as held_out
from validation.kernels.matmul_behaviour import (
    FLOAT32_CARDS,
    RATE,
    WITHOUT_TENSOR_CORES,
    fit,
    fit_float32,
    rate_on_lanes,
)
from validation.kernels.matmul_rates import log_spread_80, shares_by_class
from validation.kernels.measured_products import Products, bfloat16_products, float32_products

HEAD = """\
# Written by `python -m validation.kernels.fit_matmul`. Sources, commits and licences:
# studies/kernels/tables/README.md.
#
# behaviour               the fields of autotune.speed.matmul.Behaviour; gemm_bf16.csv.gz (aiconfigurator);
#                         float32: fp32_kernels.csv.gz (NeuSight)
# rested_tflop_per_second bfloat16 products without end on a rested card, from the same fits; of a card
#                         without tensor cores those of float32
# of_peak                 median share of the peak that the measured rates of gpus.toml are, by class of card
# log_spread              standard deviation of the logarithm of held-out times
"""


def main() -> None:
    tables = bfloat16_products()
    own = {card: fit({card: rows})[card] for card, rows in tables.items()}
    behaviour = {
        kind: _first(fit(held_out.cards_of_kind(tables, hbm=kind == "HBM")))
        for kind in ("HBM", "GDDR")
    }
    hbm = {name: value for name, value in behaviour["HBM"].items() if name != RATE}
    lanes = fit_float32([float32_of(FLOAT32_CARDS, name) for name in FLOAT32], hbm)
    behaviour["float32"] = lanes
    left_out = {card: (rows, held_out.card_left_out(card, tables)) for card, rows in tables.items()}
    shares = shares_by_class()
    of_peak = {name: statistics.median(values) for name, values in sorted(shares.items())}
    within_classes = log_spread_80(
        np.concatenate(
            [
                np.log(np.array(values) / of_peak[name])
                for name, values in shares.items()
                if name.startswith("tensor")
            ]
        )
    )
    alike = held_out.pooled(left_out)
    sections: dict[str, Mapping[str, float]] = {
        "of_peak": of_peak,
        "rested_tflop_per_second": {
            card: figures[RATE] * find_gpu(card).peak_flop_per_second["bfloat16"] / 1e12
            for card, figures in own.items()
        }
        | {
            card: rate_on_lanes(card, [float32_of([card], name) for name in FLOAT32], lanes) / 1e12
            for card in WITHOUT_TENSOR_CORES
        },
    }
    for name, figures in {**behaviour, **own}.items():
        sections[f'behaviour."{name}"'] = {f: v for f, v in figures.items() if f != RATE}
    for card, rows in tables.items():
        sections[f'log_spread."{card}"'] = held_out.spreads(rows, held_out.by_shape(card, rows))
    sections[f"log_spread.{RatesFrom.CARDS_LIKE_IT.name}"] = alike
    sections[f"log_spread.{RatesFrom.DATASHEET.name}"] = {
        regime: float(np.hypot(spread, within_classes)) for regime, spread in alike.items()
    }
    matmul_cards.DATA.write_text(HEAD + "".join(_toml(*each) for each in sections.items()))


FLOAT32 = ("linear", "bmm")
"""Operations of fp32_kernels.csv.gz that are products."""


def float32_of(cards: Collection[str], operation: str) -> dict[str, Products]:
    """Return the float32 products of these cards."""
    return {c: rows for c, rows in float32_products(operation).items() if c in cards}


def _first(figures: Mapping[str, Mapping[str, float]]) -> Mapping[str, float]:
    return next(iter(figures.values()))


def _toml(section: str, values: Mapping[str, float]) -> str:
    lines = [f'"{key}" = {float(f"{value:.4g}")}' for key, value in values.items()]
    return "\n".join(["", f"[{section}]", *lines, ""])


if __name__ == "__main__":
    main()
