"""Rates that were measured on one very card: what `autotune calibrate` keeps, and a card's file may carry.

They are the parameters of the models of autotune.speed, in seconds, bytes and operations; what is not here is
taken from the card's facts as ever. Fitted by autotune.speed.calibration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec

Positive = Annotated[float, msgspec.Meta(gt=0, lt=1e30)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
ProductDtype = Annotated[str, msgspec.Meta(pattern="^(b?float16|tf32|float32)$")]
MOST_SPREAD = 3.0
Spread = Annotated[float, msgspec.Meta(gt=0, le=MOST_SPREAD)]
"""Standard deviation of the logarithm of measured over predicted times."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Behaviour:
    """Figures that say how the time of a matrix product depends on its shape (autotune.speed.matmul)."""

    l2_bytes_per_flop: Positive
    """Bytes that an SM gets from the L2 cache in the time of one 16-bit tensor operation."""
    memory_share: Positive
    """Share of the datasheet's memory bandwidth that is reached."""
    fill_steps: Positive
    """Time to fill a tile's pipeline and to write its result, in steps of k: of 16-bit tensors, but for
    float32 of its own."""
    start_seconds: Positive
    """Time of an empty kernel within a CUDA graph."""
    whole_waves: Share
    """Share, 0 to 1, of the last wave's idle SMs that is lost; the rest evens out."""
    overlap: Annotated[float, msgspec.Meta(ge=1, le=100)]
    """Exponent p: the higher, the better computing and memory overlap."""
    l2_share: Positive
    """Share of the L2 cache's size that keeps what the kernel before left."""
    l2_warm: Positive
    """Rate of reading what it keeps, in units of all SMs' L2 rate."""
    split_seconds: Positive
    """Time that a sum over splits of k takes at least."""
    tile_exponent: Positive
    """Power of a tile's area with which its rate of computing falls."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnProducts:
    """Matrix products of the card."""

    flop_per_second: Mapping[ProductDtype, Positive] = field(hash=False)
    """Rate of products without end, by dtype; the others' stand in the ratio that they have without this."""
    behaviour: Behaviour
    spread: tuple[Spread, Spread, Spread, Spread]
    """Spread by autotune.speed.matmul.REGIMES."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnAttention:
    """One attention kernel of the card in one direction, with 16 bits (autotune.speed.attention)."""

    kernel: Literal["flash", "flash3", "cudnn", "efficient"]
    is_backward: bool
    flop_per_second: Annotated[tuple[tuple[Positive, Positive], ...], msgspec.Meta(min_length=1)]
    """(head_dim, rate) of long sequences, by head_dim."""
    start_columns: Positive
    alone: Share
    blend: Annotated[float, msgspec.Meta(gt=1, le=100)]
    chain_seconds: Positive
    spread: tuple[Spread, Spread, Spread]
    """Spread by autotune.speed.attention.REGIMES."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnMoving:
    """Kernels of the card that memory or instructions bound (autotune.speed.moving)."""

    bytes_per_second: Mapping[str, Positive] = field(hash=False)
    """Rate by family."""
    row_seconds: Mapping[str, tuple[Positive, Positive]] = field(hash=False)
    """Time of the whole card for a row, and for each of its columns besides, by moving.ROWWISE."""
    weights_per_second: Positive | None = None
    """4-bit weights that are unpacked; None: not measured."""
    elements_per_second: Mapping[str, Positive] = field(default_factory=dict, hash=False)
    """Elements that its instructions work through, by kind of work: keys of [elements_per_sm_clock] in
    autotune/speed/data/moving.toml."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnRates:
    """All that was measured on one card and its machine; None and empty: that was not."""

    products: OwnProducts | None = None
    attention: tuple[OwnAttention, ...] = ()
    moving: OwnMoving | None = None
    host_factor: Annotated[float, msgspec.Meta(ge=0.05, le=50)] | None = None
    """Time that an operation takes this machine's host, against autotune.speed.host.USUAL."""
