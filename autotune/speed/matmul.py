"""Seconds of a matrix product by shape, dtype and card, and what evidence they rest on.

A product of m x k and k x n is cut into tiles of the result. The card's multiprocessors (SMs) work on
a tile each, in waves; a tile takes the longer of its arithmetic and of reading its slices of both
operands from the L2 cache, over k steps and some more to fill the pipeline and to write the tile. Few
tiles are made more by splitting k. Of a few tile shapes the quickest counts. Beside the waves memory is read
and written, but for what the L2 cache holds. Both overlap but for a soft corner, and each kernel has a start:

    start + (waves ^ p + memory ^ p) ^ (1 / p)

A `Behaviour` (autotune.catalogue.own_rates) holds the figures of this. `validation/kernels/fit_matmul.py`
fitted them to public tables of measured products (data/matmul.toml): of six cards each, and of cards with
HBM and of cards with GDDR memory jointly, for the cards that no table has. Float32 without tensor cores
has figures of its own, from two cards. How fast a card's SMs compute comes from public rates of square
products, by dtype, and where there are none from the datasheet, times what such cards reach of it
(autotune.speed.matmul_cards). Those rates were taken with random numbers over some seconds, so they
last; the tables' cards were rested, and up to a tenth quicker.

Held out errors: studies/kernels/matmul.md, `python -m validation.kernels.matmul`.

Not modelled
- Layouts: the tables have x W^T alone. Odd sizes, which cost 1 to 2 % more and misaligned ones a lot.
- Which kernel cuBLAS picks: neighbouring shapes differ by 5 to 10 %, on the L40S by 20 %.
- Operands that push each other out of the L2 cache and are read again. A figure for it did not
  transfer: with it the H100, left out, came out 13 % off rather than 5.
- Products of one to eight rows with a narrow result and a long k (no training has them).
- A result in another dtype than its operands, bias and other epilogues.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from autotune.catalogue.own_rates import Behaviour
from autotune.speed.origin import RatesFrom

Floats = NDArray[np.float64]

# Rows and columns of the tiles that cuBLAS's kernels are named after. More of them fit the tables worse, as
# cuBLAS does not pick the best of all. Tensor cores take no smaller ones; float32 without them does.
_TENSOR_TILES = np.array(
    [
        (256, 128),
        (128, 256),
        (128, 128),
        (128, 64),
        (64, 128),
        (64, 64),
        (128, 32),
        (32, 128),
        (16, 64),
    ],
    float,
)
_FLOAT32_TILES = np.array(
    [(128, 128), (128, 64), (64, 128), (64, 64), (128, 32), (32, 128), (64, 32), (32, 32)], float
)
_LARGEST_TILE = 256 * 128
_LEAST_SPLIT_K = 256  # [judgement] CUTLASS splits no finer
_MOST_SPLITS = 32

ELEMENT_BYTES = {"float32": 4, "tf32": 4, "float16": 2, "bfloat16": 2, "float8": 1, "int8": 1}
_LEAST_RESULT_BYTES = 2  # of float8 and int8 products as training makes them

REGIMES = ("large", "thin", "few_rows", "other")
"""Kinds of shape whose errors differ; regime_of tells them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MatmulCard:
    """A card as the time of a product sees it."""

    name: str
    num_sms: float
    l2_bytes: float
    memory_bytes_per_second: float
    """The datasheet's."""
    tensor_flop_per_second: float
    """Rate of 16-bit products without end; the L2 cache's rate goes with it. Of a card without tensor cores
    it is that of a card with as many lanes that has some."""
    behaviour: Behaviour
    """Figures of products on tensor cores."""
    float32: Behaviour
    """Figures of those of float32, which are on none."""
    has_tensor_cores: bool = True
    """Whether 16-bit products run on tensor cores; False: on the lanes of float32."""
    flop_per_second: Mapping[str, float] = field(hash=False)
    """Rate of products without end that lasts, by dtype."""
    rates_from: Mapping[str, RatesFrom] = field(hash=False)
    """Evidence behind the times, by dtype."""
    spread: tuple[float, ...] | None = None
    """Standard deviation of a time's logarithm, by REGIMES, where this very card was calibrated."""

    def with_rates(self, flop_per_second: Mapping[str, float]) -> MatmulCard:
        """Return the card with other rates of products without end, and an L2 cache that goes with them."""
        return replace(
            self,
            flop_per_second=flop_per_second,
            tensor_flop_per_second=tensor_rate(
                flop_per_second, has_tensor_cores=self.has_tensor_cores
            ),
        )


def tensor_rate(flop_per_second: Mapping[str, float], *, has_tensor_cores: bool) -> float:
    """Return the rate that the L2 cache's goes with, by the rates of products without end.

    Without tensor cores it is what those of a V100 would do beside as many lanes, since its cache feeds both.
    """
    if has_tensor_cores:
        return flop_per_second["float16"]
    return _TENSOR_OF_LANES * flop_per_second["float32"]


_TENSOR_OF_LANES = 8.0
"""Rate of a V100's tensor cores over that of its float32 lanes (its datasheet: 125 and 15.7 TFLOP/s)."""


def matmul_seconds(
    card: MatmulCard,
    dtype: str,
    batch: Floats,
    m: Floats,
    n: Floats,
    k: Floats,
    *,
    num_weights: float | Floats | None = None,
) -> Floats:
    """Seconds of `batch` products each of m x k by k x n, alone on the card, without the host's launch.

    All four are arrays of one length. The second operand is read from memory, the first from the L2 cache
    where it fits, as the operation before left it. `num_weights`: that many second operands take turns,
    as the tables' did. Raises KeyError for a dtype that the card has no rate for.
    """
    on_lanes, num_sms = dtype == "float32" or not card.has_tensor_cores, card.num_sms
    how = card.float32 if on_lanes else card.behaviour
    size_bytes = ELEMENT_BYTES[dtype]
    result_bytes = max(size_bytes, _LEAST_RESULT_BYTES)
    sm_l2_bytes_per_second = how.l2_bytes_per_flop * card.tensor_flop_per_second / num_sms
    l2_bytes_per_second = sm_l2_bytes_per_second * num_sms
    tiles = _FLOAT32_TILES if on_lanes else _TENSOR_TILES
    tile_m, tile_n = tiles[:, :1], tiles[:, 1:]
    sm_seconds = (
        2 * num_sms * tile_m * tile_n * (_LARGEST_TILE / (tile_m * tile_n)) ** how.tile_exponent
    )
    reading = (tile_m + tile_n) / sm_l2_bytes_per_second
    step_seconds = np.maximum(sm_seconds / card.flop_per_second[dtype], size_bytes * reading)
    fill_seconds = step_seconds
    if not on_lanes:
        fill_seconds = np.maximum(sm_seconds / card.tensor_flop_per_second, 2 * reading)
    fill_seconds = how.fill_steps * fill_seconds

    entries = batch * m * n
    per_sm = np.ceil(m / tile_m)
    per_sm *= np.ceil(n / tile_n)
    per_sm *= batch / num_sms
    splits = np.floor(1 / per_sm)
    np.minimum(splits, np.minimum(np.floor(k / _LEAST_SPLIT_K), _MOST_SPLITS), out=splits)
    np.maximum(splits, 1, out=splits)
    per_sm *= splits
    waves = np.maximum(per_sm, 1)
    waves += how.whole_waves * (np.ceil(per_sm) - waves)
    busy = k / splits
    busy *= step_seconds
    busy += fill_seconds
    busy *= waves
    summing = 4 * entries / l2_bytes_per_second * splits
    summing += how.split_seconds
    summing += busy
    # What can be split leaves half of the SMs idle: unsplit it takes one wave.
    unsplit = k * step_seconds
    unsplit += fill_seconds
    busy = np.where(splits > 1, np.minimum(summing, unsplit), busy)
    busy = busy.min(axis=0)

    weight_bytes = size_bytes * batch * k * n
    other_bytes = size_bytes * batch * m * k + result_bytes * entries
    all_bytes = weight_bytes + other_bytes
    l2_bytes = how.l2_share * card.l2_bytes
    kept = 1 / (1 + (all_bytes / l2_bytes) ** 2)
    from_l2 = kept * other_bytes
    if num_weights is not None:
        in_turn_bytes = other_bytes + num_weights * weight_bytes
        from_l2 += weight_bytes / (1 + (in_turn_bytes / l2_bytes) ** 2)
    moving = (all_bytes - from_l2) / (how.memory_share * card.memory_bytes_per_second)
    moving += from_l2 / (how.l2_warm * l2_bytes_per_second)
    longer, shorter = np.maximum(busy, moving), np.minimum(busy, moving)
    overlapped: Floats = longer * (1 + (shorter / longer) ** how.overlap) ** (1 / how.overlap)
    return how.start_seconds + overlapped


def regime_of(m: Floats, n: Floats, k: Floats) -> NDArray[np.intp]:
    """Index into REGIMES of each shape.

    few_rows: m below 128. thin: m from 1,024, n or k to 128. large: all from 1,024.
    """
    thinnest, is_tall = np.minimum(n, k), m >= 1024
    kinds = [m < 128, is_tall & (thinnest <= 128), is_tall & (thinnest >= 1024)]
    return np.select(kinds, [2, 1, 0], 3)
