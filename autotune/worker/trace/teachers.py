"""A teacher's model for a trace: of its layers as few as stand for all, as of a tower that sees.

It runs in evaluation mode and without gradients, in the dtype that the step computes in, unquantised.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PretrainedConfig

from autotune.records.estimate import TraceSpec
from autotune.space.precisions import PRECISIONS
from autotune.worker.build import alike_layers, layers, towers
from autotune.worker.build import model as models
from autotune.worker.build.model import UnsupportedModel
from autotune.worker.trace import attention
from autotune.worker.trace.stand_ins import without_values


def build(
    config: PretrainedConfig, task: str, spec: TraceSpec, vocabulary: int, *, whole: bool
) -> tuple[nn.Module, dict[str, Any]]:
    """Build the model on `meta`; return it and its layers, as autotune.memory.traces.Stacks reads them.

    `whole`: with every layer. Raises UnsupportedModel.
    """
    dtype = PRECISIONS[spec.precision].compute_dtype
    try:
        with attention.without_library(spec.attention), without_values():
            model = models.build_base(config, task, spec, dtype).eval()
    except UnsupportedModel as error:
        raise UnsupportedModel(f"the teacher: {error}") from error
    if (own := vocabulary_of(config)) != vocabulary:
        raise UnsupportedModel(
            f"the teacher's vocabulary has {own} entries, and the student's {vocabulary}"
        )
    stacks = layers.layer_stacks(model)
    if len(stacks) > 1:
        raise UnsupportedModel("the teacher has layers that read and others that write")
    if not stacks:
        return model, {}
    (stack,) = stacks
    kinds = layers.kinds_of(model, config)
    kept = [*range(len(stack))]
    if not whole and not alike_layers.share_weights(stack):
        kept = towers.fewest(kinds)
        alike_layers.leave_out(stack, kept)
    return model, {"tower": towers.copies_of(kinds, kept)}


def vocabulary_of(config: PretrainedConfig) -> int:
    """Return how many entries the vocabulary of a text has."""
    return int(config.get_text_config().vocab_size)
