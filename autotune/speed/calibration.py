"""Rates of one card, fitted to kernels that were timed on it, and how far off predictions are with them.

Products, attention and what memory bounds are fitted one after the other, each by a module (fit_products,
fit_attention, fit_moving), from what the card's kind has without it. What was not timed stays as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from autotune.catalogue.gpus import Gpu
from autotune.catalogue.own_rates import OwnAttention, OwnMoving, OwnProducts, OwnRates
from autotune.speed import fit_attention, fit_moving, fit_products, moving, roofline
from autotune.speed.calibration_plan import PAGEABLE
from autotune.speed.fit_attention import AttentionTimes
from autotune.speed.fit_moving import MovingTime
from autotune.speed.fit_products import ProductTimes
from autotune.speed.matmul_cards import matmul_card
from autotune.speed.roofline import CardRates, Kernel

_LEAST_SHARE = 0.2
"""Least share of a time that is taken to be left when a kernel's start is taken away."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedKernel:
    """A kernel, and how long it took."""

    kernel: Kernel
    seconds: float
    """Median of the runs."""
    spread: float
    """Half of the range that holds the middle two thirds of the runs, as a share of the median."""
    num_weights: int = 1
    """Second operands of a product that took turns, so that none stays in the L2 cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Residual:
    """How far predictions of the timed kernels of one kind are off."""

    kind: str
    """Kind of kernel: of roofline.KINDS."""
    num_kernels: int
    median_before: float
    """Median of |predicted / measured - 1| with the rates of the card's kind."""
    ratio_before: float
    """Median of predicted / measured."""
    median_after: float
    """The same by the rates that were fitted to these kernels."""
    ratio_after: float


def fitted(gpu: Gpu, timed: Sequence[TimedKernel], host_factor: float | None) -> OwnRates:
    """The rates that fit; `gpu` is the card by its facts alone."""
    gpu = replace(gpu, rates=None)
    machine = roofline.ceilings(gpu)
    return OwnRates(
        products=_products(gpu, [t for t in timed if t.kernel.kind == "matmul"]),
        attention=tuple(_attention(machine, [t for t in timed if t.kernel.kind == "attention"])),
        moving=_moving(gpu, machine, timed),
        host_factor=host_factor,
    )


def residuals(gpu: Gpu, rates: OwnRates, timed: Iterable[TimedKernel]) -> list[Residual]:
    """How far off predictions are before and after, by kind of kernel; kinds of unknown rate are left out."""
    by_kind: dict[str, list[TimedKernel]] = {}
    for each in timed:
        if each.kernel.name != PAGEABLE:
            by_kind.setdefault(each.kernel.kind, []).append(each)
    found = []
    for kind, its in by_kind.items():
        before = _ratios(replace(gpu, rates=None), its)
        after = _ratios(replace(gpu, rates=rates), its)
        if before is not None and after is not None:
            found.append(
                Residual(
                    kind=kind,
                    num_kernels=len(its),
                    median_before=float(np.median(np.abs(before - 1))),
                    ratio_before=float(np.median(before)),
                    median_after=float(np.median(np.abs(after - 1))),
                    ratio_after=float(np.median(after)),
                )
            )
    return found


def _ratios(gpu: Gpu, timed: Sequence[TimedKernel]) -> Any:
    """Predicted over measured, as a step's kernels are priced; products as they were timed, in turns."""
    machine = roofline.ceilings(gpu)
    priced = roofline.kernel_seconds([each.kernel for each in timed], machine)
    if priced is None:
        return None
    seconds = np.array([one for one, _ in priced])
    for number, each in enumerate(timed):
        card = machine.products
        if each.kernel.kind == "matmul" and card and each.kernel.dtype in card.flop_per_second:
            rows = _product_times([each])
            seconds[number] = fit_products.predicted(card, each.kernel.dtype, rows)[0]
    return seconds / np.array([each.seconds for each in timed])


def _products(gpu: Gpu, timed: Sequence[TimedKernel]) -> OwnProducts | None:
    card = matmul_card(gpu, roofline.peaks_of(gpu))
    if card is None:
        return None
    by_dtype: dict[str, list[TimedKernel]] = {}
    for each in timed:
        if each.kernel.dtype in card.flop_per_second:
            by_dtype.setdefault(each.kernel.dtype, []).append(each)
    if not by_dtype:
        return None
    rows = {dtype: _product_times(its) for dtype, its in by_dtype.items()}
    deviation = fit_products.deviations(without=gpu.name)
    own = fit_products.fitted_products(card, rows, deviation=deviation)
    return fit_products.own_products(own, rows, fit_products.spreads(own, rows))


def _product_times(timed: Sequence[TimedKernel]) -> ProductTimes:
    batch, m, n, k = np.array([each.kernel.shape for each in timed], float).T
    return ProductTimes(
        batch=batch,
        m=m,
        n=n,
        k=k,
        seconds=np.array([each.seconds for each in timed]),
        num_weights=np.array([each.num_weights for each in timed], float),
    )


def _attention(machine: CardRates, timed: Sequence[TimedKernel]) -> Iterable[OwnAttention]:
    by_key: dict[tuple[str, str, bool], list[TimedKernel]] = {}
    for each in timed:
        by_key.setdefault(roofline.attention_key(each.kernel), []).append(each)
    for (family, dtype, is_backward), its in by_key.items():
        rates = machine.attention.get((family, dtype, is_backward))
        if rates is None or dtype not in ("float16", "bfloat16"):
            continue
        rows = _attention_times(its, machine.kernel_tail_seconds, is_backward=is_backward)
        own = fit_attention.fitted_attention(rates, rows)
        yield fit_attention.own_attention(
            own, rows, kernel=cast(Any, family), is_backward=is_backward
        )


def _attention_times(
    timed: Sequence[TimedKernel], tail_seconds: float, *, is_backward: bool
) -> AttentionTimes:
    samples, heads, key_heads, queries, keys, head_dim, is_causal = np.array(
        [each.kernel.shape for each in timed], float
    ).T
    return AttentionTimes(
        shape={
            "batch": samples,
            "heads": heads,
            "query_length": queries,
            "key_length": keys,
            "head_dim": head_dim,
            "is_causal": is_causal.astype(bool),
            "is_backward": is_backward,
            "key_heads": key_heads,
        },
        seconds=np.array([each.seconds for each in timed]),
        beside=tail_seconds,
    )


def _moving(gpu: Gpu, machine: CardRates, timed: Iterable[TimedKernel]) -> OwnMoving | None:
    rates = moving.rates_of(gpu)
    rows = []
    for each in timed:
        kernel = each.kernel
        if kernel.kind in ("matmul", "attention") or kernel.name == PAGEABLE:
            continue
        family = roofline.family_of(kernel, rates)
        is_sum = family == "reduction" and bool(kernel.shape)  # It has no rate of its own.
        if family not in rates.bytes_per_second or is_sum:
            continue
        tail = min(machine.kernel_tail_seconds, (1 - _LEAST_SHARE) * each.seconds)
        is_by_row, is_counted = len(kernel.shape) == 2, len(kernel.shape) == 1
        rows.append(
            MovingTime(
                family=family,
                bytes_moved=kernel.bytes_moved,
                rows=kernel.shape[0] if is_by_row else 0.0,
                row_length=kernel.shape[1] if is_by_row else 0.0,
                seconds=each.seconds - tail,
                elements=kernel.shape[0] if is_counted else 0.0,
                work=roofline.work_of(kernel) if is_counted else "",
            )
        )
    if not rows:
        return None
    return fit_moving.own_moving(fit_moving.fitted_moving(rates, rows), rows)
