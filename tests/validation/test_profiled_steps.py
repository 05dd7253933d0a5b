"""Operations of an H200's and an H100's steps, as profilers saw them: how they are sorted, some predicted."""

from __future__ import annotations

import math
from typing import Any

import pytest

from autotune.catalogue.gpus import find_gpu
from autotune.common.dtypes import DTYPE_BYTES
from autotune.speed import roofline
from validation import profiled_steps

QWEN, LLAMA = profiled_steps.records()
CARD = roofline.ceilings(find_gpu("NVIDIA H200"))
H100_STEPS = profiled_steps.records(study=profiled_steps.H100)
H100 = roofline.ceilings(find_gpu("h100-80gb-hbm3"))


@pytest.mark.parametrize("record", [QWEN, LLAMA], ids=["qwen", "llama"])
def test_every_kernel_of_weight_has_a_kind(record: dict[str, Any]) -> None:
    works = profiled_steps.by_kind(record, [])
    assert sum(work.seconds for work in works.values()) == pytest.approx(record["busy_seconds"])
    assert works["other"].seconds < 0.003 * record["busy_seconds"]
    assert all(works[kind].launches for kind in profiled_steps.KINDS)
    attention = [row["name"] for row in record["kernels"] if "sdpa" in row["name"]]
    assert attention
    assert all("cudnn" in name for name in attention)


def test_a_trace_and_the_profiler_name_work_alike() -> None:
    step = [
        (
            roofline.Kernel(
                name=name, kind=kind, dtype=dtype, flops=0, bytes_moved=moved, shape=shape
            ),
            2.0,
            1e-3,
        )
        for name, kind, dtype, moved, shape in (
            ("mm", "matmul", "bfloat16", 0, (1, 8192, 4864, 896)),
            ("_to_copy", "elementwise", "bfloat16", 7467958272, (1244659712,)),
            ("_log_softmax", "reduction", "float32", 0, (8192, 151936)),
            ("mean", "reduction", "float32", 29392896, (8192, 896)),
            ("_scaled_dot_product_cudnn_attention", "attention", "bfloat16", 0, ()),
        )
    ]
    found = profiled_steps.by_operation(QWEN, step)
    both = {name for name, work in found.items() if work.seconds and work.predicted_seconds}
    assert both == {
        "product 8192 x 4864 x 896",
        "copy, bfloat16, 7.5e+03 MB",
        "_log_softmax",
        "mean, float32, 29 MB",
        "attention, forward",
    }


@pytest.mark.parametrize(
    ("record", "vocabulary", "tokens"), [(QWEN, 151936, 8192), (LLAMA, 128256, 2048)]
)
def test_what_logits_take(record: dict[str, Any], vocabulary: int, tokens: int) -> None:
    """Softmax of logits and its backward pass: no constant was chosen with them."""
    size = tokens * vocabulary
    for name, passes in (("_log_softmax", 2), ("_log_softmax_backward_data", 3)):
        kernel = roofline.Kernel(
            name=name,
            kind="reduction",
            dtype="float32",
            flops=0,
            bytes_moved=4 * passes * size,
            shape=(tokens, vocabulary),
        )
        (row,) = (row for row in record["operations"] if row["name"] == f"aten::{name}")
        assert of(kernel) == pytest.approx(row["seconds"] / record["num_micro_steps"], rel=0.06)


def test_operations_on_elements_found_by_their_strides() -> None:
    """A cast of logits to 32 bits, rope's product and its cat; their rate is of other cards' tables."""
    for shape, name, bytes_each, measured in (
        ((8, 1024, 151936), "_to_copy", 6, 0.007220989 / 2),
        ((2, 32, 1024, 128), "mul", 4, 0.009956 / 384),
        ((2, 32, 1024, 128), "cat", 4, 0.004702 / 128),
    ):
        elements = math.prod(shape)
        kernel = roofline.Kernel(
            name=name,
            kind="elementwise",
            dtype="bfloat16",
            flops=0,
            bytes_moved=bytes_each * elements,
            shape=(elements,),
        )
        assert of(kernel) == pytest.approx(measured, rel=0.25), name


@pytest.mark.parametrize(
    ("name", "operand", "kernel", "rel"),
    [
        ("sum", [8192, 128], ("sum", "bfloat16", (128, 8192, 1)), 0.11),
        ("sum", [8192, 896], ("sum", "bfloat16", (896, 8192, 1)), 0.11),
        ("mean", [8, 1024, 896], ("mean", "float32", (8192, 896)), 0.04),
        ("mean", [2, 1024, 4096], ("mean", "float32", (2048, 4096)), 0.1),
        ("cat", [[8, 14, 1024, 32]] * 2, ("cat", "bfloat16", (7340032,)), 0.04),
        ("cat", [[2, 32, 1024, 64]] * 2, ("cat", "bfloat16", (8388608,)), 0.05),
    ],
)
def test_sums_and_cat_of_an_h100(
    name: str, operand: list[Any], kernel: tuple[str, str, tuple[int, ...]], rel: float
) -> None:
    """Prices of sums have no constant that a card's sums chose; cat's is of the H200's steps."""
    rows = [row for record in H100_STEPS for row in record["operations"]]
    (row,) = (r for r in rows if r["name"] == f"aten::{name}" and r["shapes"][0] == operand)
    # The clearing of memory that counts blocks is a launch of its own.
    calls = row["kernels"] / (2 if len(kernel[2]) == 3 else 1)
    size_bytes = DTYPE_BYTES[kernel[1]] * math.prod(kernel[2])
    priced = roofline.Kernel(
        name=name,
        kind=roofline.kind_of(name),
        dtype=kernel[1],
        flops=0,
        bytes_moved=2 * size_bytes if name == "cat" else size_bytes,
        shape=kernel[2],
    )
    assert of(priced, H100) == pytest.approx(row["seconds"] / calls, rel=rel)


def of(kernel: roofline.Kernel, card: roofline.CardRates = CARD) -> float:
    priced = roofline.kernel_seconds([kernel], card)
    assert priced is not None
    return priced[0][0]
