"""How much sound a model reads in a sample: as many frames in each, whatever was said in it."""

from __future__ import annotations

from typing import Any

_STRIDES = 2
"""Frames of which one position is made (transformers 5.23 WhisperEncoder: conv1 has a stride of 1, conv2 of
2). It refuses any other number of them."""


def shape_of(config: Any) -> tuple[int, int]:
    """Return the bands and frames of a sample."""
    return config.num_mel_bins, config.max_source_positions * _STRIDES
