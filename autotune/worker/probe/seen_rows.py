"""Rows of a probe on pictures: tokens at random, of which the first stand for what the model sees.

They are tensors already, as the model's own processor makes them: TRL reads no picture.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

from autotune.space.media import Media
from autotune.worker.build.model import CHARACTERS
from autotune.worker.build.pictures import GRIDS, places_of
from autotune.worker.build.sound_input import FEATURES

_PADDING = {"labels": -100}
"""Values of places without a token, where they are not 0."""


class SeenRows(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows of text with pictures beside each; every second one has all of its tokens."""

    def __init__(self, rows: Any, config: PretrainedConfig, pictures: Media) -> None:
        self._rows = rows
        self._of_text = pictures.of_text
        self._token = _token_of(config)
        self._places = places_of(config, pictures)
        # No picture is blank: Idefics takes such for padding.
        self._seen = {each.name: np.ones(each.shape, dtype=each.dtype) for each in pictures.tensors}
        if pictures.grids:
            self._seen[GRIDS] = np.array(pictures.grids)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._rows[index]
        ids, mask, labels = (row[name].copy() for name in ("input_ids", "attention_mask", "labels"))
        ids[ids == self._token] = 0
        ids[self._places] = self._token
        if index % 2 == 0:
            mask[:], labels = 1, ids
        stands = (ids == self._token).astype(ids.dtype)
        return {
            "input_ids": ids,
            "attention_mask": mask,
            **dict.fromkeys(self._of_text, stands),
            **self._seen,
            "labels": labels,
        }


class PictureRows(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows of a picture or a sound alone, each with its class, or with a text of so many tokens."""

    def __init__(
        self,
        config: PretrainedConfig,
        pictures: Media,
        num_rows: int,
        kept: int,
        num_tokens: int = 0,
        lengths: Sequence[int] = (),
    ) -> None:
        random = np.random.default_rng(0)
        self._num_rows = num_rows
        self._seen = {
            each.name: random.random((kept, *each.shape[1:])).astype(each.dtype)
            for each in pictures.tensors
        }
        self._classes = random.integers(config.num_labels or 1, size=kept)
        self._text = _text_of(config, num_tokens) if num_tokens else []
        self._lengths = lengths or [num_tokens]

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= self._num_rows:
            raise IndexError(index)
        number = index % len(self._classes)
        seen = {name: values[number] for name, values in self._seen.items()}
        if self._text:
            length = self._lengths[index % len(self._lengths)]
            return {**seen, "labels": self._text[:length]}
        return {**seen, "labels": int(self._classes[number])}


def _text_of(config: PretrainedConfig, num_tokens: int) -> list[int]:
    """Return a text none of whose tokens is the padding, or as the one before.

    CTC finds room for as many of such as there are moments.
    """
    vocabulary = config.vocab_size or CHARACTERS
    tokens = (token for token in range(vocabulary) if token != config.pad_token_id)
    return list(itertools.islice(itertools.cycle(tokens), num_tokens))


class SpokenRows(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows of sound at random, each with the tokens of a text."""

    def __init__(self, rows: Any, shape: tuple[int, int], kept: int) -> None:
        random = np.random.default_rng(0)
        self._rows = rows
        self._heard = random.random((kept, *shape), dtype=np.float32)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        labels = self._rows[index]["labels"]
        return {FEATURES: self._heard[index % len(self._heard)], "labels": labels}


def _token_of(config: Any) -> int:
    token: int = config.image_token_id
    return token


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Make a batch: texts as long as the longest of them, pictures one behind the other."""
    length = max(len(row["input_ids"]) for row in rows)

    def column(name: str) -> np.ndarray[Any, Any]:
        values = [row[name] for row in rows]
        if name == GRIDS or name.startswith("pixel_"):
            return np.concatenate(values)
        padding = _PADDING.get(name, 0)
        return np.array([np.pad(v, (0, length - len(v)), constant_values=padding) for v in values])

    return {name: torch.tensor(column(name)) for name in rows[0]}
