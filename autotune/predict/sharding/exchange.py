"""Bytes that the GPUs of a shared run send to each other and to the host."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.speed.links import Message, sent_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """Bytes that one GPU sends, and that pass between it and the host."""

    num_gpus: int
    messages_per_micro_step: tuple[Message, ...]
    """Collectives of a micro-step."""
    messages_per_step: tuple[Message, ...]
    """Collectives beside those, once an optimizer step."""
    hides_gradients: bool = False
    """Whether messages of a step are gradients, sent in buckets while the backward pass goes on (DDP)."""
    host_copy_bytes_per_micro_step: int = 0
    host_copy_bytes_per_step: int = 0
    host_bytes: int = 0
    """Host memory that the GPU's part of the run takes."""
    host_update_elements: int = 0
    """Number of weights that the host's CPU updates, for all GPUs together: they share one host."""
    gathered_bytes: int = 0
    """Most bytes that are gathered at one time."""
    buffers_bytes: int = 0
    """Bytes of the buffers that are kept for communication."""
    layers: tuple[int, ...] = ()
    """Number of layers that each GPU has; empty where all of them have all."""

    def sent_bytes(self, accumulation: int) -> float:
        """Bytes sent over the interconnect in an optimizer step, in rings."""
        each = sent_bytes(self.messages_per_micro_step, self.num_gpus)
        return accumulation * each + sent_bytes(self.messages_per_step, self.num_gpus)
