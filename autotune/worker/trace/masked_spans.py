"""Spans that a model masks at random, in a trace: as many places of each sample as there may be.

Models that hear mask parts of what they have heard while they train (SpecAugment). NumPy draws where on the
host; how many places it is follows from a sample's length, but for a span, and for spans that overlap.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from autotune.worker.build.model import UnsupportedModel
from autotune.worker.trace import sft
from autotune.worker.trace.stand_ins import replaced
from autotune.worker.trace.tracker import Tracker

aten = torch.ops.aten

DRAWN_BY = "_compute_mask_indices"
"""Function in the modules of Transformers' models that hear."""


def most_masked(
    shape: tuple[int, int],
    mask_prob: float,
    mask_length: int,
    attention_mask: Any = None,
    min_masks: int = 0,
) -> Any:
    """Return which places of each row are masked, where spans do not overlap and are the most there can be.

    Its arguments are those of the function that it stands in for (transformers 5.23
    models/wav2vec2/modeling_wav2vec2.py). Raises UnsupportedModel for rows shorter than a span.
    """
    num_rows, length = shape
    if mask_length > length:
        raise UnsupportedModel(
            f"it masks spans of {mask_length} positions, and a sample becomes {length}: it needs longer ones"
        )
    num_spans = max(math.ceil(mask_prob * length / mask_length), min_masks)
    num_spans = min(num_spans, length // mask_length)
    masked = np.zeros((num_rows, length), dtype=bool)
    masked[:, : num_spans * mask_length] = True
    return masked


def drawing(model: nn.Module) -> list[tuple[Any, str, Any]]:
    """Return what stands in where a model draws spans, as `replaced` takes it; empty where it draws none."""
    modules = {sys.modules[type(part).__module__] for part in model.modules()}
    return [(code, DRAWN_BY, most_masked) for code in modules if hasattr(code, DRAWN_BY)]


@contextlib.contextmanager
def on_meta(model: nn.Module, tracker: Tracker) -> Iterator[None]:
    """Let models mask what they have heard, without knowing where."""
    drawn = drawing(model)
    if not drawn:
        yield
        return
    make = torch.tensor

    def tensor_of(data: Any, *args: Any, **kwargs: Any) -> Any:
        made = make(data, *args, **kwargs)
        if not made.is_meta or not isinstance(data, np.ndarray):
            return made
        sft.say_num_true(made, int(data.sum()))
        # Before torch 2.15 PyTorch copies it to the device without a word to any mode.
        return made if tracker.knows(made) else aten.lift_fresh.default(made)

    masks = sft.Masks(tracker)
    tracker.decompositions |= {
        aten.index.Tensor: masks.index,
        aten.index_put_.default: masks.index_put_,
        aten.index_put.default: masks.index_put,
    }
    with replaced([*drawn, (torch, "tensor", tensor_of)]):
        yield
