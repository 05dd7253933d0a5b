"""Compiled configurations that are predicted, and why the others are not."""

from __future__ import annotations

from autotune.space.config import TrainConfig
from autotune.space.precisions import PRECISIONS

PREDICTED_MODES = ("default",)
"""Modes whose kernels are known before they run: the others try several and keep the fastest, or replay CUDA
graphs, which keep memory of their own."""


def why_not_predicted(config: TrainConfig) -> str:
    """The reason why a compiled configuration is not predicted, in a clause; empty where it is."""
    for is_so, reason in (
        (config.torch_compile_backend != "inductor", "only Inductor's kernels are modelled"),
        (config.torch_compile not in PREDICTED_MODES, "this mode chooses kernels by timing them"),
        (config.quantization != "none", "bitsandbytes' layers break the graph"),
        (PRECISIONS[config.precision].fp8, "torchao's fp8 layers are not traced compiled"),
        (config.batching != "packed", "batches of other lengths are compiled anew"),
        (config.liger, "Liger's kernels are not traced compiled"),
        (config.has_plan, "a plan of checkpointing is not traced compiled"),
        (config.chunked_loss, "a loss in parts is not traced compiled"),
        (config.trainer != "transformers", "TRL's trainer is not traced compiled"),
        (config.attention not in ("sdpa", "eager"), "this attention is not traced compiled"),
        (config.activation_offloading, "offloading is not traced compiled"),
        (config.neftune_noise_alpha > 0, "NEFTune is not traced compiled"),
        (config.parallelism != "none", "steps of several GPUs are not traced compiled"),
        (config.method not in ("full", "lora"), "this method is not traced compiled"),
    ):
        if is_so:
            return reason
    return ""
