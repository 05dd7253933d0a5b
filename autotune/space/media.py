"""Pictures or sound of a workload's samples, and the tensors that a model's own processor makes of them.

A sound that has a class, or a text by CTC, is all that a model reads of a sample, and of one size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_PICTURES = 64
"""Most pictures of a sample."""
MAX_PIXELS = 10_000
"""Most pixels along a side: a processor shrinks what is larger than its model takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaTensor:
    """One of a batch's tensors, as it is for one sample: several samples lie one behind the other."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Media:
    """The pictures of each sample, or its sound, beside its text or in its place."""

    num_images: int
    width: int
    height: int
    num_tokens: int
    """Tokens of a sample that stand for its pictures, those that mark where one begins among them."""
    tensors: tuple[MediaTensor, ...]
    of_text: tuple[str, ...] = ()
    """Names of further tensors of the text, shaped as its token ids."""
    sizes: tuple[tuple[int, int], ...] = ()
    """Width and height of each, where they are not all as large as `width` and `height` say."""
    grids: tuple[tuple[int, int, int], ...] = ()
    """Patches of each picture in time, height and width, for models that look at pictures one by one."""
    seconds: float = 0.0
    """Length of each sample's sound; 0 where there is none. Of sound there are no pictures."""

    num_moments: int = 0
    """Moments of each sample's sound of which a model of CTC says a token, or none; 0 of other models."""

    def in_dtype(self, dtype: object) -> Media:
        """The same in another dtype, one of torch's."""
        name = str(dtype).removeprefix("torch.")
        tensors = tuple(dataclasses.replace(each, dtype=name) for each in self.tensors)
        return dataclasses.replace(self, tensors=tensors)

    @property
    def is_in_text(self) -> bool:
        """Whether pictures stand within a text: else they are all that a model reads."""
        return self.num_tokens > 0

    @property
    def size(self) -> str:
        """The size of a picture as it is typed, `640x480`, the largest where they differ; of sound `5s`."""
        if self.seconds:
            return f"{self.seconds:g}s"
        return f"{self.width}x{self.height}"


_OF_SOUND = ("seconds", "num_moments")


def without_sound(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record's values without those of a sound that it has not, as before there were any."""
    return {name: value for name, value in values.items() if value or name not in _OF_SOUND}


@dataclass(frozen=True, kw_only=True, slots=True)
class PicturesOfDataset:
    """How many pictures a dataset's samples have, and how many tokens stand for them."""

    num_samples: int
    num_looked_at: int
    """Number of samples whose pictures were looked at, by their headers."""
    fewest: int
    most: int
    """Pictures of a sample."""
    num_sizes: int
    """Number of different sizes."""
    mean_tokens: int
    most_tokens: int
    """Tokens of a sample that stand for its pictures."""
