"""A real `transformers.Trainer` run on the CPU, watched by the trace's own tracker.

`run_trainer` returns every storage that the run allocated and freed, the operation that made it, and
marks: ("micro-step", n) and ("after", n) around each Trainer.training_step, ("clip", n) and ("end", n)
around clipping, optimizer step and zero_grad.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autotune.worker.tracker import Tracker

SEQUENCE_LENGTH = 32
NUM_STEPS = 2


class NamingTracker(Tracker):
    """The tracker, noting which operation made each storage."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.made_by: dict[int, str] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first = len(self.recording.tensors)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        for index in range(first, len(self.recording.tensors)):
            self.made_by.setdefault(index, str(func))
        return out


@dataclass
class Run:
    """What the tracker saw of a Trainer."""

    tracker: NamingTracker
    model: nn.Module
    marks: list[tuple[int, str]] = field(default_factory=list)

    def mark(self, label: str) -> None:
        self.marks.append((len(self.tracker.recording.events), label))


def batches(num_samples: int, vocab_size: int) -> list[dict[str, torch.Tensor]]:
    tokens = torch.arange(num_samples * SEQUENCE_LENGTH).reshape(num_samples, -1) % vocab_size
    return [
        {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in tokens
    ]


def run_trainer(
    model: nn.Module,
    folder: Path,
    *,
    micro_batch_size: int,
    accumulation: int,
    optimizer: torch.optim.Optimizer | None = None,
    **arguments: Any,
) -> Run:
    """Two optimizer steps of the real Trainer."""
    from transformers import Trainer, TrainingArguments

    tracker = NamingTracker("cpu")
    run = Run(tracker, model)

    class Watched(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            run.mark("micro-step")
            try:
                return super().training_step(*args, **kwargs)
            finally:
                run.mark("after")

        def _clip_grad_norm(self, model: nn.Module) -> Any:
            run.mark("clip")
            return super()._clip_grad_norm(model)

    for tensor in [*model.parameters(), *model.buffers()]:
        tracker.index_of(tensor)
    trainer = Watched(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=micro_batch_size,
            gradient_accumulation_steps=accumulation,
            max_steps=NUM_STEPS,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            optim="adamw_torch",
            **arguments,
        ),
        train_dataset=batches(
            NUM_STEPS * accumulation * micro_batch_size, model.config.vocab_size
        ),
        optimizers=(optimizer, None),
    )
    gc.collect()
    gc.disable()
    try:
        with tracker:
            trainer.train()
    finally:
        gc.enable()
    return run
