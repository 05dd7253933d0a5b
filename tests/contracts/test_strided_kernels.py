"""Which pointwise kernels take one element after the other, and what rope's and a mask's therefore take."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from autotune.catalogue.gpus import find_gpu
from autotune.speed.roofline import ceilings, seconds
from autotune.worker.trace.kernels import TrackedKernel
from autotune.worker.trace.tracker import Tracker
from validation.roofline_ops import ROPE_MS, rope, traced

A = torch.empty(4, 6, 8, device="meta")
T, NARROW = A.transpose(1, 2), A[:, :, :1]
NUM_ELEMENTS = A.numel()


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
        (lambda: torch.cat((A, A)), False),
        (lambda: torch.cat((A[..., :4], A), dim=2), True),
    ],
)
def test_operands_that_do_not_lie_alike(run: Callable[[], object], is_strided: bool) -> None:
    last = kernels(run)[-1]
    assert (len(last.shape) == 1) == is_strided, last


@pytest.mark.parametrize(("dim", "shape"), [(0, ()), (2, (96,))])
def test_a_part_is_copied_into_zeros(dim: int, shape: tuple[int, ...]) -> None:
    """The part's gradient is read and written, and all of the zeros are."""
    part = A.narrow(dim, 0, A.shape[dim] // 2).contiguous()
    (into,) = kernels(
        lambda: torch.ops.aten.slice_backward(part, A.shape, dim, 0, A.shape[dim] // 2, 1)
    )
    assert (into.name, into.shape) == ("slice_backward", shape)
    assert sum(into.tensor_bytes) == 4 * NUM_ELEMENTS + 2 * 4 * part.numel()


def test_what_is_added_to_places_leaves_the_others() -> None:
    """The numbers are read, with their places' own, which are written."""
    numbers = torch.empty(4, 6, 1, device="meta")
    places = torch.empty_like(numbers, dtype=torch.int64)
    added = kernels(lambda: A.clone().scatter_add_(2, places, numbers))[-1]
    assert sum(added.tensor_bytes) == (8 + 3 * 4) * numbers.numel()


@pytest.mark.parametrize(
    ("run", "shape"),
    [
        (lambda: A.sum(-1), (24, 8)),
        (lambda: A.mean(-1, keepdim=True), (24, 8)),
        (lambda: A.sum(), (1, 192)),
        (lambda: A.sum((0, 2)), (6, 32)),
        (lambda: T.sum(1), (24, 8)),
        (lambda: A.sum((0, 1)), (8, 24, 1)),
        (lambda: A.amax(0), (48, 4, 1)),
        (lambda: torch.linalg.vector_norm(A, dim=1), (32, 6, 1)),
        (lambda: NARROW.sum(1), (4, 6)),
    ],
)
def test_what_a_sum_goes_over(run: Callable[[], object], shape: tuple[int, ...]) -> None:
    (found,) = kernels(run)
    assert found.shape == shape


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_norm_reads_once_more_for_gradients_of_weights(is_trained: bool) -> None:
    norm = torch.nn.LayerNorm(8, device="meta").requires_grad_(is_trained)
    x = A.clone().requires_grad_()
    *_, last = kernels(lambda: norm(x).backward(A))
    assert last.name == "native_layer_norm_backward"
    small = 4 * (2 * 24 + 2 * 8)  # mean and deviation of rows; weight and bias
    passes = 5 if is_trained else 3
    assert sum(last.tensor_bytes) == passes * 4 * NUM_ELEMENTS + small + (64 if is_trained else 0)


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
    """The rate of strided elements of 16 bits was chosen with these; an H200's profile tests it."""
    time = seconds(rope(length, 8192), ceilings(find_gpu("A100-SXM4-80GB")))
    assert time is not None
    assert time.total_seconds * 1e3 == pytest.approx(ROPE_MS[length], rel=0.06)
