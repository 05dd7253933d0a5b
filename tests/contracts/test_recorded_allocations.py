"""What PyTorch's own CUDA code allocates for one operation and its gradient, against the trace's peak.

Recorded with torch 2.13.0+cu130 under tools/no_card, on no card: the kernels computed nothing, the
allocations are PyTorch's own. To record again:

    PYTHONPATH=. python -m tools.no_card --gpu H200 -- \\
        python tests/contracts/test_recorded_allocations.py
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from autotune.memory.replayer import replay
from autotune.memory.traces.terms import RULES
from autotune.worker.trace.cuda import Device, Workspaces, device_choices
from autotune.worker.trace.kernel_buffers import hidden_buffers
from autotune.worker.trace.tracker import Tracker

H200 = Device(compute_capability=(9, 0), cublas_workspace_bytes=33_554_432, num_sms=132)

Make = Callable[..., torch.Tensor]


def weight_of_a_norm(make: Make, rows: int, columns: int) -> torch.Tensor:
    return make(rows, columns) * make(columns, trains=True)


def embedding(make: Make, tokens: int, rows: int) -> torch.Tensor:
    places = make(tokens, dtype=torch.int64)
    return F.embedding(places, make(rows, 64, trains=True))


def unfused_attention(make: Make, heads: int, length: int) -> torch.Tensor:
    query = make(1, heads, length, 62, trains=True)  # a size that no fused kernel takes in float32
    key = make(1, 1, length, 62)
    mask = make(1, heads, length, length)
    return F.scaled_dot_product_attention(query, key, key, attn_mask=mask)


def dropped(make: Make, rows: int, columns: int) -> torch.Tensor:
    return F.dropout(make(rows, columns, trains=True) * 2, 0.5)


CASES: dict[str, tuple[Callable[..., torch.Tensor], tuple[int, int]]] = {
    "a norm's weight": (weight_of_a_norm, (1024, 896)),
    "a norm's weight, more rows": (weight_of_a_norm, (16_384, 2048)),
    "a norm's weight, columns of two": (weight_of_a_norm, (4096, 1022)),
    "a norm's weight, few rows": (weight_of_a_norm, (512, 2048)),
    "a bias": (weight_of_a_norm, (1024, 128)),
    "an embedding of few tokens": (embedding, (3072, 50_000)),
    "an embedding": (embedding, (4096, 50_000)),
    "an embedding of few rows": (embedding, (50_000, 1000)),
    "unfused attention": (unfused_attention, (7, 512)),
    "dropout": (dropped, (1024, 1024)),
}

PEAKS = {
    "a norm's weight": 22_027_776,
    "a norm's weight, more rows": 675_299_840,
    "a norm's weight, columns of two": 75_489_792,
    "a norm's weight, few rows": 16_793_600,
    "a bias": 3_147_264,
    "an embedding of few tokens": 27_197_440,
    "an embedding": 29_811_200,
    "an embedding of few rows": 29_659_136,
    "unfused attention": 99_262_464,
    "dropout": 20_971_520,
}
"""torch.cuda.max_memory_allocated, bytes."""


def make_on(device: str) -> Make:
    def make(*shape: int, trains: bool = False, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=device, requires_grad=trains)

    return make


def run(name: str, device: str) -> None:
    function, sizes = CASES[name]
    out = function(make_on(device), *sizes)
    out.backward(torch.empty_like(out))


def h200() -> Tracker:
    workspaces = Workspaces(H200.cublas_workspace_bytes, are_kept=True)  # As of torch 2.11.
    buffers = functools.partial(hidden_buffers, H200.multiprocessors)
    return Tracker("meta", hidden_buffers=buffers, at_launch=workspaces.at_launch)


def predicted_peak_bytes(name: str) -> int:
    tracker = h200()
    with device_choices(H200), tracker:
        run(name, "meta")
    tensors = tracker.recording.tensors
    sizes = [RULES[t.rule[0]](t.rule[1:]) if t.rule else t.size_bytes for t in tensors]
    return replay(sizes, list(tracker.recording.events)).peak_allocated_bytes


@pytest.mark.parametrize("name", CASES)
def test_the_peak_is_what_cuda_allocated(name: str) -> None:
    assert predicted_peak_bytes(name) == PEAKS[name]


def sizes_allocated(function: Callable[[Make], torch.Tensor]) -> list[int]:
    tracker = h200()
    with device_choices(H200), tracker:
        out = function(make_on("meta"))
        out.backward(torch.empty_like(out))
    return [tensor.size_bytes for tensor in tracker.recording.tensors]


def test_what_is_picked_by_places_gets_its_gradient_in_place() -> None:
    """Under a dispatch mode PyTorch puts it into a copy of the zeros; without one, where they are."""

    def picked(make: Make) -> torch.Tensor:
        return make(512, 64, 64, trains=True)[:, make(2, dtype=torch.int64)]

    weight_and_gradient = [512 * 64 * 64 * 4] * 2
    assert [size for size in sizes_allocated(picked) if size > 2**20] == weight_and_gradient


def test_a_product_has_its_memory_before_the_workspace() -> None:
    sizes = sizes_allocated(lambda make: make(64, 32) @ make(32, 16, trains=True))
    workspace = sizes.index(H200.cublas_workspace_bytes)
    assert sizes[workspace - 1] == 64 * 16 * 4


def test_a_dropouts_mask_comes_before_what_is_left() -> None:
    sizes = sizes_allocated(lambda make: F.dropout(make(64, 32, trains=True), 0.5))
    assert sizes[1:3] == [64 * 32, 64 * 32 * 4]


if __name__ == "__main__":
    for case in CASES:
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        run(case, "cuda")
        print(f'    "{case}": {torch.cuda.max_memory_allocated():_},')
