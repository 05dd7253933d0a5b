"""A kernel that memory or instructions bound -> seconds, by its kind, its bytes and rows, and the card.

Elementwise work (casts, dropout, gathers, copies, optimizer steps) takes its bytes at a share of the
datasheet's bandwidth. Softmax and norms take besides, for every row, some time of the SM that works on
it; rows of a softmax that are too long for shared memory are read anew for each pass over them. Kernels that
read what is scattered or broadcast, and backward passes of norms and softmax, reach a share of that
(data/moving.toml names them).

Some kernels take instructions for every element, or their bytes, whichever is longer: pointwise ones whose
operands do not lie alike (one is broadcast, transposed or a slice) and are found by their strides, updates
with 8-bit state, and what unpacks 4-bit weights. A launch over lists of tensors has a block for each chunk
of them. As many as fit on the SMs run at once and share the bandwidth, then the rest; none is through before
it has loaded its chunk round by round (lists_seconds). So do the blocks of a sum (sum_seconds). Copies to
and from pinned host memory take a share of the PCIe link. Unpacked weights are written over by the next ones:
those that the L2 cache holds never reach memory, by the rule of products (autotune.speed.matmul).

`rates_of` gives a card's parameters, `moving_seconds` takes arrays of shapes. data/moving.toml holds the
parameters, validation/kernels/fit_moving.py makes the measured ones from studies/kernels/tables, and
studies/kernels/MOVING.md says how far off they are. A card without a table takes the mean of the others, and
as many clocks for a row as they; where its products were measured, the rate at which those of few rows
read. A kernel's start and drain are not in it (roofline.CardRates.kernel_tail_seconds).

Known limitations
- Measured with float32 on five cards from before 2021; others get their mean. Rows of 16 bits are taken
  to cost the SM as much as rows of float32.
- Gradients of embeddings take a share of bandwidth: the sort and the sums over tokens are not seen.
- An operand that is broadcast counts once, though it is read again where the cache has lost it.
- How much of a tensor is still in the L2 cache depends on what ran before: half of what fits is taken to be.
"""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autotune.catalogue.gpus import Gpu
from autotune.catalogue.own_rates import OwnMoving
from autotune.speed.arrays import Numbers, either, larger
from autotune.speed.matmul_cards import has_hbm, held_l2_bytes
from autotune.speed.origin import RatesFrom

_TABLE = Path(__file__).with_name("data") / "moving.toml"

FAMILIES = ("elementwise", "softmax", "layer_norm", "reduction", "dequantize", "copy_host")
"""Kinds of kernel that are priced here, beside those that the table names (share_of_elementwise)."""

SHORT_ROW = 1024
"""Longest row that PyTorch's softmax keeps in a warp's registers (aten/native/cuda/PersistentSoftmax.cuh).
Layer norm's rows cost more beyond the same length (fp32_kernels.csv.gz)."""

LONG_ROW_BYTES = 48 * 1024
"""Longest row of a softmax that stays in shared memory (aten/native/cuda/SoftMax.cu, can_use_smem)."""

_TABLED = FAMILIES[:3]

ROWWISE = ("softmax", "short_softmax", "layer_norm", "short_layer_norm")
"""Kernels with a time of each row and column in data/moving.toml."""

_SUM_THREADS, _WARP, _LOADS_AT_ONCE, _LEAST_VECTORIZED = 512, 32, 4, 128
_LEAST_VALUES, _MOST_VALUES = 16, 256
"""A sum's block: threads, lanes of a warp, values that a thread loads at once, length of rows from which they
are loaded so; values that a thread sums, at least and at most, where blocks share a result (torch 2.13
aten/src/ATen/native/cuda/Reduce.cuh, setReduceConfig and global_reduce)."""

KERNEL_TAIL_SECONDS = 3e-6
"""A kernel's start and drain: rms_norm on the A100 takes 0.1 ms for its 27 kernels beyond what grows with its
width."""

_RESULT_BYTES = 2
BYTES_OF_4_BIT_WEIGHT = 0.5 + _RESULT_BYTES + 4 / 64
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
    elements_per_second: Mapping[str, float] = field(hash=False)
    """Elements that its instructions work through, by kind of work: a key of [elements_per_sm_clock] in
    data/moving.toml."""
    l2_bytes: float
    """Size of the L2 cache; 0 where it is not known."""
    held_l2_bytes: float
    """Bytes of it that hold what is written until it is written over; 0 where it is not known."""
    rates_from: RatesFrom
    spread: Mapping[str, float] = field(hash=False)
    """Standard deviation of ln(predicted / measured), by family of FAMILIES or `named`: those of the
    table."""
    lists: Mapping[bool, tuple[float, float]] = field(default_factory=dict, hash=False)
    """Blocks of a launch over lists of tensors that run at once, and seconds of a round of loads of one, by
    whether it is a fused optimizer's; empty where the SMs are not known."""
    own: frozenset[str] = frozenset()
    """Families that were measured on this very card."""


@functools.cache
def family_of(name: str) -> str:
    """Family of an ATen operation that is neither a product nor attention: of FAMILIES, or of the table."""
    if name == "dequantize_4bit":
        return "dequantize"
    direction = "_backward" if "backward" in name else ""
    if "softmax" in name:
        return "log_softmax_backward" if "log_" in name and direction else f"softmax{direction}"
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
    elements: Numbers = 0.0,
    work: str = "strided",
) -> Numbers:
    """Seconds of one kernel: numbers or arrays. `rows` of 0: its shape is not known, and rows cost nothing.

    `elements`: those that take instructions, as `work` names them: of a pointwise kernel whose operands do
    not lie alike, of an update with 8-bit state; 0 of others.

    Raises KeyError where the card's bandwidth is not known.
    """
    seconds: Numbers = bytes_moved / rates.bytes_per_second[family]
    if family == "copy_host":
        return seconds
    if family == "dequantize":
        if rates.held_l2_bytes:
            kept = 1 / (1 + (bytes_moved / rates.held_l2_bytes) ** 2)
            seconds = seconds * (1 - kept * _RESULT_BYTES / BYTES_OF_4_BIT_WEIGHT)
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
    if work in rates.elements_per_second:
        seconds = larger(seconds, elements / rates.elements_per_second[work])
    return seconds


def lists_seconds(
    rates: MovingRates, *, bytes_moved: float, num_blocks: float, num_rounds: float, is_fused: bool
) -> float:
    """Seconds of one launch over lists of tensors.

    `num_rounds`: rounds of loads of the longest block. Raises KeyError where the bandwidth is not known.
    """
    moved = float(moving_seconds(rates, "elementwise", bytes_moved=bytes_moved))
    if is_fused not in rates.lists:
        return moved
    at_once, round_seconds = rates.lists[is_fused]
    return _in_waves(moved, num_rounds * round_seconds, num_blocks, at_once)


def _in_waves(moved: float, alone: float, num_blocks: float, at_once: float) -> float:
    """Seconds of blocks that share the bandwidth, `moved` for all, and take `alone` each at least."""
    num_waves, rest = divmod(num_blocks, at_once)
    seconds = num_waves * max(at_once / num_blocks * moved, alone)
    return seconds + (max(rest / num_blocks * moved, alone) if rest else 0.0)


def sum_seconds(
    rates: MovingRates,
    *,
    bytes_moved: float,
    num_results: float,
    num_summed: float,
    is_over_columns: bool,
) -> float:
    """Seconds of a sum, a mean or a norm of `num_summed` numbers for each of its results.

    PyTorch's blocks by its rules. A round of loads takes as long as one of a launch over lists, half of it
    from the L2 cache (261 clocks where memory takes 479, arXiv 2402.13499), where a tensor of up to half the
    cache's size is taken to be. Where several blocks share a result, the last one adds up what they found
    there, a load after the other, and memory that counts them is cleared before, by a kernel more.
    `is_over_columns`: numbers that lie together belong to different results.

    Raises KeyError where the bandwidth is not known. Where the SMs are not, it takes the family `reduction`.
    """
    if False not in rates.lists:
        return float(moving_seconds(rates, "reduction", bytes_moved=bytes_moved))
    at_once, round_seconds = rates.lists[False]
    cached_seconds = round_seconds / 2
    if bytes_moved <= rates.l2_bytes / 2:
        round_seconds = cached_seconds
    loads = _LOADS_AT_ONCE if is_over_columns or num_summed >= _LEAST_VECTORIZED else 1
    threads = _SUM_THREADS / (loads if is_over_columns else 1)
    at_once *= _SUM_THREADS / threads
    across, down = (num_results, num_summed) if is_over_columns else (num_summed, num_results)
    # A block is that many threads wide and high.
    high = min(_power_of_two(down), threads / min(_WARP, _power_of_two(across / loads)))
    wide = min(_power_of_two(across / loads), threads / high)
    num_blocks, values = (
        (num_results / loads / wide, num_summed)
        if is_over_columns
        else (num_results, num_summed / wide)
    )
    parts = 1.0
    if values < min(_LEAST_VALUES * high, _MOST_VALUES):
        num_blocks = math.ceil(num_blocks / high)
    else:
        num_blocks, values = math.ceil(num_blocks), values / high
        if values >= _MOST_VALUES and num_blocks <= at_once:
            parts = min(math.ceil(at_once / num_blocks), math.ceil(values / _LEAST_VALUES))
            parts = max(parts, math.ceil(values / _MOST_VALUES))
    alone = math.ceil(values / parts / _LOADS_AT_ONCE) * round_seconds
    moved = float(moving_seconds(rates, "elementwise", bytes_moved=bytes_moved))
    seconds = _in_waves(moved, alone, parts * num_blocks, at_once)
    if parts > 1:
        found_by_thread = math.ceil(parts / high / (1 if is_over_columns else wide))
        seconds += found_by_thread * cached_seconds + KERNEL_TAIL_SECONDS
    return seconds


def _power_of_two(number: float) -> float:
    """The largest power of two up to a number; 1 where that is less."""
    return float(2 ** max(math.floor(math.log2(max(number, 1))), 0))


def evidence(rates: MovingRates, family: str) -> RatesFrom:
    """Evidence that the time of a family's kernels rests on.

    The tables have elementwise kernels, softmax and norms of a card; shares of these that others are
    taken to reach are of other cards, and the rest is judgement.
    """
    if family in rates.own:
        return RatesFrom.THIS_CARD
    if family in _TABLED:
        return rates.rates_from
    if family in table()["share_of_elementwise"]:
        return max(rates.rates_from, RatesFrom.CARDS_LIKE_IT, key=list(RatesFrom).index)
    return RatesFrom.DATASHEET


# --- parameters of a card


@functools.cache
def table() -> dict[str, Any]:
    """Return the content of data/moving.toml."""
    return tomllib.loads(_TABLE.read_text(encoding="utf-8"))


@functools.lru_cache(maxsize=64)
def rates_of(gpu: Gpu) -> MovingRates:
    """Parameters of a card: its own where it was measured, else the mean of those that were."""
    rates = rates_from_rows(gpu, table()["card"], table()["reading"])
    own = None if gpu.rates is None else gpu.rates.moving
    return rates if own is None else _with_own(rates, own)


def _with_own(rates: MovingRates, own: OwnMoving) -> MovingRates:
    """The parameters with what was measured on the card; shares of elementwise kernels follow their rate."""
    bytes_per_second = {**rates.bytes_per_second}
    if "elementwise" in own.bytes_per_second and "elementwise" in bytes_per_second:
        scale = own.bytes_per_second["elementwise"] / bytes_per_second["elementwise"]
        for family in (*_TABLED, *table()["share_of_elementwise"]):
            bytes_per_second[family] *= scale
    families = own.bytes_per_second.keys() | {
        name.removeprefix("short_") for name in own.row_seconds
    }
    if own.weights_per_second is not None:
        families |= {"dequantize"}
    if "elementwise" in families:  # Sums move their bytes as fast.
        families |= {"reduction"}
    spread = table()["spread"][RatesFrom.THIS_CARD.name.lower()]
    return replace(
        rates,
        bytes_per_second={**bytes_per_second, **own.bytes_per_second},
        row_seconds={**rates.row_seconds, **own.row_seconds},
        weights_per_second=own.weights_per_second or rates.weights_per_second,
        elements_per_second={**rates.elements_per_second, **own.elements_per_second},
        spread={
            name: spread[name] if name in families else value
            for name, value in rates.spread.items()
        },
        own=frozenset(families),
    )


def rates_from_rows(
    gpu: Gpu, measured: list[dict[str, Any]], reading: Iterable[dict[str, Any]] = ()
) -> MovingRates:
    """Parameters of a card by these rows of `card` in data/moving.toml, and of `reading` there."""
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
        own_reading = [row for row in reading if row["card"] == gpu.name]
        by_card = own_reading if rates_from is RatesFrom.DATASHEET else []
        moving = _mean(by_card or rows, "share") * bandwidth
        bytes_per_second = dict.fromkeys(_TABLED, moving)
        for family, share in rules["share_of_elementwise"].items():
            bytes_per_second[family] = share * moving
        memory = "HBM" if has_hbm(gpu) else "GDDR"
        bytes_per_second["reduction"] = rules["reduction"][memory] * bandwidth
        bytes_per_second["dequantize"] = rules["dequantize"]["share"] * bandwidth
    pcie = gpu.pcie_bandwidth_bytes_per_second
    if pcie is not None:
        bytes_per_second["copy_host"] = pcie * next(
            row["share"] for row in rules["copy_host"] if pcie <= row["up_to_bytes_per_second"]
        )
    clock = gpu.boost_clock_hertz
    weights_per_second, elements_per_second = None, dict[str, float]()
    if clock is not None and gpu.num_sms is not None:
        for work, each in rules["elements_per_sm_clock"].items():
            elements_per_second[work] = each * gpu.num_sms * clock
        weights_per_second = rules["dequantize"]["weights_per_sm_clock"] * gpu.num_sms * clock
    row_seconds = {}
    lists = dict[bool, tuple[float, float]]()
    if clock is not None and gpu.num_sms is not None:
        resident = _most_threads(gpu) // rules["lists"]["threads"]
        for is_fused, name in ((False, "foreach"), (True, "fused")):
            at_once = min(rules["lists"][f"{name}_blocks_per_sm"], resident)
            clocks = rules["lists"][f"{name}_clocks_per_round"]
            lists[is_fused] = at_once * gpu.num_sms, clocks / clock
    if gpu.num_sms is not None:
        # An SM's work takes clocks: those of another card last as long as its own.
        longer = 1.0 if own or clock is None else _mean(rows, "boost_clock_hertz") / clock
        for family in ROWWISE:
            row_seconds[family] = (
                longer * _mean(rows, f"{family}_row_sm_microseconds") * 1e-6 / gpu.num_sms,
                longer * _mean(rows, f"{family}_column_sm_picoseconds") * 1e-12 / gpu.num_sms,
            )
    return MovingRates(
        bytes_per_second=bytes_per_second,
        row_seconds=row_seconds,
        weights_per_second=weights_per_second,
        elements_per_second=elements_per_second,
        lists=lists,
        l2_bytes=gpu.l2_bytes or 0,
        held_l2_bytes=held_l2_bytes(gpu),
        rates_from=rates_from,
        spread=rules["spread"][rates_from.name.lower()],
    )


def _most_threads(gpu: Gpu) -> int:
    """Threads that an SM has at once (CUDA C++ Programming Guide, technical specifications)."""
    capability = gpu.compute_capability or (0, 0)
    if capability == (7, 5):
        return 1024
    return 1536 if capability in ((8, 6), (8, 7), (8, 9)) or capability[0] == 12 else 2048


def _dotted(gpu: Gpu) -> str:
    return ".".join(map(str, gpu.compute_capability or ()))


def _mean(rows: list[dict[str, Any]], name: str) -> float:
    """Geometric mean, so that a ratio and its inverse cancel."""
    return math.exp(sum(math.log(max(row[name], 1e-9)) for row in rows) / len(rows))
