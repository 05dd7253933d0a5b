"""A real `transformers.Trainer` run on the CPU, watched by the trace's own tracker.

`run_trainer` records the storages that two optimizer steps allocate and free, cut into windows:
one per Trainer.training_step and one per clipping, optimizer step and zero_grad.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from autotune.catalogue.tasks import TASKS
from autotune.worker.trace.tracker import TrackedTensor, Tracker

NUM_STEPS = 2

Events = list[tuple[str, int, int]]
"""Events as ("alloc" or "free", number of the tensor by first appearance, bytes)."""


def canonical(events: Iterable[int], sizes: Sequence[int]) -> Events:
    """Number the events' tensors by first appearance."""
    number_of: dict[int, int] = {}
    return [
        (
            "alloc" if event >= 0 else "free",
            number_of.setdefault(max(event, ~event), len(number_of)),
            sizes[max(event, ~event)],
        )
        for event in events
    ]


class NamingTracker(Tracker):
    """The tracker, which also notes the operation that made each storage."""

    def __init__(
        self,
        device_type: str,
        decompositions: dict[Any, Any] | None = None,
        wrappers: tuple[type[torch.Tensor], ...] = (),
    ) -> None:
        super().__init__(device_type, decompositions=decompositions, wrappers=wrappers)
        self.made_by: dict[int, str] = {}

    def _record(self, func: Any, *rest: Any) -> None:
        first = len(self.recording.tensors)
        super()._record(func, *rest)
        for index in range(first, len(self.recording.tensors)):
            self.made_by.setdefault(index, func._schema.name)

    def _cost(self, *_: object) -> None:
        """Leave kernels out, which no test asks of the Trainer's step: they take a third of the time."""


@dataclass
class Run:
    """The recording of the tracker. A window is (first event, last event)."""

    model: Any
    tensors: list[TrackedTensor]
    events: list[int]
    made_by: dict[int, str]
    micro_steps: list[tuple[int, int]] = field(default_factory=list)
    prepared: list[int] = field(default_factory=list)
    """Per micro-step the event with which its inputs are ready."""
    optimizer_steps: list[tuple[int, int]] = field(default_factory=list)
    gradients: list[list[int]] = field(default_factory=list)
    """Storages of the gradients in the model's order, per optimizer step."""

    def window(self, window: tuple[int, int]) -> list[int]:
        return self.events[slice(*window)]


PICTURE = (3, 32, 32)
"""Shape of a picture."""
NUM_PADDED = 3
"""Number of places of every second sample of a padded batch that hold no token."""


def ragged(num_samples: int, sequence_length: int, num_missing: int) -> list[dict[str, list[int]]]:
    """Cut samples to the model's tokens alone, as a tokenizer gives them: every second one is shorter."""
    rows = torch.arange(num_samples * sequence_length).reshape(num_samples, -1) % 500
    lengths = [sequence_length - num_missing * (number % 2) for number in range(num_samples)]
    return [
        {"input_ids": row[:length].tolist(), "attention_mask": [1] * length}
        for row, length in zip(rows, lengths, strict=True)
    ]


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(512)}
    plain = Tokenizer(models.WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token="w1", pad_token="w2", mask_token="w3"
    )


def samples(num_samples: int, sequence_length: int, task: str) -> list[dict[str, torch.Tensor]]:
    """Make samples; packed rows of a causal language model have no mask, as in the exported train.py."""
    tokens = torch.arange(num_samples * sequence_length).reshape(num_samples, -1) % 500
    if task == "causal-lm":
        return [{"input_ids": row, "labels": row} for row in tokens]
    made = TASKS[task]
    if made.reads == "pixels":
        return [{"pixel_values": torch.rand(PICTURE), "labels": row[0] % 2} for row in tokens]
    num_labels = 2 if made.heads else 500

    def labels(row: torch.Tensor) -> torch.Tensor:
        return (row if made.labels_of == "tokens" else row[0]) % num_labels

    return [
        {
            "input_ids": row,
            "attention_mask": torch.ones_like(row),
            **dict.fromkeys(made.labels, labels(row)),
        }
        for row in tokens
    ]


def spoken(
    num_samples: int, sequence_length: int, shape: tuple[int, int], num_missing: int
) -> list[dict[str, Any]]:
    """Make sounds, each with the tokens of a text: every second one is shorter."""
    texts = ragged(num_samples, sequence_length, num_missing)
    return [{"input_features": torch.rand(shape), "labels": row["input_ids"]} for row in texts]


def run_trainer(
    model: Any,
    folder: Path,
    task: str,
    *,
    sequence_length: int,
    micro_batch_size: int,
    accumulation: int,
    decompositions: dict[Any, Any] | None = None,
    wrappers: tuple[type[torch.Tensor], ...] = (),
    trainer_class: Any = Trainer,
    arguments_class: Any = TrainingArguments,
    make_dataset: Callable[[list[Any]], Any] = list,
    rows: Sequence[Any] | None = None,
    more: Mapping[str, Any] = {},
    callbacks: Sequence[TrainerCallback] = (),
    **arguments: Any,
) -> Run:
    """Run two optimizer steps of the real Trainer with AdamW, its kernels foreach as on CUDA.

    `decompositions`: operations that are computed by others, as in a trace. `rows`: the
    samples; None: tensors of full length. `more`: what else the Trainer wants beside its arguments.
    """
    tracker = NamingTracker("cpu", decompositions, wrappers)
    recording = tracker.recording
    run = Run(model, recording.tensors, recording.events, tracker.made_by)
    clipping_began = 0

    class Watched(trainer_class):  # type: ignore[misc]
        def num_events(self) -> int:
            return len(recording.events)

        def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
            inputs = super()._prepare_inputs(*args, **kwargs)
            run.prepared.append(len(recording.events))
            return inputs

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            first = len(recording.events)
            loss = super().training_step(*args, **kwargs)
            run.micro_steps.append((first, len(recording.events)))
            return loss

        def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
            optimizer = super().create_optimizer(*args, **kwargs)
            for group in optimizer.param_groups:
                group["foreach"] = True
            return optimizer

        def _clip_grad_norm(self, model: nn.Module) -> Any:
            nonlocal clipping_began
            clipping_began = len(recording.events)
            run.gradients.append(
                [tracker.index_of(p.grad) for p in model.parameters() if p.grad is not None]
            )
            return super()._clip_grad_norm(model)

    class Ended(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            run.optimizer_steps.append((clipping_began, len(recording.events)))

    trainer = Watched(
        model=model,
        args=arguments_class(
            output_dir=str(folder),
            per_device_train_batch_size=micro_batch_size,
            gradient_accumulation_steps=accumulation,
            max_steps=NUM_STEPS,
            optim="adamw_torch",
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **arguments,
        ),
        train_dataset=make_dataset(
            rows or samples(NUM_STEPS * accumulation * micro_batch_size, sequence_length, task)
        ),
        callbacks=[Ended(), *callbacks],
        **more,
    )
    # A storage must die with its last reference, not when the collector comes by.
    gc.collect()
    gc.disable()
    try:
        with tracker:
            beside = (getattr(trainer, name, None) for name in ("ref_model", "teacher_model"))
            for each in filter(None, (model, *beside)):
                for tensor in [*each.parameters(), *each.buffers()]:
                    tracker.index_of(tensor)
            for module in model.modules():
                # bitsandbytes keeps the scales of 8-bit weights beside them.
                for place in (getattr(module, "weight", None), getattr(module, "state", None)):
                    if getattr(place, "SCB", None) is not None:
                        tracker.index_of(place.SCB)
            trainer.train()
    finally:
        gc.enable()
    return run
