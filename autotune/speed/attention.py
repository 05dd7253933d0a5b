"""A fused attention kernel -> seconds, by its shape, the kernel and the card.

A kernel cuts the queries of every head into blocks of 64 rows. A block goes through the keys that its
rows see, 64 columns at a time, and costs some columns more to begin and end. All blocks together take
their columns at the card's rate (`busy`). The block with most columns takes them one after another
(`longest`), however few blocks there are: that is what short batches with few heads wait for. The time is
a power mean of both, so short sequences, few heads and windows cost more than their arithmetic says.
Beside the main kernel of a backward pass run smaller ones, which memory bounds (BESIDE).

`rates_of` gives the parameters of a kernel on a card, once per card; `attention_seconds` takes arrays of
shapes. data/attention.toml holds the parameters, validation/kernels/fit_attention.py makes them from
studies/kernels/tables, and studies/kernels/ATTENTION.md says how far off they are.

A card without a table gets the shares of the instructions' peak that others reach with the same kernel:
flash (FlashAttention-2), efficient and flex use the tensor instructions of Ampere, which run at half the peak
on Hopper and at a quarter on the B200. Beside tensor products a block computes a softmax, which takes
as long on a GeForce card, whose products are half as fast: it reaches a larger share of its peak.

Known limitations
- The forward pass is known from six cards, the backward pass from three (data/attention.toml names them).
- Dropout inside the kernel, masks other than causal and window, and padding cost nothing here.
- Clocks that fall under a long load are not modelled.
"""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from autotune.catalogue.gpus import Gpu
from autotune.speed import moving
from autotune.speed.arrays import Numbers, Truths, either, larger, smaller
from autotune.speed.origin import RatesFrom

_TABLE = Path(__file__).with_name("data") / "attention.toml"

KERNELS = ("flash", "flash3", "cudnn", "efficient", "flex")
"""FlashAttention 2 and 3, cuDNN's, PyTorch's memory-efficient one, flex_attention."""

BLOCK_ROWS = 64
"""Queries in a block. Tiles are of 64 to 192 rows; 64 fits the tables of four cards best, as causal work
within a tile is skipped in part."""

BACKWARD_PRODUCTS = 2.5
"""Matrix products of the backward pass for each of the forward pass: five to two (arXiv 2307.08691)."""

# flex_attention against FlashAttention-2 on the A100, causal (pytorch.org/blog/flexattention): [judgement] on
# other cards too, for which nothing was found.
_FLEX_OF_FLASH = {False: 0.90, True: 0.85}
# The memory-efficient kernel takes float32 through tensor cores in several products: 208 ms against 49.8 for
# 160 heads of 128, 8,096 long, and 105 against 25.5 causal (facebookresearch/xformers pull request
# 389, A100).
_FLOAT32_OF_FLOAT16 = 0.24
_INSTRUCTIONS_OF_AMPERE = ("flash", "efficient", "flex")
_DATA_CENTRE = frozenset({(8, 0), (9, 0), (10, 0), (10, 3)})
"""Compute capabilities whose SMs have 164 KiB of shared memory and more; the others have 100 or less."""
# What such instructions reach of the dense peak: wgmma runs at twice mma.sync's rate on Hopper, tcgen05 at
# four times on 10.x: 1,024, 2,048 and 8,192 products per SM and clock of A100, H100 and B200 datasheets.
_OF_PEAK_BY_MAJOR = {9: 1 / 2, 10: 1 / 4}


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """Work of the kernels beside the main one of a backward pass, in 16 bits."""

    query_bytes: float
    """Bytes for each value of the queries: the output and its gradient are multiplied and summed (2 + 2), a
    float32 gradient of the queries is cleared (4), and turned into 16 bits at the end (4 + 2)."""
    expanded_bytes: float = 0.0
    """Bytes for each value of keys and of values, once for each head of the queries, where heads share keys:
    the gradients of every head are read."""
    key_bytes: float = 0.0
    """Bytes for each value of keys and of values, where heads share keys."""
    num_kernels: int = 2
    num_shared_kernels: int = 2
    """Number of kernels besides, where heads share keys."""
    sums_as: str = "elementwise"
    """Family of moving.FAMILIES that the kernels for shared keys are as fast as."""


BESIDE = {
    "flash": Beside(query_bytes=14, expanded_bytes=2, key_bytes=2, sums_as="reduction"),
    "cudnn": Beside(query_bytes=14, expanded_bytes=2, key_bytes=2),
    "flash3": Beside(query_bytes=14, key_bytes=4 + 4 + 2, num_shared_kernels=4),
}
"""Kernels beside the main one, by kernel. The memory-efficient one does their work itself
(kKernelComputesDelta, in 16 bits).

flash: flash_bwd_dot_do_o_kernel<Clear_dQaccum> and flash_bwd_convert_dq_kernel (flash-attention 2.8
flash_bwd_launch_template.h); torch 2.13 flash_api.cpp sums the gradients of heads that share a key by
at::sum. cudnn: compute_dot_do_o_specialized<true>, convert_dq_to_16bits and two fmha_reduce_head, as cuDNN 9
names them.
flash3: hopper/flash_bwd_launch_template.h, which adds up the gradients of shared keys in float32.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRates:
    """Parameters of one attention kernel in one direction on one card."""

    flop_per_second: tuple[tuple[float, float], ...]
    """(head_dim, rate) of long sequences, by head_dim; the rate is linear between."""
    start_columns: float
    """Columns of keys whose work a block's begin and end are worth."""
    alone: float
    """Share of an SM's time that one block needs for its columns when it has the SM to itself."""
    blend: float
    """Exponent of the power mean of busy and longest."""
    chain_seconds: float
    """Seconds of the longest block beside its columns."""
    num_sms: int
    """Streaming multiprocessors; 0 where they are not known, and few blocks then cost no more."""
    rates_from: RatesFrom
    spread: Mapping[str, float] = field(hash=False)
    """Standard deviation of ln(predicted / measured), by regime_of."""
    beside: Beside | None = None
    """Kernels beside the main one; None where there are none, or their rates are not known."""
    beside_bytes_per_second: float = math.inf
    sums_bytes_per_second: float = math.inf
    """Rate of the kernels that shared keys need."""

    def rate(self, head_dim: Numbers) -> Numbers:
        """FLOP/s of long sequences. Below the smallest known head_dim it falls with the root of it.

        The softmax takes as long for a small head: from 128 to 64 the rate falls to 0.76, and that
        goes on to 0.68 from 64 to 32.
        """
        dims, rates = zip(*self.flop_per_second, strict=True)
        known: Numbers = np.interp(head_dim, dims, rates)
        return known * smaller(head_dim / dims[0], 1.0) ** 0.5


def columns(
    query_length: Numbers, key_length: Numbers, window: Numbers, is_causal: Truths
) -> tuple[Numbers, Numbers, Numbers]:
    """Blocks of a head, columns of all of them together, and columns of the longest one.

    `window`: keys that a query sees, itself included; 0 is all. A window without causality is taken to lie
    before the query, as every windowed model of Transformers has it.
    """
    rows = float(BLOCK_ROWS)
    num_blocks = -(-query_length // rows)
    seen = either(window > 0, smaller(window, key_length), key_length)
    # The last query sees the last key; block i then sees offset + (i + 1) rows, at most window + rows.
    offset = larger(key_length - query_length, 0.0)
    most = smaller(seen + rows, offset + num_blocks * rows)
    growing = smaller(larger((most - offset) // rows, 0.0), num_blocks)
    causal = growing * offset + rows * growing * (growing + 1) / 2 + (num_blocks - growing) * most
    return (
        num_blocks,
        either(is_causal, causal, num_blocks * seen),
        either(is_causal, most, seen),
    )


def attention_seconds(
    rates: AttentionRates,
    *,
    batch: Numbers,
    heads: Numbers,
    query_length: Numbers,
    key_length: Numbers,
    head_dim: Numbers,
    is_causal: Truths = True,
    window: Numbers = 0.0,
    is_backward: bool = False,
    key_heads: Numbers = 0.0,
) -> Numbers:
    """Seconds of one pass, by shape: numbers or arrays that broadcast. Its first launch is not in it.

    `key_heads` of 0: as many as heads.
    """
    num_blocks, total, longest = columns(query_length, key_length, window, is_causal)
    products = BACKWARD_PRODUCTS if is_backward else 1.0
    column_seconds = products * 4 * BLOCK_ROWS * head_dim / rates.rate(head_dim)
    busy = batch * heads * (total + num_blocks * rates.start_columns) * column_seconds
    chain = longest * rates.num_sms * rates.alone * column_seconds + rates.chain_seconds
    blend = rates.blend
    seconds: Numbers = (busy**blend + chain**blend) ** (1 / blend)
    if rates.beside is None:
        return seconds
    queries = batch * heads * query_length * head_dim
    keys = batch * key_length * head_dim
    return seconds + _beside_seconds(rates, rates.beside, queries, keys, heads, key_heads)


def _beside_seconds(
    rates: AttentionRates,
    beside: Beside,
    queries: Numbers,
    keys: Numbers,
    heads: Numbers,
    key_heads: Numbers,
) -> Numbers:
    """Seconds of the kernels beside the main one: `queries` values, and `keys` of a head of keys."""
    moved = beside.query_bytes * queries / rates.beside_bytes_per_second
    summed = 2 * keys * (heads * beside.expanded_bytes + key_heads * beside.key_bytes)
    is_shared = (key_heads > 0) & (key_heads < heads)
    started = moving.KERNEL_TAIL_SECONDS * beside.num_kernels
    shared = moving.KERNEL_TAIL_SECONDS * beside.num_shared_kernels
    return moved + started + either(is_shared, summed / rates.sums_bytes_per_second + shared, 0.0)


REGIMES = ("short", "few blocks", "many blocks")


def regime_of(
    rates: AttentionRates, *, batch: Numbers, heads: Numbers, query_length: Numbers
) -> Numbers:
    """Index into REGIMES: shorter than 512, fewer than four blocks for each SM, or more."""
    blocks = batch * heads * -(-query_length // BLOCK_ROWS)
    return either(query_length < 512, 0, either(blocks < 4 * rates.num_sms, 1, 2))


# --- parameters of a card


@functools.cache
def table() -> dict[str, Any]:
    """Return the content of data/attention.toml."""
    return tomllib.loads(_TABLE.read_text(encoding="utf-8"))


def instruction_peak(gpu: Gpu, kernel: str, dtype: str) -> float | None:
    """FLOP/s of the tensor instructions that a kernel uses; None when the card's are unknown.

    Float32 goes through tensor cores by the memory-efficient kernel alone, in several products.
    """
    capability = gpu.compute_capability
    if dtype == "float32" or (dtype == "bfloat16" and not gpu.has_bfloat16):
        vector = gpu.peak_flop_per_second.get("float32")
        if dtype == "bfloat16" or not gpu.has_bfloat16 or kernel != "efficient":
            return vector
        half = instruction_peak(gpu, kernel, "float16")
        return None if half is None else _FLOAT32_OF_FLOAT16 * half
    peak = gpu.peak_flop_per_second.get(dtype)
    if peak is None or capability is None or kernel not in _INSTRUCTIONS_OF_AMPERE:
        return peak
    return peak * _OF_PEAK_BY_MAJOR.get(capability[0], 1.0)


def share_at_half_rate(share: float, kernel: str) -> float:
    """Share of the peak where products take twice as long, from the share where they do not.

    Products take 1 and everything else v, together (1 + v^p)^(1/p) = 1 / share; with products of 2 it is
    (2^p + v^p)^(1/p). [judgement] p of 4, as they overlap: others.csv's RTX 4090 and RTX 4060 Ti test it; and
    of 1 for the memory-efficient kernel, which is not pipelined: 0.55 to 0.62 of flash on a card that
    is not named (Dao-AILab/flash-attention issue 416), 0.43 on another (NVIDIA/TileGym pull request 49).
    """
    overlap = 1 if kernel == "efficient" else 4
    rest = max(share**-overlap - 1, 0.0)
    return float(2 / (2**overlap + rest) ** (1 / overlap))


@functools.lru_cache(maxsize=512)
def rates_of(
    gpu: Gpu, kernel: str, *, dtype: str = "bfloat16", is_backward: bool = False
) -> AttentionRates | None:
    """Parameters of a kernel on a card; None where the catalogue does not know the card's rate.

    A card that the table does not name takes the mean of those that have the kernel. Off Hopper and the B200
    cuDNN is taken to be as quick as flash: 0.82 to 1.0 times on A100, A10G, L40S and RTX PRO 6000
    (huggingface/transformers pull request 48163), 1.05 to 1.15 on 8.x (pytorch/pytorch 192799).
    """
    assert kernel in KERNELS, kernel
    own = _own(gpu, kernel, dtype, is_backward)
    return own or rates_from_rows(
        gpu, kernel, table()["kernel"], dtype=dtype, is_backward=is_backward
    )


def _own(gpu: Gpu, kernel: str, dtype: str, is_backward: bool) -> AttentionRates | None:
    """Parameters that were measured on this very card; None where they were not."""
    if gpu.rates is None or dtype not in ("float16", "bfloat16"):
        return None
    by_kernel = {
        each.kernel: each for each in gpu.rates.attention if each.is_backward == is_backward
    }
    scale, stand_in = _stands_for(gpu, kernel, is_backward)
    if kernel in by_kernel:
        scale, stand_in = 1.0, kernel
    own = by_kernel.get(stand_in)  # type: ignore[call-overload]  # any text
    if own is None:
        return None
    return AttentionRates(
        flop_per_second=tuple((dim, scale * rate) for dim, rate in sorted(own.flop_per_second)),
        start_columns=own.start_columns,
        alone=own.alone,
        blend=own.blend,
        chain_seconds=own.chain_seconds,
        num_sms=gpu.num_sms or 0,
        rates_from=RatesFrom.THIS_CARD if scale == 1 else RatesFrom.CARDS_LIKE_IT,
        spread=dict(zip(REGIMES, own.spread, strict=True)),
        **beside_of(gpu, stand_in, is_backward=is_backward),
    )


def beside_of(gpu: Gpu, kernel: str, *, is_backward: bool) -> dict[str, Any]:
    """Fields of AttentionRates about the kernels beside a pass of a kernel; empty where there are none."""
    beside = BESIDE.get(kernel) if is_backward else None
    rates = moving.rates_of(gpu).bytes_per_second
    if beside is None or "elementwise" not in rates:
        return {}
    return {
        "beside": beside,
        "beside_bytes_per_second": rates["elementwise"],
        "sums_bytes_per_second": rates[beside.sums_as],
    }


def rates_from_rows(
    gpu: Gpu,
    kernel: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    dtype: str = "bfloat16",
    is_backward: bool = False,
) -> AttentionRates | None:
    """rates_of by these rows of data/attention.toml."""
    scale, kernel = _stands_for(gpu, kernel, is_backward)
    direction = "backward" if is_backward else "forward"
    peak = instruction_peak(gpu, kernel, dtype)
    if peak is None:
        return None
    of_kernel = [row for row in rows if row["kernel"] == kernel]
    found, is_own = _nearest(gpu, of_kernel, direction)
    shares = _mean_shares(found, "share")
    if not is_own and is_backward:
        forward, is_own_forward = _nearest(gpu, of_kernel, "forward")
        ratio = _mean_shares(found, "of_forward")
        shares = {
            dim: share * ratio[dim]
            for dim, share in _forward_shares(gpu, kernel, forward, is_own_forward).items()
            if dim in ratio
        }
    elif not is_own:
        shares = _forward_shares(gpu, kernel, found, is_own)
    rates_from = RatesFrom.CARDS_LIKE_IT
    if is_own and scale == 1 and dtype in ("float16", "bfloat16"):
        rates_from = RatesFrom.THIS_CARD
    elif not gpu.num_sms or gpu.compute_capability is None or gpu.compute_capability < (8, 0):
        # Turing and Volta have none of Ampere's instructions, and no table.
        rates_from = RatesFrom.DATASHEET
    spread = table()["spread"][rates_from.name.lower()][direction]
    return AttentionRates(
        flop_per_second=tuple(
            sorted((float(dim), scale * share * peak) for dim, share in shares.items())
        ),
        start_columns=_mean(found, "start_columns"),
        alone=_mean(found, "alone"),
        blend=_mean(found, "blend"),
        chain_seconds=_mean(found, "chain_microseconds") * 1e-6,
        num_sms=gpu.num_sms or 0,
        rates_from=rates_from,
        spread=dict(zip(REGIMES, spread, strict=True)),
        **beside_of(gpu, kernel, is_backward=is_backward),
    )


def _nearest(
    gpu: Gpu, rows: Sequence[Mapping[str, Any]], direction: str
) -> tuple[list[Mapping[str, Any]], bool]:
    """(rows of the card, else of cards like it, else all; whether they are the card's own)."""
    rows = [row for row in rows if row["direction"] == direction]
    if own := [row for row in rows if row["card"] == gpu.name]:
        return own, True
    alike = [
        row for row in rows if row["is_data_centre"] == (gpu.compute_capability in _DATA_CENTRE)
    ]
    return alike or rows, False


def _forward_shares(
    gpu: Gpu, kernel: str, rows: Sequence[Mapping[str, Any]], is_own: bool
) -> dict[str, float]:
    shares = _mean_shares(rows, "share")
    if not is_own and gpu.has_half_tensor_rate and kernel in _INSTRUCTIONS_OF_AMPERE:
        return {dim: share_at_half_rate(share, kernel) for dim, share in shares.items()}
    return shares


def _stands_for(gpu: Gpu, kernel: str, is_backward: bool) -> tuple[float, str]:
    """(factor on its rate, the kernel that the table knows) for a kernel on a card."""
    major = gpu.compute_capability[0] if gpu.compute_capability else 0
    if kernel == "flex":
        return _FLEX_OF_FLASH[is_backward], "flash"
    if (kernel == "cudnn" and major not in (9, 10)) or (kernel == "flash3" and major != 9):
        return 1.0, "flash"
    return 1.0, kernel


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return math.exp(sum(math.log(row[name]) for row in rows) / len(rows))


def _mean_shares(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, float]:
    """Geometric mean of each head_dim's share, over the cards that have it measured, or over all."""
    shares = {}
    for dim in sorted({dim for row in rows for dim in row[name]}):
        with_it = [row for row in rows if dim in row[name]]
        measured = [row for row in with_it if dim not in row["by_ratio"]]
        shares[dim] = _mean([row[name] for row in measured or with_it], dim)
    return shares
