"""Lengths of a dataset's samples, and how much of a batch is padding because of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.space.cut_by_tokens import cut_by_tokens

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

BY_TOKENS = "by-tokens"
BATCHINGS = ("packed", "padded", "grouped", "padding-free", BY_TOKENS)
"""Ways in which samples fill a micro-batch: one stream of tokens cut into blocks; each padded to the longest
of its micro-batch; the same with samples of like length together (Trainer's group_by_length); one behind the
other, whole, told apart by where each begins (DataCollatorWithFlattening); a step's samples, sorted, cut into
padded micro-batches of about as many tokens each, at most those of `micro_batch_size` samples of full
length."""
SAME_STEPS = ("padded", BY_TOKENS)
"""Ways that train on the same samples in each step, their losses divided by the same number of tokens."""

SHORT_SHARE = 16
"""Divisor for the shortest sample: where no lengths are known, it is taken to be this part of the longest.
[judgement]"""

_NUM_SIMULATED = 16_384
"""Number of samples that padding is simulated with: its mean is then good to a fraction of a per cent."""
_MEGA_BATCHES = 50
"""Batches per sorted group (transformers 5.23 trainer_pt_utils.py, get_length_grouped_indices:
mega_batch_mult)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Tokens per sample of a dataset."""

    num_samples: int
    """Samples; of pairs both rows are one each."""
    num_tokens: int
    """Tokens of all samples, whole: what an epoch of packed batches trains on."""
    num_kept_tokens: int
    """Tokens of all samples, each cut off: what an epoch of other batches trains on."""
    percentiles: tuple[int, ...]
    """Lengths at 101 percentiles, cut off, from the shortest sample to the longest."""

    @property
    def longest(self) -> int:
        return self.percentiles[-1]

    def tokens_per_epoch(self, batching: str) -> int:
        """Tokens that an epoch trains on.

        A stream of tokens is cut into blocks whole; samples of their own lose what is too long.
        """
        return self.num_tokens if batching == "packed" else self.num_kept_tokens

    def fill_a_block(self, batching: str, sequence_length: int) -> bool:
        """Whether there is anything to train on: a stream of tokens is cut into whole blocks."""
        return batching != "packed" or self.num_tokens >= sequence_length

    def cut(self, limit: int) -> Lengths:
        """The lengths with samples cut off at fewer tokens.

        Percentiles are exact; the tokens that are kept follow from them, and are as coarse as they are.
        """
        if limit >= self.longest:
            return self
        percentiles = tuple(min(length, limit) for length in self.percentiles)
        share = sum(percentiles) / sum(self.percentiles)
        return dataclasses.replace(
            self, percentiles=percentiles, num_kept_tokens=round(share * self.num_kept_tokens)
        )

    @classmethod
    def of(
        cls, counts: Mapping[int, int], limit: int, *, num_samples: int, longest: int
    ) -> Lengths:
        """Lengths from samples counted by length, cut off at `limit` tokens.

        `num_samples` and `longest`: of the whole dataset, of which the counts may be a part; tokens are
        scaled up.
        """
        import numpy as np

        whole = np.repeat(list(counts), list(counts.values()))
        lengths = whole.clip(max=limit)
        percentiles = np.percentile(lengths, range(100), method="nearest").tolist()
        return cls(
            num_samples=num_samples,
            num_tokens=round(float(whole.mean()) * num_samples),
            num_kept_tokens=round(float(lengths.mean()) * num_samples),
            percentiles=(*percentiles, min(longest, limit)),
        )


def vary(batching: str) -> bool:
    """Whether one micro-batch is longer than another."""
    return batching != "packed"


def draw(percentiles: Sequence[int], limit: int, num_samples: int, *, seed: int = 0) -> list[int]:
    """Draw the tokens of so many samples in no order; the first is as long as the longest.

    `percentiles`: of Lengths. None given: all lengths from a SHORT_SHARE-th of `limit` to it are as likely.
    No sample is shorter than 2 tokens, with which there is one to predict.
    """
    import numpy as np

    among = percentiles or (limit // SHORT_SHARE, limit)
    draws = np.random.default_rng(seed).random(num_samples)
    lengths = np.interp(draws, np.linspace(0, 1, len(among)), among).round().astype(int)
    lengths[0] = among[-1]
    drawn: list[int] = lengths.clip(min(2, limit), limit).tolist()
    return drawn


@dataclass(frozen=True, kw_only=True, slots=True)
class Filling:
    """The micro-batches of an average optimizer step, beside those of samples of full length."""

    useful_share: float = 1.0
    """Share of a micro-batch's tokens that is no padding."""
    full_share: float = 1.0
    """Tokens of a micro-batch, padding included, in those of one of full length."""
    num_micro_batches: float
    """How many there are in a step."""


@functools.cache
def filling(
    lengths: Lengths,
    batching: str,
    *,
    micro_batch_size: int,
    gradient_accumulation_steps: int,
    sequence_length: int,
) -> Filling:
    """The micro-batches of an average step of an epoch.

    Simulated, with the order of transformers' LengthGroupedSampler for `grouped`: mega-batches of 50
    optimizer steps, sorted. Samples are drawn from the percentiles, so the tail is that coarse.
    """
    if not vary(batching):
        return Filling(num_micro_batches=gradient_accumulation_steps)
    import numpy as np

    step = micro_batch_size * gradient_accumulation_steps
    num_steps = max(_NUM_SIMULATED // step, 1)
    draws = np.random.default_rng(0).random(num_steps * step)
    samples = np.interp(100 * draws, np.arange(101), lengths.percentiles)
    num_micro_batches = num_steps * gradient_accumulation_steps
    most_tokens = micro_batch_size * sequence_length
    if batching == "padding-free":
        num_padded = samples.sum()
    elif batching == BY_TOKENS:
        steps = samples.round().astype(int).reshape(-1, step).tolist()
        cuts = [len(n) * each[n[0]] for each in steps for n in cut_by_tokens(each, most_tokens)]
        num_padded, num_micro_batches = sum(cuts), len(cuts)
    else:
        if batching == "grouped":
            samples = _grouped(samples, step, lengths.num_samples)
        num_padded = samples.reshape(-1, micro_batch_size).max(axis=1).sum() * micro_batch_size
    return Filling(
        useful_share=float(samples.sum() / num_padded),
        full_share=float(num_padded / (num_micro_batches * most_tokens)),
        num_micro_batches=num_micro_batches / num_steps,
    )


def _grouped(
    samples: npt.NDArray[np.float64], step: int, num_samples: int
) -> npt.NDArray[np.float64]:
    """Samples sorted within each mega-batch, which is smaller where the dataset is."""
    import numpy as np

    size = step * max(min(num_samples // (4 * step), _MEGA_BATCHES), 1)
    parts = [np.sort(samples[start : start + size]) for start in range(0, len(samples), size)]
    return np.concatenate(parts)
