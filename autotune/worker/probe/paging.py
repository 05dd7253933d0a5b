"""Refuses managed memory for a paged optimizer that the host could not hold.

On the card it has as much of its state as finds room there; the rest waits in the host's memory, and a
checkpoint reads all of it from there. CUDA hands out managed memory without having it, so that what is too
much is felt only as it is touched: by the whole machine, whose kernel then ends processes.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from autotune.common.units import format_bytes
from autotune.memory.optimizers import TensorSpec
from autotune.space.config import TrainConfig
from autotune.space.optimizers import OPTIMIZERS


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


def require_host_memory(model: Any, config: TrainConfig, left_bytes: int | None) -> None:
    """Raise MemoryError where the host has less memory left than the optimizer will page.

    `left_bytes`: None where the host does not say.
    """
    wanted_bytes = managed_bytes(model, config)
    if left_bytes is not None and wanted_bytes > left_bytes:
        raise MemoryError(
            f"{config.optimizer} pages {format_bytes(wanted_bytes)} of state, and the host has "
            f"{format_bytes(left_bytes)} of memory left for it"
        )
