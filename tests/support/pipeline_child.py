"""Processes that run a schedule of torch.distributed.pipelining over gloo on the CPU, and report their peaks.

    python pipeline_child.py CASES.json REPORT.json

CASES maps names to {"config", "counts", "micro_batches", "micro_batch", "length", "dtype",
"checkpointing"}: a Llama's layers, in modules of so many each.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from gloo_processes import run_cases
from pipeline_layers import Layers
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss

from autotune.memory.replayer import replay
from autotune.worker.trace.tracker import Tracker

NUM_STEPS = 2
"""The first makes the optimizer's state, the second is like all that follow."""


class Watch(Tracker):
    """A tracker of storages alone."""

    def _cost(self, *_: object) -> None:
        """Leave kernels out, of which nothing is reported."""


def run_case(case: dict[str, Any], rank: int) -> dict[str, Any]:
    """Run a few optimizer steps; report the peaks of this process's storages."""
    torch.manual_seed(0)
    config = LlamaConfig(**{k: v for k, v in case["config"].items() if k != "model_type"})
    config.use_cache = False
    model: Any = LlamaForCausalLM._from_config(config, dtype=getattr(torch, case["dtype"]))
    counts = case["counts"]
    layers = Layers(model, sum(counts[:rank]), counts[rank]).train()
    if case["checkpointing"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    del model
    gc.collect()
    gc.disable()  # A storage dies with its last reference, not when the collector comes by.
    num_micro_batches = case["micro_batches"]
    schedule = Schedule1F1B(
        PipelineStage(layers, rank, len(counts), torch.device("cpu")),
        num_micro_batches,
        loss_fn=lambda logits, labels: ForCausalLMLoss(logits, labels, config.vocab_size),
        scale_grads=False,
    )
    optimizer = torch.optim.AdamW(layers.parameters(), fused=True)
    watch = Watch("cpu")
    shape = (num_micro_batches * case["micro_batch"], case["length"])
    losses: list[torch.Tensor] = []
    with watch:
        for held in (*layers.parameters(), *layers.buffers()):
            watch.index_of(held)
        tokens = torch.zeros(shape, dtype=torch.int64) if rank in (0, len(counts) - 1) else None
        for _ in range(NUM_STEPS):
            if rank == 0:
                schedule.step(tokens, return_outputs=False)
            elif rank == len(counts) - 1:
                losses.clear()
                schedule.step(target=tokens, losses=losses, return_outputs=False)
            else:
                schedule.step(return_outputs=False)
            optimizer.step()
            optimizer.zero_grad()
    gc.enable()
    sizes = [tensor.size_bytes for tensor in watch.recording.tensors]
    return {"allocated": replay(sizes, watch.recording.events).peak_allocated_bytes}


if __name__ == "__main__":
    run_cases(run_case, lambda case: len(case["counts"]))
