"""Sizes as `coefficient x micro_batch^i x rank^j`, and the few that are no such product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from autotune.memory.reductions import shared_bytes

Term = tuple[int, int, int]
"""A size as (coefficient, power of the micro-batch, power of the rank)."""

Array = npt.NDArray[np.int64]
"""Whole numbers: of 64 bits, or Python's own (dtype object) where they or their sums have more."""

_SUMMABLE = 2**44
"""Largest number of which half a million can be added up in 64 bits; no card has as many bytes."""


def holding(values: Array, largest: int) -> Array:
    """Return the values in a type that can hold the largest, too."""
    return values.astype(object) if largest >= 2**63 else values


def summable(values: Sequence[int] | Array) -> Array:
    """Return the values in a type that holds any sum of them."""
    largest = max(values, default=0) if isinstance(values, Sequence) else values.max(initial=0)
    return np.asarray(values, dtype=object if largest > _SUMMABLE else np.int64)


_Number = TypeVar("_Number", int, float)


def evaluate(term: Sequence[int], micro_batch: _Number, rank: int) -> _Number:
    coefficient, batch_power, rank_power = term
    value: _Number = coefficient * micro_batch**batch_power * rank**rank_power
    return value


def _of_embedding(size_bytes: Callable[..., int]) -> Callable[[Sequence[int]], int]:
    """Return the rule of an embedding's backward, which takes nothing up to 3,072 indices (Embedding.cu)."""
    return lambda numbers: 0 if numbers[0] <= 3072 else size_bytes(*numbers)


def _near(numbers: Sequence[int]) -> int:
    """Bytes of a tensor one longer or shorter than a size that is a term: (size, bytes each, +1 or -1)."""
    size, item_bytes, beyond = numbers
    return (size + beyond) * item_bytes


def _reduction(numbers: Sequence[int]) -> int:
    """Bytes that blocks of threads share: (0 partial results or 1 semaphores, arguments of shared_bytes)."""
    part, *asked = numbers
    return shared_bytes(*asked)[part]


def flash_splits(numbers: Sequence[int]) -> int:
    """Bytes that flash attention's forward pass adds up where it splits the keys.

    From (samples, heads, queries, keys, size of a head, multiprocessors, floats per query).

    It splits where a block of 64 queries for each head fills less than 80 % of the card, into the fewest
    parts whose last wave is at most 15 % emptier than the best. Source: torch 2.13
    transformers/cuda/flash_attn/flash_api.cpp, set_params_splitkv and num_splits_heuristic.
    """
    samples, heads, length, key_length, size, num_sms, num_floats = numbers
    room = 2 * num_sms
    blocks = samples * heads * -(-length // 64)
    if blocks >= 0.8 * room:
        return 0
    key_blocks = -(-key_length // (256 if size <= 64 else 128 if size <= 128 else 64))
    parts = [
        n
        for n in range(1, min(128, room, key_blocks) + 1)
        if n == 1 or -(-key_blocks // n) != -(-key_blocks // (n - 1))
    ]
    filled = {n: n * blocks / room / -(-n * blocks // room) for n in parts}
    fewest = next(n for n in parts if filled[n] >= 0.85 * max(filled.values()))
    return 4 * num_floats * fewest * samples * heads * length if fewest > 1 else 0


def efficient_splits(numbers: Sequence[int]) -> int:
    """Bytes of memory-efficient attention's backward where dK and dV do not stay in registers.

    From (samples, heads, keys, keys of a tile, elements of a key and a value in fp32, bytes of the rest).

    Each head's keys are split into no more parts than there are tiles, and than make 200 of all heads.
    Source: torch 2.13 transformers/cuda/attention_backward.cu and mem_eff_attention/kernel_backward.h.
    """
    samples, heads, num_keys, tile, size, rest_bytes = numbers
    parts = max(1, min(-(-num_keys // tile), 200 // (samples * heads)))
    return samples * heads * parts * tile * size * 4 + rest_bytes


RULES = {
    "efficient splits": efficient_splits,
    # Partial sums, EmbeddingBackwardKernel.cu: `numel / 10 + min(numel, num_weights)` rows.
    "embedding": _of_embedding(lambda count, rows, each: each * (count // 10 + min(count, rows))),
    # A number for each row that got a gradient.
    "embedding rows": _of_embedding(lambda count, rows: 8 * min(count, rows)),
    "embedding sort": _of_embedding(lambda _, size_bytes: size_bytes),
    "flash splits": flash_splits,
    "near": _near,
    "reduction": _reduction,
}
"""Bytes by name of the rule, from the terms beside it."""

NUM_SMS_AT = {"flash splits": 5, "reduction": 5}
"""Place of the card's number of multiprocessors among a rule's numbers, where it is one of them."""


def _liger_rows(num_tokens: int, num_parts: int) -> int:
    """Tokens of a chunk of Liger's fused loss: as many as make its logits as large as its input.

    liger-kernel 0.8.5 ops/fused_linear_cross_entropy.py: chunk_size.
    """
    return min(1 << (-(-num_tokens // num_parts) - 1).bit_length(), num_tokens)


CHUNK_ROWS: dict[str, Callable[[int, int], int]] = {"liger": _liger_rows, "trl": min}
"""Tokens of a chunk, by the name of the rule: (tokens of the micro-batch, constant)."""


class Terms:
    """Many terms, evaluated together."""

    def __init__(self, terms: Sequence[Term]) -> None:
        table = np.asarray(terms, dtype=np.int64).reshape(-1, 3)
        self._coefficients, self._batch_powers, self._rank_powers = table.T
        self._largest: dict[tuple[int, int], int] = {}
        for batch_power in np.unique(self._batch_powers).tolist():
            of_batch = table[self._batch_powers == batch_power]
            for rank_power in np.unique(of_batch[:, 2]).tolist():
                coefficients = of_batch[of_batch[:, 2] == rank_power, 0]
                self._largest[batch_power, rank_power] = int(coefficients.max(initial=0))

    def at(self, micro_batch: float, rank: int) -> Array:
        largest = max(
            (evaluate((c, i, j), micro_batch, rank) for (i, j), c in self._largest.items()),
            default=0,
        )
        powers = [holding(each, int(largest)) for each in (self._batch_powers, self._rank_powers)]
        values: Array = self._coefficients * micro_batch ** powers[0] * rank ** powers[1]
        return values


class Sums:
    """Many sums of terms, evaluated together."""

    def __init__(self, sums: Sequence[Sequence[Term]]) -> None:
        self._terms = Terms([term for terms in sums for term in terms])
        self._owners = np.repeat(np.arange(len(sums)), [len(terms) for terms in sums])
        self._length = len(sums)

    def at(self, micro_batch: float, rank: int) -> npt.NDArray[np.float64]:
        values = self._terms.at(micro_batch, rank).astype(np.float64)
        sums = np.bincount(self._owners, weights=values, minlength=self._length)
        return np.asarray(sums, dtype=np.float64)
