"""Sizes that are no product of powers, worked out by hand from the kernels' sources."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from autotune.memory.traces import on_card_with
from autotune.memory.traces.terms import CHUNK_ROWS, RULES, flash_splits, summable


@pytest.mark.parametrize(
    ("num_sms", "samples", "heads", "length", "key_length", "size", "parts"),
    [
        # The example in num_splits_heuristic: 48 blocks on 108 places, where 2 parts fill 0.89 of the card
        # and 3 only 0.67. Six blocks of 256 keys.
        (54, 1, 48, 64, 6 * 256, 64, 2),
        # 8 blocks on 216 places: 16 parts of one block of keys each fill most, and fewer too little.
        (108, 1, 8, 64, 16 * 256, 64, 16),
        # Heads of up to 128 have blocks of 128 keys, larger ones of 64: there are as many parts to choose.
        (108, 2, 4, 64, 16 * 128, 65, 16),
        (108, 2, 4, 64, 16 * 128, 128, 16),
        (108, 1, 8, 64, 16 * 64, 129, 16),
        # One query more is another block for each head: 8 parts fill as much as 16.
        (108, 1, 8, 65, 16 * 256, 64, 8),
        # 7 of 10 places are free enough, 8 of 10 are not.
        (5, 1, 7, 64, 4 * 256, 64, 4),
        (5, 1, 8, 64, 4 * 256, 64, 0),
        # One block of keys cannot be split.
        (108, 1, 1, 64, 256, 64, 0),
        # At most 128 parts, of which the 100th is the last that has fewer blocks of keys than the one before.
        (132, 1, 1, 64, 200 * 256, 64, 100),
    ],
)
def test_flash_attention_splits_the_keys_to_fill_the_card(
    num_sms: int, samples: int, heads: int, length: int, key_length: int, size: int, parts: int
) -> None:
    asked = samples, heads, length, key_length, size, num_sms, size + 1
    assert flash_splits(asked) == 4 * (size + 1) * parts * samples * heads * length


@pytest.mark.parametrize(
    ("samples", "heads", "num_keys", "parts"),
    [
        # As many parts as tiles of 64 keys, of which the last may be cut.
        (1, 1, 64, 1),
        (1, 1, 65, 2),
        (2, 4, 640, 10),
        # 200 blocks of all heads: 25 for each of 8.
        (2, 4, 26 * 64, 25),
        (1, 200, 640, 1),
        (1, 101, 640, 1),
        (1, 100, 640, 2),
        (3, 100, 640, 1),
    ],
)
def test_memory_efficient_attentions_backward_splits_each_heads_keys(
    samples: int, heads: int, num_keys: int, parts: int
) -> None:
    """Each part has a tile of keys and of values in float32, 2 x 96 of each here; the rest comes on top."""
    asked = samples, heads, num_keys, 64, 192, 1000
    expected = samples * heads * parts * 64 * 192 * 4 + 1000
    assert RULES["efficient splits"](asked) == expected


def test_sums_of_sizes_beyond_64_bits_are_whole_numbers_of_pythons() -> None:
    """Half a million of 2^44 bytes are 2^63; one byte more could be too much."""
    for most, dtype in ((2**44, np.int64), (2**44 + 1, object)):
        for values in ([0, most], np.array([most, 0])):
            assert summable(values).dtype == dtype
            assert summable(values).tolist() == [int(each) for each in values]
    assert summable([]).tolist() == []
    assert summable(np.array([], dtype=np.int64)).dtype == np.int64


def test_only_what_depends_on_the_card_is_made_another_cards() -> None:
    flash = {"rule": ["flash splits", *([n, 0, 0] for n in (1, 8, 64, 4096, 64, 108, 65))]}
    reduction = {"rule": ["reduction", *([n, 0, 0] for n in (0, 2**20, 1, 0, 4, 108, 2048))]}
    near = {"rule": ["near", *([n, 1, 0] for n in (100, 8, 1))]}
    tensors: list[dict[str, Any]] = [flash, reduction, near, {"size": [1, 0, 0]}]
    before = copy.deepcopy(tensors)
    on_card_with(132, tensors)
    assert tensors[2:] == before[2:]
    for after, old, place in ((flash, before[0], 6), (reduction, before[1], 6)):
        changed = [n for n, each in enumerate(after["rule"]) if each != old["rule"][n]]
        assert changed == [place]
        assert after["rule"][place] == [132, 0, 0]


@pytest.mark.parametrize(
    ("num_tokens", "num_parts", "rows"),
    [(1024, 4, 256), (1025, 4, 512), (1000, 4, 256), (5, 1, 5), (7, 7, 1)],
)
def test_ligers_chunk_is_the_next_power_of_2(num_tokens: int, num_parts: int, rows: int) -> None:
    assert CHUNK_ROWS["liger"](num_tokens, num_parts) == rows


def test_trls_chunk_is_as_long_as_it_says() -> None:
    assert CHUNK_ROWS["trl"](1000, 256) == 256
    assert CHUNK_ROWS["trl"](100, 256) == 100


@pytest.mark.parametrize(
    ("rule", "few", "many", "size_bytes"),
    [
        ("embedding", (3072, 100, 8), (3073, 100, 8), 8 * (307 + 100)),
        ("embedding rows", (3072, 9000), (3073, 9000), 8 * 3073),
        ("embedding sort", (3072, 777), (3073, 777), 777),
    ],
)
def test_an_embedding_of_few_indices_needs_nothing_more(
    rule: str, few: tuple[int, ...], many: tuple[int, ...], size_bytes: int
) -> None:
    assert RULES[rule](few) == 0
    assert RULES[rule](many) == size_bytes


def test_a_tensor_may_be_one_longer_or_shorter_than_a_size() -> None:
    assert RULES["near"]((100, 8, 1)) == 808
    assert RULES["near"]((100, 8, -1)) == 792


def test_a_reduction_has_partial_results_and_semaphores() -> None:
    # A sum of 2^20 values: 512 threads beside each other, 2,048 values for each. 128 blocks leave 16 values
    # to a thread, the fewest; the card has room for 4 x 108 blocks.
    asked = 2**20, 1, 0, 4, 108, 2048
    assert RULES["reduction"]((0, *asked)) == 4 * 128
    assert RULES["reduction"]((1, *asked)) == 4
