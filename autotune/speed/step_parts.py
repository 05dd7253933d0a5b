"""A step's predicted time by cause, how sure each part is, and what evidence it rests on.

The spreads are those of the models of the kernels, from rows and cards that they were not fitted to
(autotune.speed.matmul_cards, attention, moving); what nothing published tells is [judgement].
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from autotune.speed import attention, host, moving, roofline
from autotune.speed.matmul_cards import log_spread
from autotune.speed.origin import RatesFrom
from autotune.speed.roofline import CardRates, Kernel
from autotune.speed.sureness import Z_OF_80_PERCENT, Part, Parts, added, part

_CAUSES = {
    "matmul": "matmul",
    "attention": "attention",
    "elementwise": "memory",
    "lists": "memory",
    "reduction": "memory",
    "dequantize": "dequantize",
    "copy_host": "transfer",
    "copy_aside": "transfer",
}
"""Cause of each of roofline.KINDS; what the host is late with is `host`."""

# [judgement] A rate by a share of the datasheet alone, of a shape that is not known.
_WITHOUT_TABLE = 0.3
HOST_SPREAD = math.log(host.HOST_FACTORS[1] / host.HOST_FACTORS[0]) / (2 * Z_OF_80_PERCENT)
"""Spread of what the host takes: 80 % of hosts are taken to lie within the published range."""
OWN_HOST_SPREAD = 0.2
"""The same where this machine's host was measured. [judgement] What is left are programs that do more."""


def parts(
    kernels: Iterable[Kernel], machine: CardRates, stretches: host.Stretches | None = None
) -> Parts | None:
    """Parts of roofline.seconds of the same; None where that is None."""
    kernels = tuple(kernels)
    each = roofline.kernel_seconds(kernels, machine)
    if each is None:
        return None
    queues = roofline.queued(kernels, each, machine)
    late_seconds = queues.late_seconds(stretches)
    slow_seconds = queues.late_seconds(stretches, host_factor=_slow_factor(machine))
    late = replace(of_host(late_seconds, machine), slow_seconds=slow_seconds - late_seconds)
    found: Parts = {"host": late}
    spreads = _spreads(kernels, machine)
    seen_share = queues.seen_share(stretches)
    for kernel, (seconds, _), spread in zip(kernels, each, spreads, strict=True):
        share = seen_share if kernel.kind == "copy_aside" else 1
        its = part(kernel.count * seconds * share, spread, _evidence(kernel, machine))
        found = added(found, {_CAUSES[kernel.kind]: its})
    return found


def of_host(seconds: float, machine: CardRates) -> Part:
    """Seconds that the host takes."""
    is_own = machine.host_from is RatesFrom.THIS_CARD
    spread = OWN_HOST_SPREAD if is_own else HOST_SPREAD
    slow_seconds = (_slow_factor(machine) - 1) * seconds
    return replace(part(seconds, spread, machine.host_from), slow_seconds=slow_seconds)


def _slow_factor(machine: CardRates) -> float:
    """Times that a slow host takes: one in ten takes longer."""
    is_own = machine.host_from is RatesFrom.THIS_CARD
    return math.exp(Z_OF_80_PERCENT * OWN_HOST_SPREAD) if is_own else host.HOST_FACTORS[1]


def of_links(seconds: float, spread: float) -> Part:
    """Seconds of communication between GPUs, over links that differ so much (links.Link.spread)."""
    return part(seconds, spread, RatesFrom.CARDS_LIKE_IT)


def _evidence(kernel: Kernel, machine: CardRates) -> RatesFrom:
    """Evidence that a kernel's time rests on."""
    if kernel.kind == "matmul":
        card = machine.products
        is_by_shape = card is not None and kernel.shape and kernel.dtype in card.rates_from
        return card.rates_from[kernel.dtype] if card and is_by_shape else RatesFrom.DATASHEET
    if kernel.kind == "attention":
        return machine.attention[roofline.attention_key(kernel)].rates_from
    return moving.evidence(machine.moving, roofline.family_of(kernel, machine.moving))


def _spreads(kernels: Sequence[Kernel], machine: CardRates) -> list[float]:
    found = [_spread(kernel, machine) for kernel in kernels]
    card = machine.products
    if card is None:
        return found
    of_dtype: dict[str, list[int]] = {}
    for index, kernel in enumerate(kernels):
        if kernel.kind == "matmul" and kernel.shape and kernel.dtype in card.rates_from:
            of_dtype.setdefault(kernel.dtype, []).append(index)
    for dtype, indices in of_dtype.items():
        _, m, n, k = np.array([kernels[index].shape for index in indices], float).T
        for index, spread in zip(indices, log_spread(card, dtype, m, n, k).tolist(), strict=True):
            found[index] = spread
    return found


def _spread(kernel: Kernel, machine: CardRates) -> float:
    """The spread of a kernel; of a product, where no table has it."""
    if kernel.kind == "matmul":
        return _WITHOUT_TABLE
    if kernel.kind == "attention":
        rates = machine.attention[roofline.attention_key(kernel)]
        if not kernel.shape:
            return max(rates.spread.values())
        samples, heads, _, queries, *_ = kernel.shape
        regime = attention.regime_of(rates, batch=samples, heads=heads, query_length=queries)
        return rates.spread[attention.REGIMES[int(regime)]]
    family = roofline.family_of(kernel, machine.moving).removesuffix("_backward")
    spread = machine.moving.spread
    return spread.get(family, spread["named"])
