"""What memory-efficient attention asks PyTorch's allocator for, call by call, without a card.

    for card in T4 "A100 80GB PCIe" "RTX 3090" "RTX 4090" H200 B200 "RTX 5090"; do
        python -m tools.no_card --gpu "$card" -- \\
            python -m validation.efficient_attention_no_card --seed 2 --calls 60
        python -m tools.no_card --gpu "$card" -- \\
            python -m validation.efficient_attention_no_card --seed 5 --calls 30 --forward
    done

Calls are drawn at random: type, samples, heads, lengths, sizes of heads, dropout, order of tensors. Each
row has what was allocated (bytes) and given back (negative), in order, by its backward pass or, in a file of
their own, by its forward pass. Appends to studies/op-memory-no-card/efficient_attention*.jsonl; nothing is
computed (tools/no_card).
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch

aten = torch.ops.aten
STUDY = Path(__file__).parents[1] / "studies" / "op-memory-no-card"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
HEAD_SIZES = (16, 32, 48, 64, 72, 80, 96, 104, 112, 128, 136, 160, 192, 256)


def drawn(rng: random.Random, major: int) -> dict[str, Any]:
    """Draw the operands of a call that a card of this generation takes."""
    length = rng.choice([1, 17, 64, 100, 128, 150, 200, 512, 777, 1000])
    size = rng.choice(HEAD_SIZES)
    return {
        "dtype": rng.choice([name for name in DTYPES if major >= 8 or name != "bfloat16"]),
        "samples": rng.choice([1, 2, 3, 5]),
        "heads": rng.choice([1, 2, 4, 7, 12, 32, 64]),
        "length": length,
        "keys": rng.choice([length, length, length, 33, 64, 129, 400, 1024]),
        "size": size,
        "value_size": rng.choice([size, size, size, 64, 128, 192]),
        "dropout": rng.choice([0.0, 0.0, 0.1]),
        "by_token": rng.random() < 0.7,
        "gradient_by_token": rng.random() < 0.7,
    }


def operands(call: dict[str, Any], device: str) -> tuple[torch.Tensor, ...]:
    """Return gradient, query, key and value of a call, without content."""

    def empty(length: int, size: int, *, by_token: bool) -> torch.Tensor:
        outer, inner = call["heads"], length
        if by_token:
            outer, inner = inner, outer
        tensor = torch.empty(
            call["samples"], outer, inner, size, dtype=DTYPES[call["dtype"]], device=device
        )
        return tensor.transpose(1, 2) if by_token else tensor

    shapes = ("length", "size"), ("keys", "size"), ("keys", "value_size")
    gradient = empty(call["length"], call["value_size"], by_token=call["gradient_by_token"])
    return gradient, *(empty(call[n], call[s], by_token=call["by_token"]) for n, s in shapes)


def recorded(call: dict[str, Any], *, is_forward: bool) -> list[int]:
    """Run a pass of a call; return what was allocated, and given back as negative, in order."""
    gradient, query, key, value = operands(call, "cuda")
    forward = aten._scaled_dot_product_efficient_attention
    if is_forward:
        torch.cuda.memory._record_memory_history(max_entries=1000)
    made = forward(query, key, value, None, True, call["dropout"], False)
    if is_forward:
        return _recorded_events()
    result, sums, seed, offset = made
    torch.cuda.memory._record_memory_history(max_entries=1000)
    gradients = aten._scaled_dot_product_efficient_attention_backward(
        gradient,
        query,
        key,
        value,
        None,
        result,
        sums,
        seed,
        offset,
        call["dropout"],
        [True, True, True, False],
        False,
    )
    events = _recorded_events()
    del gradients
    return events


def _recorded_events() -> list[int]:
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(None)
    signs = {"alloc": 1, "free_requested": -1}
    return [signs[e["action"]] * e["size"] for e in events if e["action"] in signs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--calls", type=int, required=True)
    parser.add_argument(
        "--forward", action="store_true", help="the forward pass, not the backward one"
    )
    options = parser.parse_args()
    card = torch.cuda.get_device_properties(0)
    rng = random.Random(options.seed)
    name = f"efficient_attention{'_forward' * options.forward}.jsonl"
    with (STUDY / name).open("a", encoding="utf-8") as file:
        for _ in range(options.calls):
            call = drawn(rng, card.major)
            row = {"compute_capability": [card.major, card.minor], "call": call}
            row |= {
                "torch": torch.__version__,
                "events": recorded(call, is_forward=options.forward),
            }
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
