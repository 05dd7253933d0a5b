"""Time that this machine's host spends on one operation of a training step: Python, dispatch and launch.

Llama's layers of next to no size: the host is busy all the time, and the card waits for it. A layer's time is
the difference of two depths (as in studies/host-time). As of a probe's steps, the median counts: on a busy
machine the shortest of several is no step's. Where other processes have the processor, the rounds are
repeated, as others may be done soon.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autotune.records.calibration import MOST_WAITED, HostTimes

DEPTHS = (4, 20)
ROUNDS = 11
MOST_TIMES = 5
"""Times that the rounds are repeated at most, of half a second each."""
OPERATIONS = {"forward": 34, "backward": 67}
"""Operations of a Llama layer of Transformers 5.23 that launch a kernel, as a trace counts them
(validation/timing/host_causes.py)."""


def host_times(device: torch.device) -> HostTimes:
    """Time operations of both passes: the median of several rounds, when others were least in the way."""
    models = {depth: _model(depth, device) for depth in DEPTHS}
    ids = torch.ones((2, 16), dtype=torch.int64, device=device)
    found: list[HostTimes] = []
    gc.disable()
    try:
        while not found or (found[-1].waited > MOST_WAITED and len(found) < MOST_TIMES):
            found.append(_times_of_rounds(models, ids))
    finally:
        gc.enable()
    return min(found, key=lambda times: times.waited)


def _times_of_rounds(models: dict[int, Any], ids: torch.Tensor) -> HostTimes:
    seen: dict[int, list[_Passes]] = {depth: [] for depth in models}
    for _ in range(1 + ROUNDS):  # in turn: a busy moment of the machine meets them all
        for depth, model in models.items():
            seen[depth].append(_passes(model, ids))
    shallow, deep = (seen[depth][1:] for depth in DEPTHS)
    layers = DEPTHS[1] - DEPTHS[0]
    return HostTimes(
        seconds={
            phase: (_median(deep, phase) - _median(shallow, phase)) / layers / count
            for phase, count in OPERATIONS.items()
        },
        waited=statistics.median(each.waited for each in deep),
    )


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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Passes:
    """Seconds until the host has launched each pass, and the share without a processor."""

    seconds: dict[str, float]
    waited: float


def _median(rounds: Sequence[_Passes], phase: str) -> float:
    return statistics.median(each.seconds[phase] for each in rounds)


def _passes(model: Any, ids: torch.Tensor) -> _Passes:
    losses = list[Any]()

    def forward() -> None:
        out = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
        losses.append(out["loss"])

    def backward() -> None:
        losses.pop().backward()

    seconds, processor_seconds = dict[str, float](), 0.0
    launches: dict[str, Callable[[], None]] = {"forward": forward, "backward": backward}
    for phase, launch in launches.items():
        _wait(ids)
        start, on_processor = time.perf_counter(), time.process_time()
        launch()
        seconds[phase] = time.perf_counter() - start
        # Of all threads: the backward pass has one of its own.
        processor_seconds += time.process_time() - on_processor
    waited = 1 - processor_seconds / sum(seconds.values())
    return _Passes(seconds=seconds, waited=max(0.0, waited))


def _wait(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
