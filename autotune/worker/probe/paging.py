"""Refuses an optimizer whose state the host could not hold: in managed memory, or offloaded by DeepSpeed.

On the card a paged one has as much of its state as finds room there; the rest waits in the host's memory,
and a checkpoint reads all of it from there. CUDA hands out managed memory without having it, so that what
is too much is felt only as it is touched: by the whole machine, whose kernel then ends processes.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from autotune.common.units import format_bytes
from autotune.memory.optimizers import TensorSpec
from autotune.space.config import TrainConfig
from autotune.space.optimizers import OPTIMIZERS
from autotune.space.parallelisms import PARALLELISMS


def managed_bytes(model: Any, config: TrainConfig) -> int:
    """Bytes of the optimizer's state that will be in managed memory once the first step has made it."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    specs = [
        TensorSpec(
            shape=tuple(parameter.shape),
            dtype=str(parameter.dtype).removeprefix("torch."),
            embedding=id(parameter) in embeddings,
        )
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    return OPTIMIZERS[config.optimizer].managed_bytes(specs)


def offloaded_bytes(model: Any, config: TrainConfig) -> int:
    """Bytes that DeepSpeed will keep on the host for all GPUs, beside the weights that are there already.

    They are weights, gradients and two moments in float32 (Shares.host_bytes).
    """
    row = PARALLELISMS[config.parallelism]
    if not (row.is_deepspeed and row.offload):
        return 0
    return 16 * sum(each.numel() for each in model.parameters() if each.requires_grad)


def require_host_memory(model: Any, config: TrainConfig, left_bytes: int | None) -> None:
    """Raise MemoryError where the host has less memory left than the optimizer will page, or have there.

    `left_bytes`: None where the host does not say.
    """
    for words, wanted_bytes in (
        (f"{config.optimizer} pages", managed_bytes(model, config)),
        (f"{config.parallelism} keeps on the host", offloaded_bytes(model, config)),
    ):
        if left_bytes is not None and wanted_bytes > left_bytes:
            raise MemoryError(
                f"{words} {format_bytes(wanted_bytes)} of state, and the host has "
                f"{format_bytes(left_bytes)} of memory left for it"
            )
