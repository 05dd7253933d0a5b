"""Which kernel PyTorch's CUDA build chooses for scaled_dot_product_attention, card by card.

    for gpu in T4 A100 "RTX 3090" "RTX 4090" H200 B200 "RTX 5090"; do
        python -m tools.no_card --gpu "$gpu" -- python -m validation.attention_kernels
    done

PyTorch is asked (torch._fused_sdp_choice), nothing is computed: no card is needed (tools/no_card), and one
would answer the same. Added to studies/attention-kernels/choices.json; tests/contracts holds
autotune.worker.trace.sdpa against it, call by call.

choices.json: {letters: ["2.13.0+cu130 8.0", ...]}: a letter for each of calls(), in that order (the first
of cudnn, flash, efficient or math), and the versions and compute capabilities that chose so.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

CHOICES = Path(__file__).parents[1] / "studies" / "attention-kernels" / "choices.json"
LETTERS = {0: "m", 1: "f", 2: "e", 3: "c"}
"""Of torch.nn.attention.SDPBackend."""

BATCH, HEADS, LENGTH = 2, 8, 128

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZES = (
    *((size, size) for size in (32, 60, 64, 72, 80, 96, 128, 160, 192, 200, 224, 232, 256, 512)),
    (64, 32), (96, 64), (192, 128), (256, 128), (576, 512), (72, 36),
)  # fmt: skip
"""Of a head of queries and keys, and of values."""
MASKS = ("none", "causal", "boolean", "one row", "added", "of each head", "trained", "by columns")
DROPOUTS = (0.0, 0.1, 0.125)
KEY_HEADS = ((HEADS, False), (2, True), (HEADS, True), (1, False))
"""Heads of keys and values, and enable_gqa."""
LENGTHS = ((LENGTH, LENGTH), (101, 101), (1, 1), (1, LENGTH), (LENGTH, 1), (LENGTH, 2 * LENGTH))
"""Queries and keys."""


def calls(device: str) -> Iterator[dict[str, Any]]:
    """The arguments of each call: everything at one length, then the lengths."""
    usual = (LENGTHS[:1], DTYPES, SIZES, MASKS, DROPOUTS, KEY_HEADS, (True, False))
    lengths = (LENGTHS[1:], DTYPES, SIZES[2:3], MASKS, DROPOUTS, KEY_HEADS[:1], (True,))
    for axes in (usual, lengths):
        for (length, key_length), dtype, sizes, mask, dropout_p, heads, trains in itertools.product(
            *axes
        ):
            key_heads, enable_gqa = heads
            sized = functools.partial(_heads, dtype=dtype, device=device, trains=trains)
            yield {
                "query": sized(HEADS, length, sizes[0]),
                "key": sized(key_heads, key_length, sizes[0]),
                "value": sized(key_heads, key_length, sizes[1]),
                "mask": _mask(mask, length, key_length, dtype, device),
                "dropout_p": dropout_p,
                "is_causal": mask == "causal",
                "enable_gqa": enable_gqa,
            }


@functools.cache
def _heads(
    heads: int, length: int, size: int, *, dtype: torch.dtype, device: str, trains: bool
) -> torch.Tensor:
    """As a projection leaves them."""
    whole = torch.empty(BATCH, length, heads, size, dtype=dtype, device=device)
    return whole.requires_grad_(trains).transpose(1, 2)


@functools.cache
def _mask(
    kind: str, length: int, key_length: int, dtype: torch.dtype, device: str
) -> torch.Tensor | None:
    if kind in ("none", "causal"):
        return None
    heads = HEADS if kind in ("of each head", "trained") else 1
    shape = [BATCH, heads, 1 if kind == "one row" else length, key_length]
    dtype = torch.bool if kind in ("boolean", "one row") else dtype
    if kind == "by columns":
        return torch.empty(*shape[:2], key_length, length, dtype=dtype, device=device).mT
    return torch.empty(shape, dtype=dtype, device=device, requires_grad=kind == "trained")


def main() -> None:
    chosen = (
        torch._fused_sdp_choice(
            call["query"],
            call["key"],
            call["value"],
            call["mask"],
            call["dropout_p"],
            call["is_causal"],
            enable_gqa=call["enable_gqa"],
        )
        for call in calls("cuda")
    )
    letters = "".join(LETTERS[kernel] for kernel in chosen)
    major, minor = torch.cuda.get_device_capability()
    asked = f"{torch.__version__} {major}.{minor}"
    known = json.loads(CHOICES.read_text(encoding="utf-8")) if CHOICES.exists() else {}
    choices = {k: left for k, v in known.items() if (left := [name for name in v if name != asked])}
    choices[letters] = sorted([*choices.get(letters, []), asked])
    CHOICES.parent.mkdir(parents=True, exist_ok=True)
    CHOICES.write_text(json.dumps(choices, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    counts = {letter: letters.count(letter) for letter in LETTERS.values()}
    print(f"{asked}: {counts}")


if __name__ == "__main__":
    main()
