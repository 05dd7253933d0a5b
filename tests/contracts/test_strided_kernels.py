"""Which pointwise kernels take one element after the other, and what rope's and a mask's therefore take."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from autotune.catalogue.gpus import find_gpu
from autotune.speed.roofline import ceilings, seconds
from autotune.worker.trace.kernels import TrackedKernel
from autotune.worker.trace.tracker import Tracker
from validation.roofline_ops import rope, traced

A = torch.empty(4, 6, 8, device="meta")
NUM_ELEMENTS = A.numel()
ROPE_MS = {1024: 0.6059, 2048: 1.1327, 4096: 2.1762, 8192: 4.2483, 16384: 8.366}
"""linkedin/Liger-Kernel, benchmark/data/all_benchmark_data.csv, A100-SXM4-80GB: milliseconds by length."""


def kernels(run: Callable[[], object]) -> list[TrackedKernel]:
    tracker = Tracker("meta")
    with tracker:
        run()
    return tracker.recording.kernels


@pytest.mark.parametrize(
    ("run", "is_strided"),
    [
        (lambda: A + A, False),
        (lambda: A * 2.0, False),
        (lambda: A.transpose(0, 1) + A.transpose(0, 1), False),
        (lambda: torch.nn.functional.silu(A), False),
        (lambda: A.to(torch.bfloat16), False),
        (lambda: A > 0, False),
        (lambda: A + A[:1], True),
        (lambda: A / torch.empty((), device="meta"), True),
        (lambda: -A[..., :4], True),
        (lambda: A + A.transpose(1, 2).contiguous().transpose(1, 2), True),
        (lambda: A.transpose(0, 1).contiguous(), True),
        (lambda: A.to(torch.bfloat16).float(), True),
        (lambda: A * A.to(torch.bfloat16), True),
    ],
)
def test_operands_that_do_not_lie_alike(run: Callable[[], object], is_strided: bool) -> None:
    last = kernels(run)[-1]
    assert (len(last.shape) == 1) == is_strided, last


def test_a_mask_is_filled_into_a_copy() -> None:
    mask = torch.empty(4, 1, 8, dtype=torch.bool, device="meta")
    copied, filled = kernels(lambda: A.masked_fill(mask, 0.0))
    assert (copied.name, copied.shape, sum(copied.tensor_bytes)) == ("clone", (), 8 * NUM_ELEMENTS)
    assert (filled.name, filled.shape) == ("masked_fill", (NUM_ELEMENTS,))
    assert sum(filled.tensor_bytes) == 8 * NUM_ELEMENTS + mask.numel()


@pytest.mark.parametrize(("card", "published_ms"), [("H100", 0.211), ("V100 32GB", 0.725)])
def test_masked_fill_of_published_tables(card: str, published_ms: float) -> None:
    """steps_ops.csv.gz: (8, 1, 2048, 2048) numbers and as many places of the mask, in float32."""
    with torch.device("meta"):
        scores, mask = torch.empty(8, 1, 2048, 2048), torch.empty(8, 1, 2048, 2048).bool()
    time = seconds(traced(lambda: scores.masked_fill(mask, 0.0)), ceilings(find_gpu(card)))
    assert time is not None
    assert time.gpu_seconds * 1e3 == pytest.approx(published_ms, rel=0.15)


@pytest.mark.parametrize("length", ROPE_MS)
def test_rope_on_an_a100(length: int) -> None:
    """No constant was chosen with it; by its bytes alone rope came out a third too fast."""
    time = seconds(rope(length, 8192), ceilings(find_gpu("A100-SXM4-80GB")))
    assert time is not None
    assert time.total_seconds * 1e3 == pytest.approx(ROPE_MS[length], rel=0.06)
