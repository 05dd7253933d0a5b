"""Predicted against published times of attention kernels, held out by shape and by card.

Run: python -m validation.kernels.attention

Writes studies/kernels/ATTENTION.md and attention.json. `held out by shape`: five folds of shapes, each
predicted with the fits of the other four. `card left out`: a card's shares and block costs are the mean of
the kernel's other cards; what surrounds the kernel in the table is its own, as it is no part of the kernel.
`as published`: rows of others.csv, which are of dense calls.
"""

from __future__ import annotations

import functools
import itertools
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.catalogue.gpus import find_gpu
from autotune.speed import attention
from autotune.speed.attention import (
    REGIMES,
    attention_seconds,
    rates_from_rows,
    rates_of,
    regime_of,
)
from autotune.speed.origin import RatesFrom
from validation.kernels.fit_attention import (
    KERNEL_NAMES,
    SHAPE,
    Fitted,
    Published,
    all_rows,
    forward_fits,
    forward_table,
    published,
    shapes_of,
    table_seconds,
)
from validation.kernels.public_tables import STUDY, Columns, chosen, errors, fold_of

NUM_FOLDS = 5
LONG = 512
"""Shortest sequence that the targets are about."""
TARGETS = {"held out by shape": (0.08, 0.25), "card left out": (0.15, 0.40)}
_OF_80_PERCENT = 1.2816
"""Standard deviations of a normal distribution on either side that hold 80 % of it."""


@functools.cache
def fits() -> dict[tuple[str, str], Fitted]:
    return forward_fits()


def _of(table: Columns, card: str, kernel: str) -> NDArray:
    names = [name for name, known in KERNEL_NAMES.items() if known == kernel]
    mask: NDArray = (table["card"] == card) & (table["kernel"] == names[0])
    return mask


@functools.cache
def held_out() -> NDArray:
    """Predicted seconds of every row of the table by the fits that have not seen its shape."""
    table = forward_table()
    folds = fold_of(table, SHAPE, NUM_FOLDS)
    predicted = np.full(len(folds), np.nan)
    for fold in range(NUM_FOLDS):
        for (card, kernel), fitted in forward_fits(folds != fold).items():
            mask = _of(table, card, kernel) & (folds == fold)
            predicted[mask] = table_seconds(fitted, chosen(table, mask))
    return predicted


@functools.cache
def left_out() -> NDArray:
    """Predicted seconds by the other cards with that kernel; nan where there is none."""
    table = forward_table()
    rows = all_rows(fits().values())
    predicted = np.full(len(table["ms"]), np.nan)
    for (card, kernel), fitted in fits().items():
        others = [row for row in rows if row["card"] != card and row["kernel"] == kernel]
        if not others:
            continue
        rates = rates_from_rows(find_gpu(card), kernel, others)
        assert rates is not None
        mask = _of(table, card, kernel)
        predicted[mask] = table_seconds(fitted, chosen(table, mask), rates)
    return predicted


def regimes() -> NDArray:
    table = forward_table()
    found = np.zeros(len(table["ms"]), int)
    for (card, kernel), fitted in fits().items():
        mask = _of(table, card, kernel)
        rows = chosen(table, mask)
        found[mask] = regime_of(
            fitted.rates(), batch=rows["batch"], heads=rows["heads"], query_length=rows["seq"]
        )
    return found


def _spread(ratios: NDArray) -> float:
    return max(float(np.quantile(np.abs(np.log(ratios)), 0.8)) / _OF_80_PERCENT, 0.05)


@functools.cache
def spreads() -> dict[str, dict[str, list[float]]]:
    """Spread by origin, direction and regime: 80 % of what was held out lies within the 80 % interval.

    Backward: the forward pass's, widened by what published backward rows of cards that no fit has seen
    are off by.
    [judgement] datasheet: half as wide again as cards like it.
    """
    measured, kinds = forward_table()["ms"] * 1e-3, regimes()
    found: dict[str, dict[str, list[float]]] = {}
    for origin, predicted in (
        (RatesFrom.THIS_CARD, held_out()),
        (RatesFrom.CARDS_LIKE_IT, left_out()),
    ):
        known = ~np.isnan(predicted)
        forward = [
            _spread(predicted[mask] / measured[mask])
            for mask in (known & (kinds == regime) for regime in range(len(REGIMES)))
        ]
        unseen = [row for row in published() if row.direction == "backward" and not row.is_fitted]
        widening = _spread(np.array([row["predicted / published"] for row in as_published(unseen)]))
        backward = [float(np.hypot(value, widening)) for value in forward]
        found[origin.name.lower()] = {"forward": forward, "backward": backward}
    like = found[RatesFrom.CARDS_LIKE_IT.name.lower()]
    found[RatesFrom.DATASHEET.name.lower()] = {
        direction: [1.5 * value for value in values] for direction, values in like.items()
    }
    return found


def as_published(rows: list[Published]) -> list[dict[str, Any]]:
    """Published rows beside predicted times, without a launch."""
    found = []
    parameters = all_rows(fits().values())
    for row in rows:
        rates = rates_from_rows(
            find_gpu(row.card),
            row.kernel,
            parameters,
            dtype="float16",
            is_backward=row.direction == "backward",
        )
        assert rates is not None
        times = attention_seconds(
            rates, **shapes_of([row]), is_backward=row.direction == "backward"
        )
        predicted = np.asarray(times).item()
        found.append(
            {
                "card": row.card,
                "kernel": row.kernel,
                "direction": row.direction,
                "length": row.length,
                "head_dim": row.head_dim,
                "causal": row.is_causal,
                "fitted": row.is_fitted,
                "published us": round(row.seconds * 1e6, 1),
                "predicted us": round(predicted * 1e6, 1),
                "predicted / published": float(predicted / row.seconds),
            }
        )
    return found


def record() -> dict[str, Any]:
    table = forward_table()
    measured = table["ms"] * 1e-3
    is_long = table["seq"] >= LONG
    kinds = regimes()
    by_card: dict[str, list[dict[str, Any]]] = {}
    worst: dict[str, list[dict[str, Any]]] = {}
    inside: dict[str, dict[str, float]] = {}
    for name, predicted in (("held out by shape", held_out()), ("card left out", left_out())):
        known = ~np.isnan(predicted)
        rows = [
            {"card": card, "kernel": kernel, "lengths": label}
            | errors(predicted[mask], measured[mask])
            for card, kernel in fits()
            for label, lengths in (("512 and more", is_long), ("below 512", ~is_long))
            if (mask := _of(table, card, kernel) & known & lengths).any()
        ]
        rows += [
            {"card": "all", "kernel": "all", "lengths": label}
            | errors(predicted[known & lengths], measured[known & lengths])
            for label, lengths in (("512 and more", is_long), ("below 512", ~is_long))
        ]
        by_card[name] = rows
        off = np.where(known & is_long, np.abs(np.log(predicted / measured)), 0)
        worst[name] = [
            {"card": str(table["card"][i])}
            | {column: int(table[column][i]) for column in SHAPE}
            | {
                "measured ms": float(table["ms"][i]),
                "ratio": round(float(predicted[i] / measured[i]), 2),
            }
            for i in np.argsort(-off)[:8]
        ]
        origin = RatesFrom.THIS_CARD if name == "held out by shape" else RatesFrom.CARDS_LIKE_IT
        spread = np.array(spreads()[origin.name.lower()]["forward"])
        within = np.abs(np.log(predicted / measured)) <= _OF_80_PERCENT * spread[kinds]
        inside[name] = {
            regime: round(float(within[known & (kinds == index)].mean()), 3)
            for index, regime in enumerate(REGIMES)
        }
    return {
        "targets": TARGETS,
        "errors": by_card,
        "worst": worst,
        "inside the 80 % interval": inside,
        "published": as_published(published()),
        "today's constants": {
            f"{card} {kernel}": str(rates.rates_from)
            for card, kernel in itertools.product(
                ("T4", "RTX 4090", "A100-SXM4-80GB", "H100 80GB HBM3", "B200"), attention.KERNELS
            )
            if (rates := rates_of(find_gpu(card), kernel, dtype="float16")) is not None
        },
    }


def markdown(found: dict[str, Any]) -> str:
    lines = [
        "# Attention kernels: predicted against published times",
        "",
        "Made by `python -m validation.kernels.attention` (2 CPU cores, no GPU). Measured times are"
        " the public tables of"
        " `tables/`; predicted ones are `autotune.speed.attention`, with what surrounds the kernel"
        " in the tables"
        " (a start, and the writing of the key-value cache) added. Errors are shares of the measured time.",
    ]
    for name, rows in found["errors"].items():
        median, p90 = found["targets"][name]
        lines += [
            "",
            f"## {name.capitalize()}",
            "",
            f"Target for 512 tokens and more: median {median:.0%}, 90th percentile {p90:.0%}.",
            "",
            "| card | kernel | lengths | rows | median error | p90 | median ratio |",
            "|---|---|---|---:|---:|---:|---:|",
        ]
        lines += [
            f"| {row['card']} | {row['kernel']} | {row['lengths']} | {row['rows']} | {row['median']:.1%}"
            f" | {row['p90']:.1%} | {row['median ratio']:.2f} |"
            for row in sorted(rows, key=lambda row: -row["median"])
        ]
        shares = ", ".join(
            f"{regime} {share:.0%}"
            for regime, share in found["inside the 80 % interval"][name].items()
        )
        lines += ["", f"Inside the 80 % interval: {shares}.", "", "Worst rows of 512 and more:", ""]
        lines += [f"- {json.dumps(row)}" for row in found["worst"][name]]
    lines += [
        "",
        "## As published",
        "",
        "Dense calls, from `tables/others.csv`; predicted over published, by kernel and card. Rows"
        " that a fit has seen"
        " are marked.",
        "",
        "| kernel | direction | card | rows | seen | median ratio | from | to |",
        "|---|---|---|---:|---|---:|---:|---:|",
    ]
    groups: dict[tuple[str, ...], list[float]] = {}
    for row in found["published"]:
        key = (row["kernel"], row["direction"], row["card"], "yes" if row["fitted"] else "no")
        groups.setdefault(key, []).append(row["predicted / published"])
    lines += [
        f"| {key[0]} | {key[1]} | {key[2]} | {len(ratios)} | {key[3]} | {np.median(ratios):.2f}"
        f" | {min(ratios):.2f}"
        f" | {max(ratios):.2f} |"
        for key, ratios in sorted(groups.items(), key=lambda item: -abs(np.log(np.median(item[1]))))
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    found = record()
    (STUDY / "attention.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    text = markdown(found)
    (STUDY / "ATTENTION.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
