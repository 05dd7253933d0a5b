"""A step's kernels -> predicted seconds on a card: every kernel priced by what bounds it.

Matrix products are priced by autotune.speed.matmul, attention by autotune.speed.attention and everything
else by autotune.speed.moving. A product of unknown shape, or on a card whose SMs are unknown, takes the
longer of its arithmetic at the attainable rate and its bytes at the attainable bandwidth. A few microseconds
come to every kernel. The GPU works through them one by one while the host, ahead of it, launches the next
ones; autotune.speed.host says when it waits.

`ceilings(gpu)` is worked out once per card, `seconds` once per configuration. A rate that the
catalogue does not know makes the time None, never a guess.

The constants here come from publications, named at each. Liger-Kernel's A100 times of operations check
(`validation/roofline_ops.py`). [judgement] marks what nothing published settles.

Known limitations
- Gradients of embeddings cost more than their bytes say: against the published A100 times embedding, forward
  and backward, comes out a fifth to a half too fast; lm_head with cross-entropy within 6 %,
  layer_norm within 13 %.
- Attention's backward pass, on an H200 and an H100: studies/h200/OPERATIONS.md.
- The shape of a convolution is not seen.
- Whole published runs: studies/published-speed.
- Price the micro-step and the optimizer step apart. Copies to and from the host are taken not to overlap
  with kernels, but for those aside, which are taken to overlap wholly: that they take of the memory's
  bandwidth is left out.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autotune.catalogue.gpu_rows import PEAK_DTYPES
from autotune.catalogue.gpus import Gpu
from autotune.common.dtypes import DTYPE_BYTES
from autotune.speed import attention, host, moving
from autotune.speed.attention import AttentionRates
from autotune.speed.matmul import MatmulCard, matmul_seconds
from autotune.speed.matmul_cards import attainable_flop_per_second, matmul_card
from autotune.speed.moving import KERNEL_TAIL_SECONDS, MovingRates
from autotune.speed.origin import RatesFrom

COPIES = ("copy_host", "copy_aside")
"""Copies to and from pinned host memory: in their turn, and on a stream of their own."""
KINDS = ("matmul", "attention", "elementwise", "lists", "reduction", "dequantize", *COPIES)
"""Limits that bound a kernel. `lists`: a launch over lists of tensors, chunk by chunk; `reduction`: rows are
read more than once; `dequantize`: 4-bit weights are unpacked, which instructions bound; COPIES: over
PCIe."""

PHASES = ("forward", "backward", "recompute", "update")
"""Phases of a step. `recompute`: activation checkpointing's second forward pass, within the backward pass."""

BOUNDS = ("compute", "memory bandwidth", "transfer", "launch", "communication", "generation")
"""Causes that may take most of a step's time. `transfer`: copies to and from host memory; `communication`:
with the other GPUs (autotune.predict.sharding.rank_trace)."""

_MATMULS = frozenset(
    {"mm", "bmm", "addmm", "baddbmm", "addbmm", "_scaled_mm", "_int_mm", "_grouped_mm"}
)
_REDUCTIONS = frozenset(
    {
        "_softmax",
        "_softmax_backward_data",
        "_log_softmax",
        "_log_softmax_backward_data",
        "native_layer_norm",
        "native_layer_norm_backward",
        "_fused_rms_norm",
        "_fused_rms_norm_backward",
        "embedding_dense_backward",
        "sum",
        "mean",
        "amax",
        "var_mean",
        "linalg_vector_norm",
        "_foreach_norm",
    }
)

# NVIDIA's datasheets, T4 to B200: int8 products run at twice float16's rate (GeForce cards at four
# times: float16 is counted with float32 sums, which halves it there). bitsandbytes' own kernels on an
# A100 (its benchmarking/switchback/info_a100_py2.jsonl, commit 59a7c3a): 468 to 533 TOP/s at widths of
# 2,048 and 4,096, where twice the best matmul's share of the peak is 515.
_INT8_OF_FLOAT16 = 2
_UPDATES = ("optimizer", "adamw_bnb_8bit", "paged_adamw_8bit")
_ATTENTION_DTYPES = ("float16", "bfloat16", "float32")
_USUAL_HEAD = 128.0
"""Size of a head, for attention whose shape is not known."""
# [judgement] Share of the datasheet's bandwidth that a matmul of few operations reaches.
_MATMUL_OF_BANDWIDTH = 0.75
# [judgement] Host memory's rate in an Adam step: it reads and writes float32 weight and moments, reads the
# gradient, writes a 16-bit copy (30 bytes an element), on a desktop of two DDR5 channels (90 GB/s at
# best). Servers are quicker.
HOST_UPDATE_SECONDS_PER_ELEMENT = 30 / 50e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """One operation on the device, launched `count` times alike."""

    name: str
    """ATen's name without namespace: mm, _softmax, _scaled_dot_product_flash_attention."""
    kind: str
    """One of KINDS; kind_of(name) knows ATen's."""
    dtype: str
    """The type it computes in: a key of config.DTYPE_BYTES, tf32, or float8."""
    flops: float
    """Floating-point operations of one launch; a multiplication and its addition are two. A causal
    attention counts only what it computes: half of the square."""
    bytes_moved: float
    """Bytes of the tensors that one launch reads and writes; a gather counts the rows it takes."""
    shape: tuple[float, ...] = ()
    """Sizes that its speed depends on. A matmul: (batch, m, n, k), as y[m, n] = x[m, k] w[k, n] for each of a
    batch. Attention: (samples, heads, key heads, queries, keys, size of a head, 1 if causal or 0). A
    reduction: (rows, columns), as results and what each is of; of a sum over what does not lie together a 1
    besides. Lists of tensors: (blocks, rounds of loads of the longest block, 1 if it is a
    fused optimizer's or 0). A pointwise kernel whose operands do not lie alike: (elements,). An update
    with 8-bit state: (values of it,). Others, and kernels of which nobody knows: empty."""
    count: float = 1
    phase: str = "update"
    """One of PHASES."""
    host_seconds: float = 0.0
    """Seconds that the host spends on one launch beside those of its phase."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CardRates:
    """Attainable rates of one card; what the catalogue does not know is missing."""

    flop_per_second: Mapping[str, float] = field(hash=False)
    """Rate of matmuls of unknown shape by dtype."""
    attention: Mapping[tuple[str, str, bool], AttentionRates] = field(hash=False)
    """Parameters by (one of attention.KERNELS, dtype, whether it is the backward pass)."""
    moving: MovingRates = field(hash=False)
    """Parameters of what memory bounds."""
    matmul_bytes_per_second: float | None
    """Rate of the bytes of a matmul of unknown shape."""
    kernel_tail_seconds: float = KERNEL_TAIL_SECONDS
    """Seconds that the GPU spends on starting and ending any kernel."""
    launch_seconds: Mapping[str, float] = field(
        default_factory=lambda: host.USUAL.launch_seconds, hash=False
    )
    """Seconds that the host spends on one operation, by phase."""
    products: MatmulCard | None = None
    """Parameters of matmuls by shape; None where too little is known of the card."""
    host_from: RatesFrom = RatesFrom.CARDS_LIKE_IT
    """Evidence behind what the host takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Predicted time of a list of kernels."""

    gpu_seconds: float
    """Sum of the kernels' times."""
    launch_seconds: float
    """Time of the host to launch them all."""
    total_seconds: float
    """Time until the GPU is through: its own, and what it waits for the host."""
    bound: str
    """One of BOUNDS: what most of the time goes to."""


_Products = dict[tuple[str, tuple[float, ...]], float]
"""Seconds of matmuls by dtype and shape."""


def kind_of(name: str) -> str:
    """Kind of an ATen operation by name; what is not known is elementwise. Never copy_host."""
    if name in _MATMULS or "convolution" in name:
        return "matmul"
    if name.startswith("_scaled_dot_product_"):
        return "attention"
    if name in _REDUCTIONS:
        return "reduction"
    return "dequantize" if name == "dequantize_4bit" else "elementwise"


def peak_flop_per_second(gpu: Gpu, dtype: str) -> float | None:
    """Dense peak at which the card's matmuls of a dtype can run; None when unknown.

    Tensor cores take float16 from compute capability 7.0, int8 from 7.5, bfloat16 and tf32 from 8.0;
    below that PyTorch computes the last two at the float32 rate. Without tensor cores for it, int8 is
    taken to be as fast as float16; 10.3 (B300) has next to none.
    """
    capability = gpu.compute_capability
    if dtype == "int8":
        half = gpu.peak_flop_per_second.get("float16")
        is_quick = capability is None or (capability >= (7, 5) and capability != (10, 3))
        return half if half is None or not is_quick else _INT8_OF_FLOAT16 * half
    if dtype in ("bfloat16", "tf32") and not gpu.has_bfloat16:
        dtype = "float32"
    return gpu.peak_flop_per_second.get(dtype)


def peaks_of(gpu: Gpu) -> dict[str, float]:
    """Dense peak by dtype of a product's operands, of those that are known."""
    peaks = {dtype: peak_flop_per_second(gpu, dtype) for dtype in (*PEAK_DTYPES, "int8")}
    return {dtype: peak for dtype, peak in peaks.items() if peak is not None}


def ceilings(gpu: Gpu) -> CardRates:
    """Attainable rates of a card."""
    peaks = peaks_of(gpu)
    bandwidth = gpu.memory_bandwidth_bytes_per_second
    combinations = itertools.product(attention.KERNELS, _ATTENTION_DTYPES, (False, True))
    return CardRates(
        flop_per_second={d: attainable_flop_per_second(gpu, d, peaks)[0] for d in peaks},
        products=matmul_card(gpu, peaks),
        matmul_bytes_per_second=None if bandwidth is None else _MATMUL_OF_BANDWIDTH * bandwidth,
        attention={
            (kernel, dtype, is_backward): rates
            for kernel, dtype, is_backward in combinations
            if (rates := attention.rates_of(gpu, kernel, dtype=dtype, is_backward=is_backward))
        },
        moving=moving.rates_of(gpu),
    )


def seconds(
    kernels: Iterable[Kernel], machine: CardRates, stretches: host.Stretches | None = None
) -> StepTime | None:
    """Predicted time of these kernels, run once each; None when a rate that one of them needs is unknown.

    `stretches`: the order in which they run; without it, host and GPU are taken to go on evenly.
    """
    kernels = tuple(kernels)
    each = kernel_seconds(kernels, machine)
    if each is None:
        return None
    spent = dict.fromkeys(BOUNDS, 0.0)
    queues = queued(kernels, each, machine)
    seen_share = queues.seen_share(stretches)
    for kernel, (one, bound) in zip(kernels, each, strict=True):
        share = seen_share if kernel.kind == "copy_aside" else 1
        spent[bound] += share * kernel.count * (one - machine.kernel_tail_seconds)
    gpu_seconds = float(queues.on_gpu.sum() + seen_share * queues.aside.sum())
    launch_seconds = float(queues.on_host.sum())
    late_seconds = queues.late_seconds(stretches)
    return StepTime(
        gpu_seconds=gpu_seconds,
        launch_seconds=launch_seconds,
        total_seconds=gpu_seconds + late_seconds,
        bound="launch" if launch_seconds >= gpu_seconds else max(spent, key=lambda b: spent[b]),
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Queues:
    """Seconds of all launches of each kernel, on the GPU, on the host, and on the stream of copies aside."""

    on_gpu: NDArray[np.float64]
    on_host: NDArray[np.float64]
    aside: NDArray[np.float64]
    is_forward: NDArray[np.bool_]

    def seen_share(self, stretches: host.Stretches | None) -> float:
        """Share of the copies aside that the other kernels wait for; without `stretches`, of those of a pass.

        What a stretch of the forward pass has made goes out beside the next one, whose end waits for it; what
        one of the backward pass needs comes back beside the one before.
        """
        seconds = np.stack(
            [self.on_gpu, self.aside * self.is_forward, self.aside * ~self.is_forward]
        )
        if not self.aside.any():
            return 0.0
        if stretches is None:
            computed, out, back = seconds.sum(axis=1, keepdims=True)
        else:
            computed, out, back = (seconds @ stretches.shares.T)[:, stretches.order]
        waited = np.maximum(out - np.roll(computed, -1), 0) + np.maximum(back - computed, 0)
        return float(waited.sum() / self.aside.sum())

    def late_seconds(
        self, stretches: host.Stretches | None = None, *, host_factor: float = 1.0
    ) -> float:
        """Seconds that the GPU waits for a host that takes so many times as long."""
        on_host = host_factor * self.on_host
        if stretches is None:
            return max(float(on_host.sum() - self.on_gpu.sum()), 0.0)
        return host.late_seconds(self.on_gpu, on_host, stretches)


def queued(
    kernels: Sequence[Kernel], each: Sequence[tuple[float, str]], machine: CardRates
) -> Queues:
    """Return the work of host and GPU for these kernels; `each` is kernel_seconds of them."""
    launched = (machine.launch_seconds[kernel.phase] + kernel.host_seconds for kernel in kernels)
    counts = np.array([kernel.count for kernel in kernels], float)
    seconds = counts * np.array([seconds for seconds, _ in each], float)
    is_aside = np.array([kernel.kind == "copy_aside" for kernel in kernels], bool)
    return Queues(
        on_gpu=np.where(is_aside, 0, seconds),
        on_host=counts * np.array(list(launched), float),
        aside=np.where(is_aside, seconds, 0),
        is_forward=np.array([kernel.phase == "forward" for kernel in kernels], bool),
    )


def mfu(*, model_flops: float, step_seconds: float, gpu: Gpu, dtype: str) -> float | None:
    """Share of the card's dense peak in `dtype` that a step achieves; None when it is unknown.

    `model_flops` are those of the step without recomputation.
    """
    peak = peak_flop_per_second(gpu, dtype)
    return None if peak is None else model_flops / step_seconds / peak


def kernel_seconds(kernels: Sequence[Kernel], machine: CardRates) -> list[tuple[float, str]] | None:
    """Seconds of one launch of each, and one of BOUNDS; None when a rate that one needs is unknown."""
    products = _product_seconds(kernels, machine.products)
    found = []
    for kernel in kernels:
        priced = _priced(kernel, machine, products)
        if priced is None:
            return None
        found.append((priced[0] + machine.kernel_tail_seconds, priced[1]))
    return found


def _priced(kernel: Kernel, machine: CardRates, products: _Products) -> tuple[float, str] | None:
    """Seconds of a kernel without its tail, and one of BOUNDS; None when a rate is unknown."""
    kind = kernel.kind
    if kind == "matmul":
        return _matmul(kernel, machine, products.get((kernel.dtype, kernel.shape)))
    if kind == "attention":
        return _attention(kernel, machine)
    assert kind in KINDS, kind
    family = family_of(kernel, machine.moving)
    if family not in machine.moving.bytes_per_second:
        return None  # The card's bandwidth is not known.
    if kind == "lists":
        blocks, rounds, is_fused = kernel.shape
        seconds = moving.lists_seconds(
            machine.moving,
            bytes_moved=kernel.bytes_moved,
            num_blocks=blocks,
            num_rounds=rounds,
            is_fused=bool(is_fused),
        )
        return seconds, "memory bandwidth"
    if family == "reduction" and len(kernel.shape) >= 2:
        num_results, num_summed, *is_over_columns = kernel.shape
        seconds = moving.sum_seconds(
            machine.moving,
            bytes_moved=kernel.bytes_moved,
            num_results=num_results,
            num_summed=num_summed,
            is_over_columns=bool(is_over_columns),
        )
        return seconds, "memory bandwidth"
    rows, row_length = kernel.shape if len(kernel.shape) == 2 else (0.0, 0.0)
    moved_seconds = moving.moving_seconds(
        machine.moving,
        family,
        bytes_moved=kernel.bytes_moved,
        rows=rows,
        row_length=row_length,
        elements=kernel.shape[0] if len(kernel.shape) == 1 else 0.0,
        work=work_of(kernel),
    )
    return float(moved_seconds), "transfer" if kind in COPIES else "memory bandwidth"


def work_of(kernel: Kernel) -> str:
    """Kind of work that each element is, where a kernel's shape says how many there are."""
    if kernel.name in _UPDATES:
        return "quantized_state"
    if kernel.name == "cat":
        return "cat"
    return "strided_16_bits" if DTYPE_BYTES.get(kernel.dtype) == 2 else "strided"


def family_of(kernel: Kernel, rates: MovingRates) -> str:
    """The family that a kernel is priced as."""
    if kernel.kind in COPIES:
        return "copy_host"
    if kernel.kind == "dequantize":
        return kernel.kind
    family = moving.family_of(kernel.name)
    if kernel.kind == "reduction":
        if "softmax" in family and kernel.shape:
            row_bytes = kernel.shape[-1] * DTYPE_BYTES[kernel.dtype]
            if row_bytes >= moving.LONG_ROW_BYTES:
                return f"long_{family}"
        is_known = kernel.shape and family in rates.row_seconds
        return family if is_known or family.endswith("_backward") else "reduction"
    return family if family not in rates.row_seconds else "elementwise"


def _matmul(
    kernel: Kernel, machine: CardRates, by_shape_seconds: float | None
) -> tuple[float, str] | None:
    rate, bandwidth = machine.flop_per_second.get(kernel.dtype), machine.matmul_bytes_per_second
    if rate is None or bandwidth is None:
        return None
    computing, moved = kernel.flops / rate, kernel.bytes_moved / bandwidth
    bound = "compute" if computing > moved else "memory bandwidth"
    if by_shape_seconds is None:
        return max(computing, moved), bound
    # The start of a product is in its time.
    return max(by_shape_seconds - machine.kernel_tail_seconds, 0), bound


def _product_seconds(kernels: Iterable[Kernel], card: MatmulCard | None) -> _Products:
    """Seconds of each distinct matmul, of those that the card has a rate for."""
    found: _Products = {}
    if card is None:
        return found
    shapes: dict[str, dict[tuple[float, ...], None]] = {}
    for kernel in kernels:
        if kernel.kind == "matmul" and kernel.shape and kernel.flops > 0:
            shapes.setdefault(kernel.dtype, {})[kernel.shape] = None
    for dtype in shapes.keys() & card.flop_per_second.keys():
        distinct = tuple(shapes[dtype])
        batch, m, n, k = np.array(distinct, float).T
        times = matmul_seconds(card, dtype, batch, m, n, k).tolist()
        found.update(zip(((dtype, shape) for shape in distinct), times, strict=True))
    return found


def _attention(kernel: Kernel, machine: CardRates) -> tuple[float, str] | None:
    rates = machine.attention.get(attention_key(kernel))
    bandwidth = machine.moving.bytes_per_second.get("elementwise")
    if rates is None or bandwidth is None:
        return None
    computing = _attention_seconds(rates, kernel.shape, kernel.flops, _is_backward(kernel))
    moved = kernel.bytes_moved / bandwidth
    return (computing, "compute") if computing > moved else (moved, "memory bandwidth")


def attention_key(kernel: Kernel) -> tuple[str, str, bool]:
    """The key in CardRates.attention of an attention kernel."""
    families = (family for family in attention.KERNELS[1:] if family in kernel.name)
    return next(families, "flash"), kernel.dtype, _is_backward(kernel)


def _is_backward(kernel: Kernel) -> bool:
    return "backward" in kernel.name


@functools.lru_cache(maxsize=4096)
def _attention_seconds(
    rates: AttentionRates, shape: tuple[float, ...], flops: float, is_backward: bool
) -> float:
    """Seconds by the shape; where that is not known, by the operations at the rate of long sequences."""
    if not shape:
        return float(flops / rates.rate(_USUAL_HEAD))
    samples, heads, key_heads, queries, keys, head_dim, is_causal = shape
    return float(
        attention.attention_seconds(
            rates,
            batch=samples,
            heads=heads,
            query_length=queries,
            key_length=keys,
            head_dim=head_dim,
            is_causal=bool(is_causal),
            is_backward=is_backward,
            key_heads=key_heads,
        )
    )
