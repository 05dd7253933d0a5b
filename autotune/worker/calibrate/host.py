"""Time that this machine's host spends on one operation of a training step: Python, dispatch and launch.

Llama's layers of next to no size: the host is busy all the time, and the card waits for it. A layer's time is
the difference of two depths (as in studies/host-time).
"""

from __future__ import annotations

import gc
import time
from typing import Any

import torch

DEPTHS = (4, 20)
ROUNDS = 8
OPERATIONS = {"forward": 34, "backward": 67}
"""Operations of a Llama layer of Transformers 5.23 that launch a kernel, as a trace counts them
(validation/timing/host_time.py)."""


def host_seconds(device: torch.device) -> dict[str, float]:
    """Seconds on one operation of the forward and of the backward pass: the shortest of several rounds."""
    models = {depth: _model(depth, device) for depth in DEPTHS}
    ids = torch.ones((2, 16), dtype=torch.int64, device=device)
    best = {depth: [float("inf")] * 2 for depth in DEPTHS}
    gc.disable()
    try:
        for _ in range(ROUNDS):  # in turn: a busy moment of the machine meets them all
            for depth, model in models.items():
                best[depth] = [
                    min(pair) for pair in zip(best[depth], _passes(model, ids), strict=True)
                ]
    finally:
        gc.enable()
    shallow, deep = DEPTHS
    return {
        phase: (best[deep][number] - best[shallow][number]) / (deep - shallow) / count
        for number, (phase, count) in enumerate(OPERATIONS.items())
    }


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
