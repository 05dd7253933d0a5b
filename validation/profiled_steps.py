"""Operations of real training steps, as a card's profiler saw them, beside what is predicted of each.

    python -m validation.profiled_steps            (half a minute, no card)

operations.jsonl of studies/h200 and of studies/h100-80gb-hbm3, by `make gpu-check`, holds an optimizer step
of each case: every operation with its shapes, dtypes, kernels and seconds on the device, and the kernels by
their names. Here each case is traced and priced again. Beside the H200's: the updates of optimizers but
PyTorch's fused one, as probes measured them (predicted_vs_measured.jsonl, and updates.jsonl, which a search's
probes are in). Writes the tables of both OPERATIONS.md. Two constants of the package are fitted to the H200's
records (validation/kernels/fit_moving.py): a row of updates says what a value of 8-bit state takes, rope's
cat what an element that is joined does. Nothing is fitted to the H100's.

The profiler counts a kernel from its first instruction to its last. A prediction has some 3 us besides for
every launch, in which a kernel begins and ends (roofline.CardRates.kernel_tail_seconds): the tables show that
part by itself. The profiler makes the host slow, so the card rests between kernels and its clocks are high:
products under full load take longer.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.catalogue.gpus import Gpu, find_gpu
from autotune.catalogue.models import resolve
from autotune.common.dtypes import DTYPE_BYTES
from autotune.predict.estimator import Estimator
from autotune.predict.tracing import trace_all
from autotune.records.estimate import TraceSpec
from autotune.space.config import TrainConfig
from autotune.speed import roofline
from autotune.worker.client.forkserver import ForkServer
from validation.published.tables import write_sections

STUDIES = Path(__file__).parents[1] / "studies"
H200, H100 = STUDIES / "h200", STUDIES / "h100-80gb-hbm3"
TASK = "causal-lm"
MOST_ROWS = 40
"""Rows of a table of operations, those that take longest first."""

KINDS = (
    "matrix products",
    "attention, forward",
    "attention, backward",
    "softmax over the vocabulary",
    "sums and means",
    "pointwise, operands alike",
    "pointwise, by strides",
    "16 bits to 32",
    "cat",
    "fill",
    "update and clipping",
    "other",
)

# The first kind whose text is in a kernel's name.
_KIND_OF_KERNEL = {
    "nvjet": "matrix products",
    "cublas": "matrix products",
    "cutlass": "matrix products",
    "gemm": "matrix products",
    "fprop": "attention, forward",
    "flash_fwd": "attention, forward",
    "bprop": "attention, backward",
    "flash_bwd": "attention, backward",
    "cudnn::fusion": "attention, backward",
    "SoftMax": "softmax over the vocabulary",
    "reduce_kernel": "sums and means",
    "CatArray": "cat",
    "FillFunctor": "fill",
    "Memset": "fill",
    "multi_tensor_apply": "update and clipping",
    "unrolled_elementwise_kernel": "16 bits to 32",
    "vectorized_elementwise_kernel": "pointwise, operands alike",
    "DtoD": "pointwise, operands alike",
    "::elementwise_kernel": "pointwise, by strides",
}

_FILLS = ("zeros", "zeros_like", "new_zeros", "zero_", "fill_", "full", "ones_like")
_COPIES = ("_to_copy", "copy_", "clone")
_ONE_NAME = {
    "_cudnn_attention_forward": "attention, forward",
    "_cudnn_attention_backward": "attention, backward",
    "_scaled_dot_product_cudnn_attention": "attention, forward",
    "_scaled_dot_product_cudnn_attention_backward": "attention, backward",
    **dict.fromkeys(("mm", "bmm", "addmm"), "product"),
    **dict.fromkeys(_COPIES, "copy"),
    **dict.fromkeys(_FILLS, "fill"),
    **dict.fromkeys(("_fused_adamw_", "_foreach_mul_", "_foreach_norm", "optimizer"), "update"),
    "add_": "add",
    "mul_": "mul",
}
"""Names that the profiler and a trace have for the same work."""
_BY_NAME_ALONE = (
    "update",
    "embedding_dense_backward",
    "_log_softmax",
    "_log_softmax_backward_data",
)


@dataclass(kw_only=True, slots=True)
class Work:
    """What some kernels take: measured and predicted."""

    launches: float = 0.0
    seconds: float = 0.0
    predicted_launches: float = 0.0
    predicted_seconds: float = 0.0

    def add(self, launches: float, seconds: float) -> None:
        self.launches += launches
        self.seconds += seconds

    def predict(self, launches: float, seconds: float) -> None:
        self.predicted_launches += launches
        self.predicted_seconds += seconds


Step = Sequence[tuple[roofline.Kernel, float, float]]
"""(a kernel, how often a step launches it, predicted seconds of a launch)."""


def records(name: str = "operations", study: Path = H200) -> list[dict[str, Any]]:
    """The records of a file, in their order."""
    lines = (study / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def _estimator(model: str, config: TrainConfig, gpu: Gpu, server: ForkServer | None) -> Estimator:
    spec = TraceSpec.of(config)
    traces = trace_all(resolve(model), TASK, config.sequence_length, gpu, [spec], server=server)
    return Estimator(traces, gpu, memory_budget_bytes=gpu.capacity_bytes)


def predicted(record: Mapping[str, Any], gpu: Gpu, server: ForkServer | None = None) -> Step:
    """The kernels of a recorded step as they are predicted: micro-steps, gradients added, the update."""
    config = TrainConfig(**record["prediction"]["config"])
    estimator = _estimator(record["model"], config, gpu, server)
    kernels = estimator.kernels(config)
    accumulation = config.gradient_accumulation_steps
    trainable = estimator.trace_of(config).trainable(config.lora_rank or 0)
    added = [
        roofline.Kernel(
            name="add_",
            kind="elementwise",
            dtype=weight.dtype,
            flops=0,
            bytes_moved=3 * weight.size_bytes,
            count=accumulation - 1,
        )
        for weight in trainable
    ]
    priced = roofline.kernel_seconds([*kernels, *added], roofline.ceilings(gpu))
    assert priced is not None
    counts = [k.count * (1 if k.phase == "update" else accumulation) for k in kernels]
    counts += [kernel.count for kernel in added]
    return [
        (kernel, count, seconds)
        for kernel, count, (seconds, _) in zip([*kernels, *added], counts, priced, strict=True)
    ]


def kind_of_kernel(name: str) -> str:
    """Kind of a kernel by the name that it has on the card; narrowing copies are pointwise."""
    return next((kind for part, kind in _KIND_OF_KERNEL.items() if part in name), "other")


def kind_of(kernel: roofline.Kernel) -> str:
    """Kind of a kernel of a trace."""
    direction = "backward" if "backward" in kernel.name else "forward"
    if kernel.kind == "matmul":
        return "matrix products"
    if kernel.kind == "attention":
        return f"attention, {direction}"
    if "softmax" in kernel.name:
        return "softmax over the vocabulary"
    if kernel.name in ("sum", "mean"):
        return "sums and means"
    if kernel.name == "optimizer":
        return "update and clipping"
    if kernel.name == "cat":
        return "cat"
    if kernel.name in _FILLS or kernel.name == "nll_loss_backward":
        return "fill"
    if len(kernel.shape) == 1:
        is_wider = kernel.name in _COPIES and DTYPE_BYTES[kernel.dtype] == 2
        moved_bytes = kernel.bytes_moved / kernel.shape[0]
        return "16 bits to 32" if is_wider and moved_bytes == 6 else "pointwise, by strides"
    return "pointwise, operands alike"


def by_kind(record: Mapping[str, Any], step: Step) -> dict[str, Work]:
    """What each kind of kernel takes in a step."""
    found = {kind: Work() for kind in KINDS}
    for row in record["kernels"]:
        found[kind_of_kernel(row["name"])].add(row["count"], row["seconds"])
    for kernel, count, seconds in step:
        found[kind_of(kernel)].predict(count, count * seconds)
    return found


def by_operation(record: Mapping[str, Any], step: Step) -> dict[str, Work]:
    """What each operation takes in a step: products by their sizes, others by what they move."""
    found: dict[str, Work] = defaultdict(Work)
    for row in record["operations"]:
        found[_measured_key(row)].add(row["kernels"], row["seconds"])
    for kernel, count, seconds in step:
        found[_predicted_key(kernel)].predict(count, count * seconds)
    return found


def _measured_key(row: Mapping[str, Any]) -> str:
    plain = row["name"].removeprefix("aten::")
    name = _ONE_NAME.get(plain, plain)
    if name == "product":
        (m, k), (_, n) = row["shapes"][-4:-2] if plain == "addmm" else row["shapes"]
        return f"product {m} x {n} x {k}"
    if name in _BY_NAME_ALONE or name.startswith("attention"):
        return name
    tensors = [
        (shape, _DTYPES[dtype])
        for shape, dtype in zip(row["shapes"], row["dtypes"], strict=False)
        if shape and dtype in _DTYPES
    ]
    if plain == "cat":
        inputs = row["shapes"][0]
        return _key(name, "bfloat16", 4 * sum(map(math.prod, inputs)))
    if not tensors:
        return plain
    largest = max(math.prod(shape) for shape, _ in tensors)
    result_bytes = largest * max(DTYPE_BYTES[dtype] for _, dtype in tensors)
    moved = sum(math.prod(shape) * DTYPE_BYTES[dtype] for shape, dtype in tensors)
    if plain in ("fill_", "sum", "mean"):
        result_bytes = 0
    if plain == "copy_":  # the result is its first argument
        return _key(name, tensors[-1][1], moved)
    return _key(name, tensors[0][1], moved + result_bytes)


def _predicted_key(kernel: roofline.Kernel) -> str:
    name = _ONE_NAME.get(kernel.name, kernel.name)
    if name == "product":
        _, m, n, k = kernel.shape
        return f"product {m:.0f} x {n:.0f} x {k:.0f}"
    if name in _BY_NAME_ALONE or name.startswith("attention"):
        return name
    moved = kernel.bytes_moved
    if name in ("sum", "mean") and kernel.shape:  # what is read, as the profiler's shapes say
        moved = math.prod(kernel.shape) * DTYPE_BYTES[kernel.dtype]
    return _key(name, kernel.dtype, moved)


_DTYPES = {
    "c10::BFloat16": "bfloat16", "c10::Half": "float16", "float": "float32", "long int": "int64",
}  # fmt: skip


def _key(name: str, dtype: str, moved_bytes: float) -> str:
    # Small operands beside a large one, such as a table of sines, are counted by one side alone.
    return f"{name}, {dtype}, {moved_bytes / 1e6:.2g} MB"


def markdown(works: Mapping[str, Work], names: Iterable[str], tail_seconds: float) -> str:
    """A table of these works, in that order, and their sum."""
    total = Work()
    lines = [
        "| | launches | predicted | measured, ms | predicted, ms | of these starts and ends, ms | ratio |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for work in works.values():
        total.add(work.launches, work.seconds)
        total.predict(work.predicted_launches, work.predicted_seconds)
    for name, work in (*((name, works[name]) for name in names), ("**all**", total)):
        tails_ms = 1e3 * tail_seconds * work.predicted_launches
        ratio = work.predicted_seconds / work.seconds if work.seconds else math.nan
        lines.append(
            f"| {name} | {work.launches:,.0f} | {work.predicted_launches:,.0f}"
            f" | {1e3 * work.seconds:.2f} | {1e3 * work.predicted_seconds:.2f} | {tails_ms:.2f}"
            f" | {'' if math.isnan(ratio) else f'{ratio:.2f}'} |"
        )
    return "\n".join(lines)


def updates(gpu: Gpu, server: ForkServer) -> str:
    """A table of the H200's updates by optimizers but PyTorch's fused one, beside predicted ones."""
    lines = [
        "| model | method | optimizer | micro-batch | measured, ms | predicted, ms | ratio |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for record in (*records("predicted_vs_measured"), *records("updates")):
        measured = record["measurement"]
        config = TrainConfig(**measured["config"])
        if config.optimizer == "adamw_torch_fused" or config.update_in_backward:
            continue
        estimate = _estimator(record["model"], config, gpu, server).estimate(config)
        seconds = estimate.optimizer_step_seconds
        assert seconds is not None
        ratio = seconds / measured["optimizer_step_seconds"]
        lines.append(
            f"| {record['model']} | {config.method} | {config.optimizer} | {config.micro_batch_size}"
            f" | {1e3 * measured['optimizer_step_seconds']:.1f} | {1e3 * seconds:.1f} | {ratio:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    with ForkServer() as server:
        for study in (H200, H100):
            texts = tables(study, server)
            if study == H200:
                texts["updates"] = updates(find_gpu("NVIDIA H200"), server)
            write_sections(study / "OPERATIONS.md", texts)
            print(*texts.values(), sep="\n")


def tables(study: Path, server: ForkServer) -> dict[str, str]:
    """The sections of a study's steps, by kind of kernel and by operation."""
    kinds, operations = list[str](), list[str]()
    for record in records(study=study):
        gpu = find_gpu(record["measurement"]["fingerprint"]["device"])
        tail_seconds = roofline.ceilings(gpu).kernel_tail_seconds
        step = predicted(record, gpu, server)
        of_kind, of_operation = by_kind(record, step), by_operation(record, step)
        kinds.append(f"{record['key']}\n\n{markdown(of_kind, KINDS, tail_seconds)}\n")
        most = sorted(
            of_operation,
            key=lambda name: -max(of_operation[name].seconds, of_operation[name].predicted_seconds),
        )[:MOST_ROWS]
        operations.append(f"{record['key']}\n\n{markdown(of_operation, most, tail_seconds)}\n")
    return {"kinds": "\n".join(kinds), "operations": "\n".join(operations)}


if __name__ == "__main__":
    main()
