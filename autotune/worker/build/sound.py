"""How much sound a model reads in a sample: as many frames in each, whatever was said in it."""

from __future__ import annotations

from typing import Any

from autotune.worker.build.model import UnsupportedModel

_STRIDES = 2
"""Frames of which one position is made (transformers 5.23 WhisperEncoder: conv1 has a stride of 1, conv2 of
2). It refuses any other number of them."""
_AT_RANDOM = ("apply_spec_augment",)
"""Settings that leave out parts of the sound by chance."""


def shape_of(config: Any) -> tuple[int, int]:
    """Return the bands and frames of a sample.

    Raises UnsupportedModel for a model that leaves some to chance.
    """
    chance = [name for name in _AT_RANDOM if getattr(config, name, False)]
    if chance:
        raise UnsupportedModel(
            f"it leaves out parts of a sample at random ({', '.join(chance)}), and a prediction is of all"
        )
    return config.num_mel_bins, config.max_source_positions * _STRIDES
