"""The sound of a question, where a model reads nothing else: its length, and what is made of it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from autotune.catalogue import models
from autotune.catalogue.models import ModelSource
from autotune.catalogue.tasks import CTC
from autotune.errors import ConfigError
from autotune.records.question import Question
from autotune.space.media import Media, MediaTensor

RATE = 16_000
"""Numbers a second of recorded sound, where a model's feature extractor says nothing else."""
FRAMES_PER_SECOND = 100
"""Frames of a spectrogram, one every 10 ms, in all feature extractors of transformers 5.23 that make some."""
_CONVOLUTIONS: dict[str, tuple[list[int], list[int]]] = {
    "": ([10, 3, 3, 3, 3, 2, 2], [5, 2, 2, 2, 2, 2, 2]),
    "sew": ([10, 3, 1, 3, 1, 3, 1, 3, 1, 2, 1, 2, 1], [5, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1]),
}
"""Kernels and strides of convolutions that read numbers, by `model_type`; of all others by no name."""
_WINDOW, _HOP = 400, 160
"""Numbers of a frame, and from one to the next, at 16,000 a second (SeamlessM4TFeatureExtractor)."""


def read_sound(question: Question, source: ModelSource, task: str) -> Media:
    """Work out what a model reads of each sample's sound. Raises ConfigError.

    Whisper and AST read as much of each, however long it is. Others read what there is: numbers, or, as
    Wav2Vec2-BERT, pairs of frames. Source: configurations and feature extractors of transformers 5.23.
    """
    config, seconds = source.config, question.audio_seconds
    kind, bands = config["model_type"], "num_mel_bins"
    if kind == "whisper":  # WhisperEncoder: conv1 has a stride of 1, conv2 of 2.
        frames = 2 * _number(config, "max_source_positions", 1500)
        shape: tuple[int, ...] = _number(config, bands, 80), frames
        return _heard("input_features", shape, _own_length(source, seconds, frames))
    if kind == "audio-spectrogram-transformer":
        frames = _number(config, "max_length", 1024)
        shape = frames, _number(config, bands, 128)
        return _heard("input_values", shape, _own_length(source, seconds, frames))
    if seconds is None:
        raise ConfigError(
            f"Nothing says how long the sounds are that {source.short_name} is trained on",
            why="It reads sounds of any length",
            remedy="Give --audio-seconds 5, say: longer ones are cut off, shorter ones end in silence",
        )
    num_values = round(seconds * _number(models.image_processor(source), "sampling_rate", RATE))
    if kind == "wav2vec2-bert":
        frames = 1 + max(num_values - _WINDOW, 0) // _HOP
        shape = math.ceil(frames / 2), _number(config, "feature_projection_input_dim", 160)
        num_of_moments = adapted(config, shape[0])
        heard = _heard("input_features", shape, seconds)
    else:
        num_of_moments = num_moments(config, num_values)
        heard = _heard("input_values", (num_values,), seconds)
    return dataclasses.replace(heard, num_moments=num_of_moments) if task == CTC else heard


def num_moments(config: dict[str, Any], num_values: int) -> int:
    """Return how many positions a model makes of so many numbers, 0 where it makes none.

    Its convolutions are its configuration's, or those of its family's in transformers 5.23.
    """
    kernels, strides = _CONVOLUTIONS.get(config["model_type"], _CONVOLUTIONS[""])
    kernels, strides = config.get("conv_kernel") or kernels, config.get("conv_stride") or strides
    for kernel, stride in zip(kernels, strides, strict=False):
        num_values = max((num_values - kernel) // stride + 1, 0)
    return adapted(config, num_values)


def adapted(config: dict[str, Any], num_positions: int) -> int:
    """Return how many positions are left where a model ends with convolutions that take some together."""
    if config.get("add_adapter") is True:
        for _ in range(
            _number(config, "num_adapter_layers", 1 if "bert" in config["model_type"] else 3)
        ):
            num_positions = max((num_positions - 1) // _number(config, "adapter_stride", 2) + 1, 0)
    return num_positions


def _own_length(source: ModelSource, seconds: float | None, frames: int) -> float:
    """Return how many seconds a model reads of each sample. Raises ConfigError where others are asked for."""
    own = frames / FRAMES_PER_SECOND
    if seconds not in (None, own):
        raise ConfigError(
            f"--audio-seconds does not go with {source.short_name}",
            why=f"It reads {own:g} s of each sample, the last of them silence where it is shorter",
            remedy="Leave --audio-seconds out",
        )
    return own


def _heard(name: str, shape: tuple[int, ...], seconds: float) -> Media:
    tensor = MediaTensor(name=name, shape=(1, *shape), dtype="float32")
    return Media(
        num_images=0,
        width=0,
        height=0,
        num_tokens=0,
        tensors=(tensor,),
        seconds=float(seconds),
    )


def _number(settings: dict[str, Any], name: str, usual: int) -> int:
    """Return a setting that is a whole number; the usual one where it is none, of which a worker tells."""
    value = settings.get(name)
    return value if isinstance(value, int) and value > 0 else usual
