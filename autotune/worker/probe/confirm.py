"""The parts of a confirmation beside training: an evaluation pass and a checkpoint, by the Trainer itself."""

from __future__ import annotations

import errno
import math
import shutil
from typing import Any

import torch

from autotune.common.units import format_bytes
from autotune.worker.probe.checks import NotFinite

NUM_EVALUATION_BATCHES = 2
"""Number of batches of the evaluation. [judgement] All have the same length; a second one starts while the
first's memory is cached."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_ROOM_WORDS = (
    # safetensors' SafetensorError quotes strerror of the three.
    "No space left on device",
    "Disk quota exceeded",
    "File too large",
    # torch.save: pytorch caffe2/serialize/inline_container.cc
    "PytorchStreamWriter failed writing",
    "unexpected pos",
)


class FullDisk(Exception):
    """The disk has no room for the checkpoint; its text is one line for the user."""


def evaluate(trainer: Any, rows: torch.utils.data.Dataset[Any]) -> None:
    """Run Trainer.evaluate over the rows.

    Raises NotFinite, or whatever a forward pass raises.
    """
    for module in trainer.model.modules():
        # On a CPU bitsandbytes 0.50 would pack 4-bit weights anew, in a way that cannot be trained.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    loss = trainer.evaluate(rows).get("eval_loss")
    if loss is not None and not math.isfinite(loss):
        raise NotFinite("the loss of the evaluation is not finite")


def save_checkpoint(trainer: Any) -> None:
    """Save a checkpoint as the Trainer does in its course, optimizer included, into its output_dir.

    Raises FullDisk where it does not fit there, before anything is written if that can be foreseen.
    """
    folder = trainer.args.output_dir
    needed_bytes = checkpoint_bytes(trainer.model, trainer.optimizer)
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise FullDisk(_no_room(folder, f"{format_bytes(free_bytes)} are free", needed_bytes))
    try:
        trainer._save_checkpoint(trainer.model, trial=None)
    except Exception as error:
        is_full = isinstance(error, OSError) and error.errno in _NO_ROOM
        if not is_full and not any(words in str(error) for words in _NO_ROOM_WORDS):
            raise
        raise FullDisk(_no_room(folder, "it was full before the end", needed_bytes)) from error


def checkpoint_bytes(model: Any, optimizer: Any) -> int:
    """Bytes of the tensors in a checkpoint: the weights, or an adapter's alone, and the optimizer's state."""
    is_adapter = hasattr(model, "peft_config")
    weights = [p for p in model.parameters() if p.requires_grad or not is_adapter]
    states = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    return sum(tensor.nbytes for tensor in [*weights, *states])


def _no_room(folder: str, what: str, needed_bytes: int) -> str:
    return (
        f"the checkpoint takes {format_bytes(needed_bytes)}, and on the disk of {folder} {what}; "
        "free some space there, or let TMPDIR name a folder with more"
    )
