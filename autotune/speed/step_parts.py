"""A step's predicted time by cause, and how sure each part is.

The spreads are those of the models of the kernels, from rows and cards that they were not fitted to
(autotune.speed.matmul_cards, attention, moving); what nothing published tells is [judgement].
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from autotune.speed import attention, host, roofline
from autotune.speed.matmul_cards import log_spread
from autotune.speed.roofline import CardRates, Kernel
from autotune.speed.sureness import Z_OF_80_PERCENT, Part, Parts, added

_CAUSES = {
    "matmul": "matmul",
    "attention": "attention",
    "elementwise": "memory",
    "reduction": "memory",
    "dequantize": "dequantize",
    "copy_host": "transfer",
}
"""Cause of each of roofline.KINDS; what the host is late with is `host`."""

# [judgement] A rate by a share of the datasheet alone, of a shape that is not known.
_WITHOUT_TABLE = 0.3
LINK_SPREAD = 0.4
"""Spread of communication between GPUs. [judgement] PCIe machines differ by more, NVLink's by less
(studies/kernels/LINKS.md)."""
HOST_SPREAD = math.log(host.HOST_FACTORS[1] / host.HOST_FACTORS[0]) / (2 * Z_OF_80_PERCENT)
"""Spread of what the host takes: 80 % of hosts are taken to lie within the published range."""


def parts(
    kernels: Iterable[Kernel], machine: CardRates, stretches: host.Stretches | None = None
) -> Parts | None:
    """Parts of roofline.seconds of the same; None where that is None."""
    kernels = tuple(kernels)
    whole = roofline.seconds(kernels, machine, stretches)
    each = roofline.kernel_seconds(kernels, machine)
    if whole is None or each is None:
        return None
    late = Part(seconds=whole.total_seconds - whole.gpu_seconds, spread=HOST_SPREAD)
    found: Parts = {"host": late}
    spreads = _spreads(kernels, machine)
    for kernel, (seconds, _), spread in zip(kernels, each, spreads, strict=True):
        part = Part(seconds=kernel.count * seconds, spread=spread)
        found = added(found, {_CAUSES[kernel.kind]: part})
    return found


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
