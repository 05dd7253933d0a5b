"""Predicted against measured times of matrix products that the prediction has not seen.

Run: python -m validation.kernels.matmul   (a minute on two CPU cores, no GPU)

The tables are those of studies/kernels/tables; nothing in them was measured by this project. Answers go to
studies/kernels/matmul.json and the tables of studies/kernels/matmul.md. An error is
|predicted / measured - 1|; the median and the 90th percentile of each group of rows are given.

- by shape: a card's own table without a fifth of its n and k at a time, predicted as measured: rested, warm.
- card left out: from the other cards' tables and the card's published rate of square products alone.
- former rule: what this project had before: one share of the peak for every product of a card.
- transfer: other tables, priced as a training step is; nothing was fitted to them, and of the two cards whose
  float32 products were, each is predicted by the other. Rows that take less
  than 0.2 ms by prediction are left out of those timed with their launch.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

import numpy as np

from autotune.catalogue.gpus import Gpu, find_gpu
from autotune.catalogue.own_rates import Behaviour
from autotune.speed.matmul import REGIMES, Floats, matmul_seconds, regime_of
from autotune.speed.matmul_cards import data, matmul_card
from autotune.speed.roofline import peaks_of
from validation.kernels import matmul_held_out as held_out
from validation.kernels.fit_matmul import FLOAT32, float32_of
from validation.kernels.matmul_behaviour import FLOAT32_CARDS, fit_float32
from validation.kernels.measured_products import Products, bfloat16_products
from validation.kernels.public_tables import STUDY, columns
from validation.published.tables import write_sections

_OF_NORMAL_80 = 1.2816
_WITH_LAUNCH_SECONDS = 2e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class Errors:
    """How far off the products of one regime on one card are."""

    test: str
    card: str
    regime: str
    num_rows: int
    median: float
    percentile_90: float
    bias: float
    """Median of predicted / measured."""
    within_80: float | None = None
    """Share of the rows within their 80 % interval; the spread is from other folds or other cards."""


def main() -> None:
    tables = bfloat16_products()
    by_shape = {card: held_out.by_shape(card, table) for card, table in tables.items()}
    left_out = {card: held_out.card_left_out(card, tables) for card in tables}
    found = [
        *(e for c, t in tables.items() for e in errors("by shape", c, t, by_shape[c])),
        *(e for c, t in tables.items() for e in errors("card left out", c, t, left_out[c])),
        *(e for c, t in tables.items() for e in errors("former rule", c, t, former(c, t))),
    ]
    found = with_coverage(found, tables, by_shape, left_out)
    found += transfer()
    (STUDY / "matmul.json").write_text(json.dumps([asdict(e) for e in found], indent=0) + "\n")
    tests = dict.fromkeys(e.test for e in found)
    sections = {test: table_of([e for e in found if e.test == test]) for test in tests}
    sections["worst rows"] = worst_rows(tables, by_shape)
    write_sections(STUDY / "matmul.md", sections)


def errors(test: str, card: str, table: Products, seconds: Floats) -> list[Errors]:
    ratio, regime = seconds / table.seconds, regime_of(table.m, table.n, table.k)
    found = []
    for i, name in enumerate(REGIMES):
        of = ratio[regime == i]
        if len(of):
            error = np.abs(of - 1)
            found.append(
                Errors(
                    test=test,
                    card=card,
                    regime=name,
                    num_rows=len(of),
                    median=float(np.median(error)),
                    percentile_90=float(np.percentile(error, 90)),
                    bias=float(np.median(of)),
                )
            )
    return found


def with_coverage(
    found: list[Errors],
    tables: Mapping[str, Products],
    by_shape: Mapping[str, Floats],
    left_out: Mapping[str, Floats],
) -> list[Errors]:
    """Add how many rows the 80 % intervals hold."""
    covered = {}
    for card, table in tables.items():
        covered["by shape", card] = covered_by_folds(table, by_shape[card])
        others = {c: (tables[c], left_out[c]) for c in tables if c != card}
        spreads = held_out.pooled(others)
        covered["card left out", card] = covered_by(table, left_out[card], spreads)
    return [
        replace(e, within_80=covered[e.test, e.card][e.regime])
        if (e.test, e.card) in covered
        else e
        for e in found
    ]


def covered_by(table: Products, seconds: Floats, spreads: Mapping[str, float]) -> dict[str, float]:
    error, regime = (
        np.abs(np.log(seconds / table.seconds)),
        regime_of(table.m, table.n, table.k),
    )
    return {
        name: float(np.mean(error[regime == i] < _OF_NORMAL_80 * spreads[name]))
        for i, name in enumerate(REGIMES)
        if (regime == i).any()
    }


def covered_by_folds(table: Products, seconds: Floats) -> dict[str, float]:
    fold = held_out.folds(table)
    parts = []
    for i in range(held_out.NUM_FOLDS):
        spreads = held_out.spreads(table.where(fold != i), seconds[fold != i])
        parts.append(covered_by(table.where(fold == i), seconds[fold == i], spreads))
    return {name: float(np.mean([part[name] for part in parts])) for name in REGIMES}


def former(card: str, table: Products) -> Floats:
    """The rule before: 0.95 of the best rate or 0.75 of the bandwidth, and 3 us."""
    gpu = find_gpu(card)
    published = {"NVIDIA A100-SXM4-80GB": 271.2e12, "NVIDIA B200": 1745e12}
    published |= dict.fromkeys(("NVIDIA H100 80GB HBM3", "NVIDIA H200"), 794.5e12)
    best = published.get(card, 0.83 * gpu.peak_flop_per_second["bfloat16"])
    assert gpu.memory_bandwidth_bytes_per_second is not None
    flops = 2 * table.batch * table.m * table.n * table.k
    moved = 2 * (table.m * table.k + table.k * table.n + table.m * table.n)
    return 3e-6 + np.maximum(
        flops / (0.95 * best), moved / (0.75 * gpu.memory_bandwidth_bytes_per_second)
    )


def transfer() -> list[Errors]:
    """Return the errors of other tables, as a training step's products are priced."""
    found = []
    for name, gpu_name in (
        ("A100 80GB", "A100 80GB PCIe"),
        ("NVIDIA A40", "A40"),
        ("NVIDIA H100 80GB HBM3", "H100 80GB HBM3"),
    ):
        table, gpu = vidur(name), find_gpu(gpu_name)
        found += errors("float16 layers (vidur)", gpu.name, table, priced(gpu, "float16", table))
    for operation in FLOAT32:
        for card, table in float32_of((*FLOAT32_CARDS, "NVIDIA T4"), operation).items():
            seconds = priced(find_gpu(card), "float32", table, float32_without(card))
            long, test = seconds >= _WITH_LAUNCH_SECONDS, f"float32 {operation} (NeuSight)"
            found += errors(test, card, table.where(long), seconds[long])
    return found


@functools.cache
def float32_without(card: str) -> Behaviour:
    """The figures of float32 products as the other cards' tables give them."""
    others = [name for name in FLOAT32_CARDS if name != card]
    like = asdict(Behaviour(**data()["behaviour"]["HBM"]))
    return Behaviour(**fit_float32([float32_of(others, name) for name in FLOAT32], like))


def priced(gpu: Gpu, dtype: str, table: Products, float32: Behaviour | None = None) -> Floats:
    card = matmul_card(gpu, peaks_of(gpu), float32)
    assert card is not None
    return matmul_seconds(card, dtype, table.batch, table.m, table.n, table.k)


def vidur(card: str) -> Products:
    """The four products of each layer of vidur's table, as m = tokens, n = features of the result."""

    names = ("hidden", "ffn", "heads", "kv_heads", "tokens", "shards", "gated")
    parts = ("qkv", "out", "up", "down")
    times = tuple(f"{part}_proj_ms" for part in parts)
    table = columns("vidur.csv.gz", (*names, *times), keep=("card", frozenset({card})))
    hidden, ffn, heads, kv_heads, tokens, shards, gated = (table[name] for name in names)
    wide = (heads + 2 * kv_heads) * hidden / heads / shards
    n = np.stack([wide, hidden, (1 + gated) * ffn / shards, hidden], axis=1).ravel()
    k = np.stack([hidden, hidden / shards, hidden, ffn / shards], axis=1).ravel()
    return Products(
        batch=np.ones(len(n)),
        m=np.repeat(tokens, len(parts)),
        n=n,
        k=k,
        seconds=np.stack([table[time] for time in times], axis=1).ravel() / 1e3,
    )


def table_of(found: list[Errors]) -> str:
    has_80 = found[0].within_80 is not None
    lines = [
        "| card | shapes | rows | median error | 90th percentile | predicted / measured |"
        + (" in the 80 % interval |" if has_80 else ""),
        "|---|---|---|---|---|---|" + ("---|" if has_80 else ""),
    ]
    for e in sorted(found, key=lambda e: (REGIMES.index(e.regime), -e.median)):
        line = (
            f"| {e.card} | {e.regime.replace('_', ' ')} | {e.num_rows:,} | {e.median:.1%} "
            f"| {e.percentile_90:.0%} | {e.bias:.2f} |"
        )
        lines.append(line + (f" {e.within_80:.0%} |" if e.within_80 is not None else ""))
    return "\n".join(lines)


def worst_rows(tables: Mapping[str, Products], by_shape: Mapping[str, Floats]) -> str:
    """The worst large and thin product of each card, held out by shape."""
    lines = [
        "| card | shapes | m | n | k | measured ms | predicted ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for card, table in tables.items():
        size = np.abs(np.log(by_shape[card] / table.seconds))
        regime = regime_of(table.m, table.n, table.k)
        for i in (0, 1):
            at = int(np.argmax(np.where(regime == i, size, -1)))
            lines.append(
                f"| {card} | {REGIMES[i]} | {table.m[at]:.0f} | {table.n[at]:.0f} | {table.k[at]:.0f} "
                f"| {table.seconds[at] * 1e3:.4g} | {by_shape[card][at] * 1e3:.4g} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
