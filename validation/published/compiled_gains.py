"""Published speeds of runs with torch.compile and without, and the gains that are predicted of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from unittest import mock

import torch
from transformers import masking_utils

from autotune.catalogue.gpus import find_gpu
from autotune.catalogue.models import resolve
from autotune.memory.traces import Trace
from autotune.predict.estimator import Estimator
from autotune.records.estimate import TraceSpec
from autotune.space.config import TrainConfig
from autotune.speed.host import USUAL
from autotune.worker.build.model import load_config
from autotune.worker.trace.cuda import Device
from autotune.worker.trace.step import trace_step
from validation.published.own_loop import without_trainer


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """Speed with torch.compile over that without, published and predicted."""

    run: str
    source: str
    published: float
    predicted: float
    in_the_trainer: float
    """Predicted for Transformers' Trainer of today, where compiling makes a mask of packed rows."""


_FULL = TrainConfig(
    method="full", micro_batch_size=2, gradient_accumulation_steps=1, sequence_length=4096,
    precision="bf16-true", optimizer="adamw_torch_fused", attention="sdpa",
)  # fmt: skip
RUNS: tuple[tuple[str, str, str, str, TrainConfig, float], ...] = (
    (
        "Llama 3.2 3B, A100 80 GB, 2 x 4096, packed",
        "torchtune's README (bd2a0fc): 7,075 and 8,998 tokens/s",
        "meta-llama/Llama-3.2-3B", "A100-SXM4-80GB", _FULL, 8998 / 7075,
    ),
    (
        "Llama 3.1 8B, 8 H100, FSDP2, 2 x 8192, selective checkpointing; predicted: one H100 without it",
        "torchtitan's benchmarks (31a17bf): 5,762 and 6,667 tokens/s",
        "meta-llama/Llama-3.1-8B", "H100-SXM5-80GB", replace(_FULL, sequence_length=8192), 6667 / 5762,
    ),
    (
        "Llama 2 of 1B (TinyLlama's shape is assumed), RTX 4070 Ti SUPER, 4 x 2048, checkpointing",
        "torchao's quantized_training: 6,200 and 9,000 tokens/s",
        "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "RTX 4070 Ti SUPER",
        replace(_FULL, micro_batch_size=4, sequence_length=2048, activation_checkpointing=1,
                optimizer="adamw_bnb_8bit"),
        9000 / 6200,
    ),
)  # fmt: skip
"""What ran, its source, model, card, configuration, and the published gain."""


def gains() -> Iterator[Gain]:
    """The published pairs; those programs have no mask of packed rows, whether compiled or not."""
    for run, source, model, card, config, published in RUNS:
        # A Mock would keep the tensors that it is called with.
        with mock.patch.object(masking_utils, "find_packed_sequence_indices", _no_mask):
            predicted = _gain(model, card, config)
        yield Gain(
            run=run,
            source=source,
            published=published,
            predicted=predicted,
            in_the_trainer=_gain(model, card, config),
        )


def _no_mask(_: torch.Tensor) -> None:
    """Say that no row holds several samples."""


def _gain(model: str, card: str, config: TrainConfig) -> float:
    gpu = find_gpu(card)
    assert gpu.compute_capability is not None
    assert gpu.cublas_workspace_bytes is not None
    assert gpu.capacity_bytes is not None
    device = Device(
        compute_capability=gpu.compute_capability, cublas_workspace_bytes=gpu.cublas_workspace_bytes
    )
    both = {mode: replace(config, torch_compile=mode) for mode in ("none", "default")}
    traces = {
        (spec := TraceSpec.of(each)): Trace(
            trace_step(
                load_config(resolve(model).config), "causal-lm", spec,
                sequence_length=config.sequence_length, device=device,
            )
        )
        for each in both.values()
    }  # fmt: skip
    estimator = Estimator(
        traces, gpu, memory_budget_bytes=gpu.capacity_bytes, host=without_trainer(USUAL)
    )
    seconds = {mode: estimator.seconds(each) for mode, each in both.items()}
    eager, compiled = seconds["none"], seconds["default"]
    assert eager is not None
    assert compiled is not None
    return eager.total_seconds / compiled.total_seconds
