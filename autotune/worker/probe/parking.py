"""Refuses pinned memory for activation offloading that the host could not hold.

Pinned memory is had at once and is never swapped out, so that what is too much is felt by the whole
machine, whose kernel then ends processes. The first forward pass parks as much as all others do: it alone
is looked at, and no timed step asks.

Not looked after: compiled code, into which the question would be compiled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import transformers.modeling_utils

from autotune.common.units import format_bytes
from autotune.space.checkpoint_plans import plan_offloads
from autotune.space.config import TrainConfig
from autotune.worker.build.checkpoint_plan import HostMemory
from autotune.worker.trace.stand_ins import replaced


def within_host_memory(
    config: TrainConfig, left_bytes: Callable[[], int | None]
) -> AbstractContextManager[None]:
    """Let parking raise MemoryError where the host has less memory left, for the length of a `with` block.

    `left_bytes`: returns None where the host does not say.
    """
    guard = _Guard(left_bytes)
    if plan_offloads(config.checkpoint_plan):
        return replaced([(HostMemory, "piece", guard.asking(HostMemory.piece))])
    if not config.activation_offloading or config.is_compiled:
        return contextlib.nullcontext()
    return replaced([(transformers.modeling_utils, "save_on_cpu", guard.save_on_cpu)])


class _Guard:
    def __init__(self, left_bytes: Callable[[], int | None]) -> None:
        self._left_bytes = left_bytes
        self._is_first_pass = True

    def save_on_cpu(self, *args: Any, **kwargs: Any) -> Any:
        """Torch's own save_on_cpu, whose every tensor is asked about before it is parked."""
        hooks = torch.autograd.graph.save_on_cpu(*args, **kwargs)
        pack, unpack = hooks.pack_hook, hooks.unpack_hook

        def ask_and_pack(tensor: torch.Tensor) -> Any:
            if self._is_first_pass:
                self._require(tensor.nbytes)
            return pack(tensor)

        def unpack_and_ask_no_more(packed: Any) -> Any:
            self._is_first_pass = False
            return unpack(packed)

        hooks.pack_hook, hooks.unpack_hook = ask_and_pack, unpack_and_ask_no_more
        return hooks

    def asking(self, piece: Callable[[HostMemory, torch.Tensor], Any]) -> Callable[..., Any]:
        """HostMemory.piece, asked about before what it pins."""

        def ask_and_take(host: HostMemory, tensor: torch.Tensor) -> Any:
            if not host.unused.get(_pinned_bytes(tensor.nbytes)):
                self._require(tensor.nbytes)
            return piece(host, tensor)

        return ask_and_take

    def _require(self, size_bytes: int) -> None:
        pinned_bytes = _pinned_bytes(size_bytes)
        left_bytes = self._left_bytes()
        if left_bytes is not None and pinned_bytes > left_bytes:
            raise MemoryError(
                f"activation offloading pins {format_bytes(pinned_bytes)} more, and the host has "
                f"{format_bytes(left_bytes)} of memory left for it"
            )


def _pinned_bytes(size_bytes: int) -> int:
    # torch 2.13 ATen/core/CachingHostAllocator.h, allocate.
    return 1 << max(size_bytes - 1, 0).bit_length()
