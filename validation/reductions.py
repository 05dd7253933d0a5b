"""What PyTorch's reductions allocate beside their output, asked of PyTorch's CUDA build without a card.

    python -m tools.no_card --gpu H200 -- python -m validation.reductions > rows.jsonl

A JSON object per line: shape, dim and dtype of a sum, or of a norm, the card's multiprocessors, and the
sizes in the order of allocation.
"""

from __future__ import annotations

import itertools
import json

import torch

LENGTHS = (1, 16, 1000, 4096, 65536)
WIDTHS = (1, 64, 576, 1024, 4096, 4097, 4098)
DTYPES = (torch.bfloat16, torch.float32)


def allocated(operation: object, tensor: torch.Tensor, dim: int) -> list[int]:
    """Sizes that a call allocates, but for its output."""
    before = len(_events())
    assert callable(operation)
    operation(tensor, dim)
    sizes = [int(event["size"]) for event in _events()[before:] if event["action"] == "alloc"]
    return sizes[1:]


def _events() -> list[dict[str, int | str]]:
    traces: list[list[dict[str, int | str]]] = torch.cuda.memory._snapshot()["device_traces"]
    return traces[0] if traces else []


def _norm(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(tensor, 2, dim)
    return norm


def main() -> None:
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(max_entries=100_000, context=None)
    card = torch.cuda.get_device_properties(0)
    multiprocessors = card.multi_processor_count, card.max_threads_per_multi_processor
    for dtype, length, width in itertools.product(DTYPES, LENGTHS, WIDTHS):
        tensor = torch.empty(length, width, dtype=dtype, device="cuda")
        for dim, (name, operation) in itertools.product(
            (0, 1), (("sum", torch.sum), ("norm", _norm))
        ):
            row = {
                "torch": torch.__version__,
                "multiprocessors": multiprocessors,
                "operation": name,
                "dtype": str(dtype).removeprefix("torch."),
                "shape": [length, width],
                "dim": dim,
                "allocated": allocated(operation, tensor, dim),
            }
            print(json.dumps(row))


if __name__ == "__main__":
    main()
