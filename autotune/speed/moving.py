"""A kernel that memory or instructions bound -> seconds, by its kind, its bytes and rows, and the card.

Elementwise work (casts, dropout, gathers, copies, optimizer steps) takes its bytes at a share of the
datasheet's bandwidth. Softmax and norms take besides, for every row, some time of the SM that works on
it. Kernels that read what is scattered or broadcast, and backward passes of norms, softmax and dropout,
reach a share of that (data/moving.toml names them). Unpacking 4-bit weights takes instructions for every
weight, or its bytes, whichever is longer. Copies to and from pinned host memory take a share of the PCIe
link.

`rates_of` gives a card's parameters, `moving_seconds` takes arrays of shapes. data/moving.toml holds the
parameters, validation/kernels/fit_moving.py makes the measured ones from studies/kernels/tables, and
studies/kernels/MOVING.md says how far off they are. A kernel's start and drain are not in it
(roofline.CardRates.kernel_tail_seconds).

Known limitations
- Measured with float32 on five cards from before 2021; others get their mean. Rows of 16 bits are taken
  to cost the SM as much as rows of float32.
- Reductions without a shape, sums over columns and gradients of embeddings take a share of bandwidth, by
  judgement; the optimizers' 8-bit kernels, which quantise besides, are taken as elementwise.
- How much of a tensor is still in the L2 cache depends on what ran before: half of what fits is taken to be.
"""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.catalogue.gpus import Gpu
from autotune.speed.arrays import Numbers, either, larger
from autotune.speed.origin import RatesFrom

_TABLE = Path(__file__).with_name("data") / "moving.toml"

FAMILIES = ("elementwise", "softmax", "layer_norm", "reduction", "dequantize", "copy_host")
"""Kinds of kernel that are priced here, beside those that the table names (share_of_elementwise)."""

SHORT_ROW = 1024
"""Longest row that PyTorch's softmax keeps in a warp's registers (aten/native/cuda/PersistentSoftmax.cuh).
Layer norm's rows cost more beyond the same length (fp32_kernels.csv.gz)."""

ROWWISE = ("softmax", "short_softmax", "layer_norm", "short_layer_norm")
"""Kernels with a time of each row and column in data/moving.toml."""

BYTES_OF_4_BIT_WEIGHT = 0.5 + 2 + 4 / 64
"""Bytes that unpacking a 4-bit weight moves: the code, 16 bits of result, float32 scales of blocks of 64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MovingRates:
    """Parameters of one card; what the catalogue does not know is missing."""

    bytes_per_second: Mapping[str, float] = field(hash=False)
    """Rate by family."""
    row_seconds: Mapping[str, tuple[float, float]] = field(hash=False)
    """Time of a whole card for a row, and for each of its columns besides, by ROWWISE."""
    weights_per_second: float | None
    """4-bit weights that its instructions unpack."""
    l2_bytes: float
    """Size of the L2 cache; 0 where it is not known."""
    rates_from: RatesFrom
    spread: Mapping[str, float] = field(hash=False)
    """Standard deviation of ln(predicted / measured), by family of FAMILIES or `named`: those of the
    table."""


@functools.cache
def family_of(name: str) -> str:
    """Family of an ATen operation that is neither a product nor attention: of FAMILIES, or of the table."""
    if name == "dequantize_4bit":
        return "dequantize"
    direction = "_backward" if "backward" in name else ""
    if "softmax" in name:
        return f"softmax{direction}"
    if "layer_norm" in name or "rms_norm" in name:
        return f"layer_norm{direction}"
    plain = name.rstrip("_")
    return plain if plain in table()["share_of_elementwise"] else "elementwise"


def moving_seconds(
    rates: MovingRates,
    family: str,
    *,
    bytes_moved: Numbers,
    rows: Numbers = 0.0,
    row_length: Numbers = 0.0,
) -> Numbers:
    """Seconds of one kernel: numbers or arrays. `rows` of 0: its shape is not known, and rows cost nothing.

    Raises KeyError where the card's bandwidth is not known.
    """
    seconds: Numbers = bytes_moved / rates.bytes_per_second[family]
    if family == "copy_host":
        return seconds
    if family == "dequantize":
        if rates.weights_per_second is None:
            return seconds
        return larger(seconds, bytes_moved / BYTES_OF_4_BIT_WEIGHT / rates.weights_per_second)
    if rates.l2_bytes:
        seconds = seconds / (1 + larger(1 - bytes_moved / rates.l2_bytes, 0.0))
    if family in rates.row_seconds:
        first, each = rates.row_seconds[family]
        short_first, short_each = rates.row_seconds[f"short_{family}"]
        of_row = either(
            row_length <= SHORT_ROW,
            short_first + short_each * row_length,
            first + each * row_length,
        )
        seconds = seconds + rows * of_row
    return seconds


# --- parameters of a card


@functools.cache
def table() -> dict[str, Any]:
    """Return the content of data/moving.toml."""
    return tomllib.loads(_TABLE.read_text(encoding="utf-8"))


@functools.lru_cache(maxsize=64)
def rates_of(gpu: Gpu) -> MovingRates:
    """Parameters of a card: its own where it was measured, else the mean of those that were."""
    return rates_from_rows(gpu, table()["card"])


def rates_from_rows(gpu: Gpu, measured: list[dict[str, Any]]) -> MovingRates:
    """Parameters of a card by these rows of `card` in data/moving.toml."""
    rules = table()
    own = [row for row in measured if row["card"] == gpu.name]
    alike = [row for row in measured if row["compute_capability"] == _dotted(gpu)]
    if own:
        rates_from, rows = RatesFrom.THIS_CARD, own
    elif alike:
        rates_from, rows = RatesFrom.CARDS_LIKE_IT, alike
    else:
        rates_from = RatesFrom.DATASHEET
        rows = [row for row in measured if row["is_usual"]] or measured
    bandwidth = gpu.memory_bandwidth_bytes_per_second
    bytes_per_second = {}
    if bandwidth is not None:
        moving = _mean(rows, "share") * bandwidth
        bytes_per_second = dict.fromkeys(FAMILIES[:3], moving)
        for family, share in rules["share_of_elementwise"].items():
            bytes_per_second[family] = share * moving
        bytes_per_second["reduction"] = rules["reduction"]["share"] * bandwidth
        bytes_per_second["dequantize"] = rules["dequantize"]["share"] * bandwidth
    pcie = gpu.pcie_bandwidth_bytes_per_second
    if pcie is not None:
        bytes_per_second["copy_host"] = pcie * next(
            row["share"] for row in rules["copy_host"] if pcie <= row["up_to_bytes_per_second"]
        )
    clock = gpu.boost_clock_hertz
    weights_per_second = None
    if clock is not None and gpu.num_sms is not None:
        weights_per_second = rules["dequantize"]["weights_per_sm_clock"] * gpu.num_sms * clock
    row_seconds = {}
    if gpu.num_sms is not None:
        for family in ROWWISE:
            row_seconds[family] = (
                _mean(rows, f"{family}_row_sm_microseconds") * 1e-6 / gpu.num_sms,
                _mean(rows, f"{family}_column_sm_picoseconds") * 1e-12 / gpu.num_sms,
            )
    return MovingRates(
        bytes_per_second=bytes_per_second,
        row_seconds=row_seconds,
        weights_per_second=weights_per_second,
        l2_bytes=gpu.l2_bytes or 0,
        rates_from=rates_from,
        spread=rules["spread"][rates_from.name.lower()],
    )


def _dotted(gpu: Gpu) -> str:
    return ".".join(map(str, gpu.compute_capability or ()))


def _mean(rows: list[dict[str, Any]], name: str) -> float:
    """Geometric mean, so that a ratio and its inverse cancel."""
    return math.exp(sum(math.log(max(row[name], 1e-9)) for row in rows) / len(rows))
