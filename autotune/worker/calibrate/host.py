"""Time that this machine's host spends on one operation of a training step: Python, dispatch and launch.

Llama's layers of next to no size: the host is busy all the time, and the card waits for it. A layer's time is
the difference of two depths (as in studies/host-time). As of a probe's steps, the median counts: on a busy
machine the shortest of several is no step's.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

DEPTHS = (4, 20)
ROUNDS = 11
OPERATIONS = {"forward": 34, "backward": 67}
"""Operations of a Llama layer of Transformers 5.23 that launch a kernel, as a trace counts them
(validation/timing/host_causes.py)."""


def host_seconds(device: torch.device) -> dict[str, float]:
    """Seconds on one operation of the forward and of the backward pass: the median of several rounds."""
    models = {depth: _model(depth, device) for depth in DEPTHS}
    ids = torch.ones((2, 16), dtype=torch.int64, device=device)
    seen: dict[int, list[tuple[float, float]]] = {depth: [] for depth in DEPTHS}
    gc.disable()
    try:
        for _ in range(1 + ROUNDS):  # in turn: a busy moment of the machine meets them all
            for depth, model in models.items():
                seen[depth].append(_passes(model, ids))
    finally:
        gc.enable()
    shallow, deep = (_medians(seen[depth][1:]) for depth in DEPTHS)
    layers = DEPTHS[1] - DEPTHS[0]
    return {
        phase: (of_deep - of_shallow) / layers / count
        for (phase, count), of_shallow, of_deep in zip(
            OPERATIONS.items(), shallow, deep, strict=True
        )
    }


def _medians(rounds: Sequence[tuple[float, float]]) -> list[float]:
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def config_of(depth: int) -> Any:
    """LlamaConfig of a model whose kernels take next to nothing, so that the host's time is seen."""
    from transformers import LlamaConfig

    return LlamaConfig(
        num_hidden_layers=depth,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=128,
        max_position_embeddings=64,
        use_cache=False,
    )


def _model(depth: int, device: torch.device) -> Any:
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM(config_of(depth))
    return model.to(device).train()


def _passes(model: Any, ids: torch.Tensor) -> tuple[float, float]:
    """Seconds until the host has launched the forward and the backward pass."""
    _wait(ids)
    start = time.perf_counter()
    loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)["loss"]
    middle = time.perf_counter()
    _wait(ids)
    again = time.perf_counter()
    loss.backward()
    return middle - start, time.perf_counter() - again


def _wait(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
