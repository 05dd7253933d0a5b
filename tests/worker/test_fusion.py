"""The kernels that are made of small graphs: what is one kernel, and what it moves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from autotune.worker.trace.fusion import FusedKernel, kernels_of
from autotune.worker.trace.lowering import bytes_of, fuse_products

ROWS, COLUMNS = 64, 512
X_BYTES = ROWS * COLUMNS * 4


def graph(function: Callable[..., object], *shapes: tuple[int, ...]) -> fx.Graph:
    inputs = [torch.empty(shape, device="meta") for shape in shapes]
    return make_fx(function)(*inputs).graph


def fused(found: list[FusedKernel]) -> list[FusedKernel]:
    return [kernel for kernel in found if not kernel.is_of_library]


def moved_bytes(kernel: FusedKernel) -> int:
    return sum(kernel.reads.values()) + sum(map(bytes_of, kernel.writes))


def test_a_chain_of_pointwise_operations_is_one_kernel() -> None:
    made = kernels_of(graph(lambda x, y: ((x * 2).exp() + y).tanh(), *[(ROWS, COLUMNS)] * 2))
    (kernel,) = made
    assert moved_bytes(kernel) == 3 * X_BYTES


def test_a_norm_reads_its_input_once() -> None:
    def norm(x: torch.Tensor) -> torch.Tensor:
        return x * (x * x).mean(-1, keepdim=True).rsqrt()

    (kernel,) = kernels_of(graph(norm, (ROWS, COLUMNS)))
    assert kernel.reduction is not None
    assert moved_bytes(kernel) == 2 * X_BYTES


def test_what_a_product_reads_is_written_and_nothing_is_fused_across_it() -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        return (y @ w).exp() + y

    found = kernels_of(graph(step, (ROWS, COLUMNS), (COLUMNS, COLUMNS)))
    assert [kernel.is_of_library for kernel in found] == [False, True, False]
    assert [moved_bytes(kernel) for kernel in fused(found)] == [2 * X_BYTES, 3 * X_BYTES]


def test_two_that_read_the_same_are_one_kernel() -> None:
    (kernel,) = kernels_of(graph(lambda x: (x.exp(), x.tanh()), (ROWS, COLUMNS)))
    assert moved_bytes(kernel) == 3 * X_BYTES


@pytest.mark.parametrize(
    ("backend", "rows", "rows_share", "num_kernels"),
    [
        ("cuda", 16384, 1.0, 1),
        ("cpu", 16384, 1.0, 2),
        ("cuda", 8192, 1.0, 2),  # 4 Mi elements
        ("cuda", 16384, 0.5, 2),
        ("cuda", 64, 1.0, 2),
    ],
)
def test_sums_over_many_rows_and_their_columns_are_one_kernel_on_a_gpu(
    backend: str, rows: int, rows_share: float, num_kernels: int
) -> None:
    made = graph(lambda x: (x.sum(0), x.sum(1)), (rows, COLUMNS))
    assert len(kernels_of(made, backend, rows_share=rows_share)) == num_kernels


def test_other_sizes_are_kernels_apart() -> None:
    made = graph(lambda x, y: (x.exp(), y.exp()), (ROWS, COLUMNS), (ROWS, 3))
    assert len(kernels_of(made)) == 2


def test_an_expanded_input_is_read_once() -> None:
    (kernel,) = kernels_of(
        graph(lambda x, w: x * w.expand(ROWS, COLUMNS), (ROWS, COLUMNS), (COLUMNS,))
    )
    assert sum(kernel.reads.values()) == X_BYTES + COLUMNS * 4


SQUARE = (COLUMNS, COLUMNS)


@pytest.mark.parametrize(
    ("function", "num_kernels"),
    [
        (lambda x, w, y: x @ w + y, 1),
        (lambda x, w, y: y + (x @ w).permute(1, 0).permute(1, 0), 1),
        (lambda x, w, y: x @ w + y.permute(1, 0), 1),
        (lambda x, w, y: y + (x @ w).permute(1, 0), 2),
        (lambda x, w, y: (x @ w + y).exp(), 2),
        (lambda x, w, y: (lambda product: (product + y, product))(x @ w), 2),
    ],
    ids=[
        "plain",
        "turned twice",
        "other turned",
        "turned",
        "read by a pointwise one",
        "read again",
    ],
)
def test_a_product_whose_sum_the_caller_reads_is_added_to_by_its_own_kernel(
    function: Callable[..., object], num_kernels: int
) -> None:
    made = graph(function, SQUARE, SQUARE, SQUARE)
    fuse_products(made)
    assert len(kernels_of(made)) == num_kernels


def test_what_is_scattered_is_there_before_it_is_read() -> None:
    def gradient(places: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        table = torch.zeros((COLUMNS, COLUMNS), device="meta")
        return table.index_put((places.long(),), values * 2, accumulate=True).bfloat16()

    scattered, converted = kernels_of(graph(gradient, (ROWS,), (ROWS, COLUMNS)))
    assert list(map(bytes_of, scattered.writes)) == [COLUMNS * COLUMNS * 4]
    assert list(map(bytes_of, converted.writes)) == [COLUMNS * COLUMNS * 2]


def test_a_number_at_one_place_of_each_row_is_not_scattered() -> None:
    def gradient(places: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.full((ROWS, COLUMNS), 0.0, device="meta").scatter(1, places.long(), -1.0) * x

    (kernel,) = kernels_of(graph(gradient, (ROWS, 1), (ROWS, COLUMNS)))
    assert moved_bytes(kernel) == 2 * X_BYTES + ROWS * 4
