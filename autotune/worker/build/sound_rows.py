"""Recorded sound with the tokens of what is said in it, or with its class: rows, and batches of them.

What follows the imports is put into train.py as it stands (autotune.export.train_py). A .wav at the rate
that the model reads needs Python and NumPy alone; other files are read by Transformers' load_audio, with
torchcodec, or soundfile and soxr.
"""

from __future__ import annotations

import io
import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autotune.export.encode import IGNORED
from autotune.export.rows_of_tasks import transcribed
from autotune.export.samples.read import Samples
from autotune.export.samples.values import UnusableData, shown
from autotune.worker.build.sound_input import FEATURES

LEAST_SECONDS = 0.05  # two windows of a spectrogram: some extractors refuse shorter sounds


@dataclass(frozen=True)
class Spoken:
    """A sample's number, from 1, where its sound is, and the tokens of its text."""

    number: int
    sound: Any
    labels: Any  # or the number of its class


class Sounds(torch.utils.data.Dataset[dict[str, Any]]):
    """Sounds, each read when it is asked for, with the tokens of its text."""

    def __init__(self, spoken: Sequence[Spoken], folder: str, extractor: Any) -> None:
        self.spoken, self.folder, self.extractor = spoken, folder, extractor

    def __len__(self) -> int:
        return len(self.spoken)

    def __getitem__(self, index: int) -> dict[str, Any]:
        each, rate = self.spoken[index], self.extractor.sampling_rate
        try:
            heard = read_sound(each.sound, self.folder, f"sample {each.number}", rate)
        except UnusableData as error:
            sys.exit(f"{error}")
        made = self.extractor(heard, sampling_rate=rate, return_tensors="np")
        return {FEATURES: made[FEATURES][0], "labels": each.labels}


class LabelledSounds(torch.utils.data.Dataset[dict[str, Any]]):
    """Sounds, each read when it is asked for and made as long as all are, with its class or its tokens.

    `heard`: the seconds of each, and the name and the shape of what the extractor makes of them.
    """

    def __init__(
        self, spoken: Sequence[Spoken], folder: str, extractor: Any, heard: Mapping[str, Any]
    ) -> None:
        self.spoken, self.folder, self.extractor, self.heard = spoken, folder, extractor, heard

    def __len__(self) -> int:
        return len(self.spoken)

    def __getitem__(self, index: int) -> dict[str, Any]:
        import numpy as np

        each, rate = self.spoken[index], self.extractor.sampling_rate
        try:
            values = read_sound(each.sound, self.folder, f"sample {each.number}", rate)
        except UnusableData as error:
            sys.exit(f"{error}")
        values = values[: round(self.heard["seconds"] * rate)]
        values = np.pad(values, (0, max(round(LEAST_SECONDS * rate) - len(values), 0)))
        name, shape = self.heard["name"], self.heard["shape"]
        made = self.extractor(values, sampling_rate=rate, return_tensors="np")[name][0][: shape[0]]
        silence = [(0, shape[0] - len(made)), *[(0, 0)] * (made.ndim - 1)]
        return {name: np.pad(made, silence), "labels": each.labels}


def collate_labelled(rows: Sequence[Mapping[str, Any]], dtype: torch.dtype) -> dict[str, Any]:
    """A batch: sounds in the dtype of the weights that read them, and their classes or texts."""
    batch = {
        name: torch.stack([torch.as_tensor(row[name]) for row in rows]).to(dtype)
        for name in rows[0]
        if name != "labels"
    }
    labels = [row["labels"] for row in rows]
    return {
        **batch,
        "labels": torch.tensor(labels if isinstance(labels[0], int) else filled_up(labels)),
    }


def filled_up(labels: Sequence[Any]) -> list[list[int]]:
    """The tokens of texts, as many as the longest has."""
    longest = max(map(len, labels))
    return [[*each, *[IGNORED] * (longest - len(each))] for each in labels]


def classed(
    data: Samples, extractor: Any, classes: Sequence[Any], heard: Mapping[str, Any]
) -> LabelledSounds:
    """The samples, each with the number of its class."""
    spoken = [
        Spoken(number, sample.text, classes.index(sample.answer))
        for number, sample in enumerate(data.samples, start=1)
    ]
    return LabelledSounds(spoken, data.folder, extractor, heard)


def written(data: Samples, processor: Any, length: int, heard: Mapping[str, Any]) -> LabelledSounds:
    """The samples whose text CTC finds room for in the moments of a sound, and that are no longer than all.

    What is longer would be cut off, and the text would say more than is heard.
    """
    kept = within(data, processor.tokenizer, length, heard["seconds"], heard["moments"])
    return LabelledSounds(kept, data.folder, processor.feature_extractor, heard)


def sounds_of(data: Samples, processor: Any, length: int) -> Sounds:
    """The samples whose text has so many tokens at most, and whose sound is no longer than what is read.

    What is longer would be cut off, and the text would say more than is heard.
    """
    extractor = processor.feature_extractor
    seconds = extractor.n_samples / extractor.sampling_rate
    return Sounds(within(data, processor.tokenizer, length, seconds), data.folder, extractor)


def within(
    data: Samples, tokenizer: Any, length: int, seconds: float, moments: int = sys.maxsize
) -> list[Spoken]:
    """The samples of so many tokens and seconds at most.

    CTC needs a moment for each token, and one between two that are alike.
    """

    def needed(labels: list[int]) -> int:
        return len(labels) + sum(one == next_ for one, next_ in itertools.pairwise(labels))

    rows = zip(data.samples, transcribed(data, tokenizer, ()), strict=True)
    kept = [
        Spoken(number, sample.text, row["labels"])
        for number, (sample, row) in enumerate(rows, start=1)
        if len(row["labels"]) <= length
        and needed(row["labels"]) <= moments
        and seconds_of(sample.text, data.folder, f"sample {number}") <= seconds
    ]
    limits = f"{length} tokens of text and {seconds:g} s of sound"
    if not kept:
        raise UnusableData(f"no sample is within {limits}", "Cut them into shorter ones")
    if len(kept) < len(data.samples):
        print(
            f"Left out: {len(data.samples) - len(kept)} of the samples, which are not within {limits}."
        )
    return kept


def collate_sounds(rows: Sequence[Mapping[str, Any]], dtype: torch.dtype) -> dict[str, Any]:
    """A batch: sounds in the dtype of the weights that read them, texts as long as the longest of them."""
    labels = filled_up([row["labels"] for row in rows])
    heard = torch.stack([torch.as_tensor(row[FEATURES]) for row in rows])
    return {FEATURES: heard.to(dtype), "labels": torch.tensor(labels)}


def read_sound(found: Any, folder: str, place: str, rate: int) -> Any:
    """The sound of a file, of its bytes or of its path, as numbers from -1 to 1: one channel at this rate."""
    import numpy as np

    source = source_of(found, folder, place)
    file = wave_of(source, place)
    if file is None:
        return loaded(source, place, rate)
    with file:
        if (file.getsampwidth(), file.getframerate()) != (2, rate):
            return loaded(source, place, rate)
        values = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")
        return values.reshape(-1, file.getnchannels()).mean(axis=1, dtype=np.float32) / 2**15


def seconds_of(found: Any, folder: str, place: str) -> float:
    """How long a .wav is, by its header; 0 for what is none."""
    file = wave_of(source_of(found, folder, place), place)
    if file is None:
        return 0.0
    with file:
        return float(file.getnframes() / max(file.getframerate(), 1))


def source_of(found: Any, folder: str, place: str) -> Any:
    """The path of a sound, or its bytes, as `datasets` keeps them."""
    if isinstance(found, Mapping):
        data, path = found.get("bytes"), found.get("path")
        found = data if isinstance(data, bytes) else path
    if isinstance(found, str):
        found = os.path.join(folder, found)
    if not isinstance(found, str | bytes):
        raise UnusableData(f"{place} has no sound: {shown(found)}", "Name its file")
    return found


def wave_of(source: Any, place: str) -> Any:
    """A .wav, its header read; None for a file of another kind."""
    import wave

    try:
        return wave.open(io.BytesIO(source) if isinstance(source, bytes) else source)
    except OSError as error:
        raise unreadable(source, place, error.strerror or str(error)) from error
    except (EOFError, wave.Error):
        return None


def loaded(source: Any, place: str, rate: int) -> Any:
    """A sound that is no .wav of 16 bits at the rate that the model reads, as Transformers reads it."""
    import base64

    from transformers.audio_utils import load_audio

    text = base64.b64encode(source).decode() if isinstance(source, bytes) else source
    try:
        return load_audio(text, sampling_rate=rate)
    except ImportError as error:
        raise UnusableData(
            f"the sound of {place} is no .wav of 16 bits at {rate:,} Hz, and nothing is installed that reads "
            "others",
            "pip install soundfile soxr",
        ) from error
    except Exception as error:
        raise unreadable(source, place, f"{type(error).__name__}: {error}") from error


def unreadable(source: Any, place: str, why: str) -> UnusableData:
    name = shown(source) if isinstance(source, str) else "its bytes"
    return UnusableData(
        f"the sound of {place} cannot be read ({name}): {shown(why)}", "Leave such samples out"
    )
