"""Trains a confirmation on batches of varied lengths, beside those of full length.

PyTorch's allocator keeps blocks of the sizes that were asked for, and cuts them; where each batch asks for
other sizes, what is free is in pieces that none fits into, and it reserves more than at any one length.
Full-length batches that come first hide that, for their blocks hold whatever is shorter. So these steps
begin as a run does: cached blocks are given back, the Trainer makes its optimizer anew, and puts the
samples in the order that its arguments say (all mixed, or of like length together).
"""

from __future__ import annotations

import gc
import itertools
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from autotune.space.config import TrainConfig
from autotune.worker.probe.training import is_out_of_memory, train

NUM_RUNS = 2
"""Number of trainings with varied lengths. [judgement] What is held depends on the order in which lengths
come by more than on how many there are (studies/no-card): two orders tell more than one for twice as long,
and a third may need more still."""


class RanOut(Exception):
    """Memory ran out with varied lengths."""

    def __init__(self, num_steps: int, cause: Exception) -> None:
        super().__init__(str(cause))
        self.num_steps = num_steps
        """Number of steps that were begun."""
        self.cause = cause


def release(trainer: Any) -> None:
    """Let go of what training has left on the device beside the model."""
    trainer.optimizer = trainer.lr_scheduler = None
    handler = trainer.callback_handler
    handler.optimizer = handler.lr_scheduler = handler.train_dataloader = None
    trainer.accelerator.free_memory()
    gc.collect()


def runs(num_steps: int) -> list[int]:
    """The number of steps of each of the NUM_RUNS trainings that make up so many."""
    shares = [num_steps * number // NUM_RUNS for number in range(NUM_RUNS + 1)]
    return [end - start for start, end in itertools.pairwise(shares) if end > start]


def train_varied(
    trainer: Any, rows: Any, config: TrainConfig, num_steps: int, *, num_before: int
) -> None:
    """Train further, for so many steps over these rows.

    Raises RanOut, or as `train` does.

    `num_before`: steps with varied lengths of an earlier one.
    """
    begun = _Begun()
    trainer.callback_handler.callbacks.clear()
    trainer.add_callback(begun)
    trainer.micro_step = lambda run: run()
    trainer.train_dataset = rows
    trainer.args.max_steps = num_steps
    has_own = config.batching == "padding-free" or "input_ids" not in rows[0]
    if config.trainer == "transformers" and not has_own:
        trainer.data_collator = padded
    try:
        train(trainer)
    except Exception as error:
        if is_out_of_memory(error):
            raise RanOut(num_before + max(begun.num_steps, 1), error) from error
        raise


class _Begun(TrainerCallback):
    """A callback that counts steps."""

    num_steps = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.num_steps += 1


_PADDING = {"input_ids": 0, "attention_mask": 0, "labels": -100}


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The tensors that Transformers' collators make of rows: as long as the longest of them."""
    length = max(len(row["input_ids"]) for row in rows)
    batch: dict[str, torch.Tensor] = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        if isinstance(values[0], np.ndarray):
            values = [
                np.pad(v, (0, length - len(v)), constant_values=_PADDING[name]) for v in values
            ]
        batch[name] = torch.tensor(np.array(values), dtype=torch.long)
    return batch
