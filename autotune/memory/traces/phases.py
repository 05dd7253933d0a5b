"""The phases of a traced micro-step, and where in the model a block of it lies."""

from __future__ import annotations

from enum import StrEnum

Place = tuple[int, int]
"""(stack, layer): which of several stacks of layers, from 0; layer -1 outside of all."""

OUTSIDE: Place = (0, -1)


class Phase(StrEnum):
    """The part of a micro-step that a block of a trace belongs to."""

    WEIGHTS = "weights"
    BUFFERS = "buffers"
    """Tensors that are in no checkpoint, and come behind a quantised base's weights."""
    ADAPTER = "adapter"
    REFERENCE_WEIGHTS = "reference_weights"
    """A frozen copy of the model, to which it is compared in training."""
    PREPARED = "prepared"
    """Copying to float32 whatever is not quantised."""
    SETTLED = "settled"
    """Changes that the first step makes for good."""
    BATCH = "batch"
    """A micro-batch reaches the device."""
    COUNT = "count"
    """Its labels are counted."""
    MISMATCHED = "mismatched"
    """The model's pass over answers to other prompts, which keeps nothing for a backward one."""
    EMBED = "embed"
    FORWARD = "forward"
    HEAD = "head"
    REFERENCE_MISMATCHED = "reference_mismatched"
    """The reference's pass over answers to other prompts."""
    REFERENCE = "reference"
    """The reference's pass, which keeps nothing for a backward one, and the loss of both."""
    HEAD_BACKWARD = "head_backward"
    BACKWARD = "backward"
    EMBED_BACKWARD = "embed_backward"
    END = "end"
    """Tensors that go when the micro-step is over."""


SETUP_PHASES = (
    Phase.WEIGHTS, Phase.BUFFERS, Phase.PREPARED, Phase.ADAPTER, Phase.REFERENCE_WEIGHTS, Phase.SETTLED,
)  # fmt: skip
FETCH_PHASES = (Phase.BATCH, Phase.COUNT)
FORWARD_PHASES = (
    Phase.MISMATCHED, Phase.EMBED, Phase.FORWARD, Phase.HEAD, Phase.REFERENCE_MISMATCHED, Phase.REFERENCE,
)  # fmt: skip
EMBED_PHASES = (Phase.EMBED, Phase.EMBED_BACKWARD)
