"""Fit the measured part of autotune/speed/data/moving.toml to the public tables.

Run: python -m validation.kernels.fit_moving

Elementwise operations, softmax and layer norm of fp32_kernels.csv.gz, card by card. Their times hold the
launch: what takes less than four times the card's least time says more about the host, and is left out. The
rest is a start, the bytes of inputs and outputs at a share of the bandwidth, and a time of each row and
column. The other sections of moving.toml (published rows, judgement) are in RULES below, each with its
source.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.memory.optimizers import TensorSpec
from autotune.memory.optimizers.torch_lists import launches_over
from autotune.speed import least_squares, moving, roofline
from autotune.speed.moving import MovingRates, moving_seconds, rates_from_rows
from validation.kernels.public_tables import Columns, card, chosen, columns

ELEMENTWISE = ("add", "mul", "div", "pow", "addu", "mulu", "divu", "powu", "relu", "gelu", "tanh")
TWO_TENSORS = ("add", "mul", "div", "pow")
OPERATIONS = {**dict.fromkeys(ELEMENTWISE, "elementwise"), "softmax": "softmax", "ln": "layer_norm"}
"""Operation of the table -> family."""

SHAPE = ("b", "n")
USUAL = ("NVIDIA A100-PCIE-40GB", "NVIDIA V100-PCIE-32GB")
"""Cards whose mean stands for those of a generation that was not measured: high-bandwidth memory that
its power and clocks do not hold back, as they do on T4, P4 and P100. vidur.csv.gz tests it."""

_STAGES: dict[str, dict[str, float]] = {
    "elementwise": {"share": 0.8, "start_microseconds": 15},
    "softmax": {
        "softmax_start_microseconds": 20,
        "softmax_row_sm_microseconds": 0.2,
        "softmax_column_sm_picoseconds": 300,
        "short_softmax_row_sm_microseconds": 0.1,
        "short_softmax_column_sm_picoseconds": 100,
    },
    "layer_norm": {
        "layer_norm_start_microseconds": 20,
        "layer_norm_row_sm_microseconds": 0.3,
        "layer_norm_column_sm_picoseconds": 300,
        "short_layer_norm_row_sm_microseconds": 0.3,
        "short_layer_norm_column_sm_picoseconds": 100,
    },
}
"""Parameters that a family's rows decide, with where their fit begins; those of earlier stages stay."""

STARTS = {
    "elementwise": "start_microseconds",
    "softmax": "softmax_start_microseconds",
    "layer_norm": "layer_norm_start_microseconds",
}
"""Name of each family's start: what the table's times have beside the kernel. A module that makes several
tensors takes the host longer to launch than an operator does."""

_WEIGHT_OF_BEGINNING = 0.1


@functools.cache
def fp32_table() -> Columns:
    """Rows of fp32_kernels.csv.gz that are no products, with `least`: the card's least time."""
    table = columns(
        "fp32_kernels.csv.gz", ("b", "n", "ms"), keep=("operation", frozenset(OPERATIONS))
    )
    least = {name: table["ms"][table["card"] == name].min() for name in set(table["card"])}
    table["least"] = np.array([least[name] for name in table["card"]])
    return chosen(table, table["ms"] > 4 * table["least"])


def seconds(rates: MovingRates, rows: Columns, fitted: Mapping[str, Any]) -> NDArray:
    """Times of the table's rows, by family. `fitted`: the card's row, for the starts."""
    found = np.zeros(len(rows["ms"]))
    for family in ("elementwise", "softmax", "layer_norm"):
        mask = np.array([OPERATIONS[name] == family for name in rows["operation"]])
        if mask.any():
            tensors = np.where(np.isin(rows["operation"][mask], TWO_TENSORS), 3, 2)
            found[mask] = fitted[STARTS[family]] * 1e-6 + moving_seconds(
                rates,
                family,
                bytes_moved=4 * tensors * rows["b"][mask] * rows["n"][mask],
                rows=rows["b"][mask],
                row_length=rows["n"][mask],
            )
    return found


def fit(name: str, rows: Columns) -> dict[str, Any]:
    """The row of data/moving.toml for one card."""
    gpu = card(name)
    row: dict[str, Any] = {
        "card": name,
        "compute_capability": moving._dotted(gpu),
        "is_usual": name in USUAL,
        "boost_clock_hertz": gpu.boost_clock_hertz,
    }
    for stage in _STAGES.values():
        row |= stage
    families = np.array([OPERATIONS[each] for each in rows["operation"]])
    for family, stage in _STAGES.items():
        of_family = chosen(rows, families == family)
        measured = np.log(of_family["ms"] * 1e-3)
        beginning = np.log(list(stage.values()))

        def tried(
            p: NDArray, names: Iterable[str] = stage, before: dict[str, Any] = row
        ) -> dict[str, Any]:
            return before | dict(zip(names, np.exp(p).tolist(), strict=True))

        def residuals(
            p: NDArray,
            of_family: Columns = of_family,
            measured: NDArray = measured,
            beginning: NDArray = beginning,
            tried: Callable[[NDArray], dict[str, Any]] = tried,
        ) -> NDArray:
            found = tried(p)
            times = seconds(rates_from_rows(gpu, [found]), of_family, found)
            off = np.log(times) - measured
            return np.append(off, _WEIGHT_OF_BEGINNING * (p - beginning))

        weights = np.ones(len(measured) + len(beginning))
        row = tried(least_squares.fit(residuals, beginning, weights, steps=40))
    return row


def fits(keep: NDArray | None = None) -> list[dict[str, Any]]:
    """A row for each card. `keep`: rows to fit with."""
    table = fp32_table() if keep is None else chosen(fp32_table(), keep)
    names = sorted({str(name) for name in table["card"]})
    return [fit(name, chosen(table, table["card"] == name)) for name in names]


READING_ROWS, READING_BYTES = 16, 3e8
"""Most rows of a product that reads its weights and little else, and their least size: past any cache."""


def reading_shares() -> list[dict[str, Any]]:
    """Share of the bandwidth at which a card reads weights in products of few rows, by card.

    The rate that a tenth of these products exceeds. On the H100 it is 0.91, and elementwise kernels of
    steps_ops.csv.gz above 0.4 ms reach 0.89 to 0.92.
    """
    table = columns("gemm_bf16.csv.gz", ("m", "n", "k", "ms"))
    m, n, k = table["m"], table["n"], table["k"]
    is_reading = (m <= READING_ROWS) & (2 * n * k >= READING_BYTES)
    rates = 2 * (m * k + n * k + m * n) / (table["ms"] * 1e-3)
    found = []
    for name in sorted(set(table["card"][is_reading])):
        bandwidth = card(str(name)).memory_bandwidth_bytes_per_second
        assert bandwidth is not None
        share = float(np.quantile(rates[is_reading & (table["card"] == name)], 0.9)) / bandwidth
        found.append({"card": str(name), "share": share})
    return found


STRIDED = ("where", "truediv", "max")
"""Operations of steps_ops.csv.gz with an operand that is broadcast: a mask, or a number on the card."""


def strided_elements_per_sm_clock() -> float:
    """Elements for which an SM finds its operands by their strides in a clock.

    Median of those operations on the H100 above 0.2 ms: 0.73 to 0.82 of bandwidth, where operands that lie
    alike reach 0.89 to 0.92. The V100's memory is too slow to tell: they are as quick there.
    """
    table = columns("steps_ops.csv.gz", ("forward_ms",), keep=("op", frozenset(STRIDED)))
    gpu = card("NVIDIA H100 80GB HBM3")
    assert gpu.num_sms is not None
    assert gpu.boost_clock_hertz is not None
    has_two = np.array(["],[" in shapes for shapes in table["input_shapes"]])
    mask = has_two & (table["card"] == gpu.name) & (table["forward_ms"] >= 0.2)
    shapes = [json.loads(f"[{text.strip('()')}]") for text in table["output_shape"][mask]]
    elements = np.array([math.prod(shape) for shape in shapes])
    rates = elements / (table["forward_ms"][mask] * 1e-3)
    return float(np.median(rates)) / (gpu.num_sms * gpu.boost_clock_hertz)


def strided_16_bits_per_sm_clock() -> float:
    """The same of elements of 16 bits, of which a thread takes four and not two.

    Solved from rope on an A100, in the middle of its lengths (validation/roofline_ops.py): half of its time
    is of kernels that find elements by their strides. Cat of operands that do not lie together has its own.
    """
    from validation.roofline_ops import ROPE_MS, rope  # Transformers takes seconds

    gpu = card("NVIDIA A100-SXM4-80GB")
    assert gpu.num_sms is not None
    assert gpu.boost_clock_hertz is not None
    clocks = gpu.num_sms * gpu.boost_clock_hertz
    machine = roofline.ceilings(gpu)
    kernels = {length: rope(length, 8192) for length in ROPE_MS}

    def ratio(rate: float) -> float:
        rates = {"strided_16_bits": rate, "cat": CAT_PER_SM_CLOCK * clocks}
        rates = {**machine.moving.elements_per_second, **rates}
        tried = replace(machine, moving=replace(machine.moving, elements_per_second=rates))
        of_length = {n: roofline.seconds(each, tried) for n, each in kernels.items()}
        return statistics.median(
            time.total_seconds * 1e3 / ROPE_MS[n] for n, time in of_length.items() if time
        )

    slow, quick = 0.2, 5.0
    for _ in range(30):
        middle = (slow + quick) / 2
        slow, quick = (middle, quick) if ratio(middle * clocks) > 1 else (slow, middle)
    return slow


CAT_PER_SM_CLOCK = 0.97
"""Elements of parts that do not lie together that an SM joins in a clock: it divides by each dimension's size
(torch 2.13 native/cuda/Shape.cu, CatArrIndexToOffset), where TensorIterator multiplies.

[chosen with two rows] Rope's halves in a step of Llama-3.1-8B and one of Qwen2.5-0.5B on an H200
(studies/h200/operations.jsonl: 36.7 us for 8.4 million elements of 16 bits, 31.2 us for 7.3), less
moving.KERNEL_TAIL_SECONDS. The same steps on an H100 test it."""

QUANTIZED_STATE_PER_SM_CLOCK = 0.27
"""Values of 8-bit state that an SM updates in a clock by bitsandbytes' blockwise kernel: for each it looks up
a code, takes the block's largest value and searches the new code.

[chosen with one row] The update of Llama-3.1-8B by adamw_bnb_8bit on an H200, 257 ms for 15.0e9 values
(studies/h200/predicted_vs_measured.jsonl): what is left once the host, clipping and the embedding's float32
state are taken off as predicted. Rows of Qwen2.5-0.5B test it (studies/h200/OPERATIONS.md). Other cards: by
their SMs and clocks, unmeasured."""


FUSED_MS = {"27 launches": 4.503, "one launch": 3.564}
"""_fused_adamw_ of a 128th of Llama 2 70B in bfloat16 on an H100 of 2.4 TB/s, before and after a change that
made one launch of them all (pytorch/pytorch pull request 119842, which torch does not have). The latter
reaches 0.88 of the bandwidth."""
FUSED_BLOCKS_PER_SM = 2
"""58 registers for each of 512 threads: half of an SM's threads (pytorch/pytorch pull request 123566)."""
FOREACH_BLOCKS_PER_SM = 4
FOREACH_CLOCKS_PER_ROUND = 960
"""Clocks of a round of loads of clipping and foreach kernels. [judgement] Twice the 479 that a load from an
idle H100's memory takes (arXiv 2402.13499): no round begins before the one before it is stored."""


def shard_of_llama_2_70b() -> list[TensorSpec]:
    """Weights of Llama 2 70B, each a 128th."""
    width, keys, inner, vocabulary, shards = 8192, 1024, 28672, 32000, 128
    layer = [width * width, keys * width, keys * width, width * width, *(3 * [inner * width])]
    sizes = [vocabulary * width, *(80 * [*layer, width, width]), width, vocabulary * width]
    return [TensorSpec(shape=(size // shards,), dtype="bfloat16") for size in sizes]


def fused_clocks_per_round() -> float:
    """Clocks of a round of loads of a block of _fused_adamw_ that has its SM nearly to itself.

    Solved from FUSED_MS: as one launch all blocks share the bandwidth; as 27, each ends in some blocks that
    begin late, and has nothing else to do.
    """
    gpu = card("NVIDIA H100 80GB HBM3")
    clock = gpu.boost_clock_hertz
    assert gpu.num_sms is not None
    assert clock is not None
    passes = 7  # reads and writes of each value: weight and two moments, and the gradient
    launches = [
        (passes * moved, blocks, -(-longest // 2048))
        for moved, blocks, longest in launches_over(shard_of_llama_2_70b(), 4)
    ]
    all_bytes = sum(moved for moved, _, _ in launches)
    rate = all_bytes / (FUSED_MS["one launch"] * 1e-3 - moving.KERNEL_TAIL_SECONDS)
    at_once = FUSED_BLOCKS_PER_SM * gpu.num_sms

    def ms(clocks: float) -> float:
        rates = replace(
            moving.rates_of(gpu),
            bytes_per_second={"elementwise": rate},
            l2_bytes=0,
            lists={True: (at_once, clocks / clock)},
        )
        return 1e3 * sum(
            moving.KERNEL_TAIL_SECONDS
            + moving.lists_seconds(
                rates, bytes_moved=moved, num_blocks=blocks, num_rounds=rounds, is_fused=True
            )
            for moved, blocks, rounds in launches
        )

    low, high = 0.0, 20_000.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if ms(middle) < FUSED_MS["27 launches"] else (low, middle)
    return low


RULES = """\
# Rates of kernels that memory or instructions bound, made by: python -m validation.kernels.fit_moving
# Do not edit: what is not fitted is in that module, with its source.

# Share of what a contiguous elementwise kernel reaches, in bytes of inputs and outputs. Means of H100 and
# V100, float32, PyTorch 2.1 (steps_ops.csv.gz, above 0.06 ms; elementwise reaches 0.88 of bandwidth there),
# of native_dropout (0.75 and 0.70 of bandwidth, mask included), contiguous (0.65, 0.71), gathers
# (embedding: 0.43, 0.48), and the backward passes of softmax (0.43, 0.45) and layer norm (0.34, 0.35).
# Embedding and index_select are elementwise now: vectorized_gather_kernel (torch 2.13
# native/cuda/IndexKernelUtils.h) copies whole vectors, and the steps of studies/h200 ran it. Softmax's
# backward pass multiplies gradient and result first, by a kernel of its own: six passes where inputs and
# outputs are three (native/cuda/SoftMax.cu, softmax_backward_cuda_out); log_softmax's does not, but its
# short rows take as long: Liger-Kernel's cross_entropy of 4,096 and 8,192 columns on the A100 comes out at
# 0.83 and 1.02 so. Layer norm's reads input and gradient again for the weights' gradients, which a trace
# counts where there are any: 0.35 of bandwidth by three tensors are 0.58 by five. Dropout's backward pass
# is elementwise: there it was timed as grad * (mask.type_as(grad) * scale), which autograd takes where
# gradients of gradients are on: 25 bytes an element in place of 9, which its 0.26 and 0.28 are. Whole
# passes say so too: with dropout on attention they take 3 to 8 % less than their operations. [judgement]
# cat as contiguous, gathers as embedding was then. Long rows of a softmax, beyond shared memory: torch 2.13
# native/cuda/SoftMax.cu reads them for the largest value, for the sum and for the result (four passes where
# inputs and outputs are two), in the backward pass for the sum and for the result (four where they are
# three; of a softmax seven, with the product). Liger-Kernel's cross_entropy on the A100 from 16,384 columns
# on says so too: 0.82 to 0.93 of bandwidth, every pass counted. [judgement] Gradients of embeddings: 0.55
# of bandwidth, between what steps_ops.csv.gz has (0.4 to 2 times as long) and Liger-Kernel (up to four
# times).
[share_of_elementwise]
long_softmax = 0.50
long_softmax_backward = 0.43
long_log_softmax_backward = 0.75
log_softmax_backward = 0.50
embedding_dense_backward = 0.61
native_dropout = 0.82
clone = 0.76
cat = 0.76
index = 0.50
gather = 0.50
softmax_backward = 0.50
layer_norm_backward = 0.65

# Share of bandwidth of sums, norms and softmax of unknown shape, or on a card of unknown SMs. HBM:
# Liger-Kernel's rms_norm on the A100, whatever else is in it taken as predicted, has 0.20, 0.19, 0.29, 0.34
# and 0.37 at widths of 2,048 to 32,768. [judgement] GDDR: an SM has less of it; PEFT's runs on an L40S say
# no less.
[reduction]
HBM = 0.29
GDDR = 0.55

# 4-bit weights that an SM unpacks in a clock, since bitsandbytes PR 1746: the geometric mean of two.
# - B300, its PR 2051 before that change: 4096 x 4096 in 32.9 us and 11008 x 4096 in 68.8 us, a product
#   with 32 rows and nested scales included. 28.3 M more weights take 35.9 us, of which the product's bytes
#   take 9.4: 1.07e12 weights a second, 3.8 for each of 148 SMs at 1.9 GHz.
# - A100, LLaMA-Adapter with and without nf4 (litgpt @8641822 tutorials/resource-tables.md): 0.9 before PR
#   1746, 1.2 to 1.9 since, by the gain that PR 1747 states.
# Memory: what elementwise kernels reach at least.
[dequantize]
weights_per_sm_clock = 2.4
share = 0.75

# Share of the PCIe link that pinned copies reach, in both directions' mean. others.csv: RTX 4090 (4.0
# x16) 23.9 to 27.1 of 31.5 GB/s, RTX 5090 (5.0 x16) 56.3 to 57.4 of 63. [judgement] 3.0 as 4.0.
[[copy_host]]
up_to_bytes_per_second = 40e9
share = 0.82

[[copy_host]]
up_to_bytes_per_second = inf
share = 0.90
"""


def written(rows: list[dict[str, Any]], spread: Mapping[str, Mapping[str, float]]) -> str:
    """The text of data/moving.toml."""
    lines = [
        RULES,
        "# Standard deviation of ln(predicted / measured), by family: validation/kernels/moving.py.",
    ]
    lines[1:1] = [
        "# Elements for which instructions count. strided: found by their strides in float32,",
        "# steps_ops.csv.gz, H100; strided_16_bits: the same in 16 bits, rope on an A100; cat: rope's, two",
        "# rows of an H200; quantized_state: values of 8-bit state in an update, one row of an H200.",
        "[elements_per_sm_clock]",
        f"strided = {strided_elements_per_sm_clock():.3g}",
        f"strided_16_bits = {strided_16_bits_per_sm_clock():.3g}",
        f"cat = {CAT_PER_SM_CLOCK:.3g}",
        f"quantized_state = {QUANTIZED_STATE_PER_SM_CLOCK:.3g}",
        "",
        "# Launches over lists of tensors: blocks of 512 threads on an SM at once, and clocks of a round of",
        "# loads of one. fused: _fused_adamw_ on an H100 (pytorch/pytorch pull requests 119842, 123566).",
        "[lists]",
        "threads = 512",
        f"foreach_blocks_per_sm = {FOREACH_BLOCKS_PER_SM}",
        f"foreach_clocks_per_round = {FOREACH_CLOCKS_PER_ROUND}",
        f"fused_blocks_per_sm = {FUSED_BLOCKS_PER_SM}",
        f"fused_clocks_per_round = {fused_clocks_per_round():.0f}",
        "",
    ]
    for origin, by_family in spread.items():
        lines.append(f"[spread.{origin}]")
        lines += [f"{family} = {value:.2f}" for family, value in by_family.items()]
        lines.append("")
    lines.append("# Share of the bandwidth at which products of few rows read (gemm_bf16.csv.gz).")
    for read in reading_shares():
        lines += ["[[reading]]", f'card = "{read["card"]}"', f"share = {read['share']:.3g}", ""]
    lines.append(
        "# fp32_kernels.csv.gz. Times of a row and a column are those of the SM that works on it."
    )
    for row in rows:
        lines.append("[[card]]")
        for name, value in row.items():
            if isinstance(value, bool):
                lines.append(f"{name} = {str(value).lower()}")
            else:
                lines.append(
                    f"{name} = {value:.3g}" if isinstance(value, float) else f'{name} = "{value}"'
                )
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    from validation.kernels.moving import spreads

    moving._TABLE.write_text(written(fits(), spreads()), encoding="utf-8")


if __name__ == "__main__":
    main()
