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
    ADAPTER_CAST = "adapter_cast"
    """Copying to float32 an adapter that reached the device in 16 bits."""
    ADAPTER_CAST_BACK = "adapter_cast_back"
    """Copying it to bfloat16, as TRL's trainers do beside a quantised base."""
    REFERENCE_WEIGHTS = "reference_weights"
    """A frozen copy of the model, to which it is compared in training."""
    PREPARED = "prepared"
    """Copying to float32 whatever is not quantised."""
    SETTLED = "settled"
    """Changes that the first step makes for good."""
    PREFILL = "prefill"
    """The model reads prompts, and writes the first token of each completion."""
    DECODE = "decode"
    """It writes the second."""
    GROWN = "grown"
    """The key-value cache grows to its length before the last token, at once."""
    LAST = "last"
    """The model writes the last token."""
    BATCH = "batch"
    """A micro-batch reaches the device."""
    COUNT = "count"
    """Its labels are counted."""
    MISMATCHED = "mismatched"
    """The model's pass over answers to other prompts, which keeps nothing for a backward one."""
    POLICY = "policy"
    """The model's pass over what it has generated, which keeps nothing for a backward one."""
    GENERATED_REFERENCE = "generated_reference"
    """The reference's pass over what the model has generated."""
    CACHED = "cached"
    """A pass over a mini-batch, of which its vectors alone are kept; behind the last one the loss of all."""
    EMBED = "embed"
    FORWARD = "forward"
    HEAD = "head"
    REFERENCE_MISMATCHED = "reference_mismatched"
    """The reference's pass over answers to other prompts."""
    REFERENCE = "reference"
    """The reference's pass, which keeps nothing for a backward one, and the loss of both."""
    HEAD_BACKWARD = "head_backward"
    AGAIN = "again"
    """A mini-batch's pass once more, before its backward pass."""
    BACKWARD = "backward"
    EMBED_BACKWARD = "embed_backward"
    END = "end"
    """Tensors that go when the micro-step is over."""


SETUP_PHASES = (
    Phase.WEIGHTS, Phase.BUFFERS, Phase.PREPARED, Phase.ADAPTER, Phase.ADAPTER_CAST, Phase.ADAPTER_CAST_BACK,
    Phase.REFERENCE_WEIGHTS, Phase.SETTLED,
)  # fmt: skip
GENERATION_PHASES = (Phase.PREFILL, Phase.DECODE, Phase.GROWN, Phase.LAST)
"""Phases of which a trace's sizes are of all completions that are generated at a time."""
REFERENCE_PHASES = (Phase.GENERATED_REFERENCE, Phase.REFERENCE_MISMATCHED, Phase.REFERENCE)
"""Passes of what a model is compared with: a frozen copy, or itself with its adapter switched off."""
SCORING_PHASES = (Phase.POLICY, Phase.GENERATED_REFERENCE)
"""Phases that a micro-batch of completions goes through once, however often it is trained on."""
FETCH_PHASES = (Phase.BATCH, Phase.COUNT)
FORWARD_PHASES = (
    Phase.MISMATCHED, Phase.POLICY, Phase.GENERATED_REFERENCE, Phase.CACHED, Phase.EMBED, Phase.FORWARD,
    Phase.HEAD,
    Phase.REFERENCE_MISMATCHED, Phase.REFERENCE,
)  # fmt: skip
EMBED_PHASES = (Phase.EMBED, Phase.EMBED_BACKWARD)
