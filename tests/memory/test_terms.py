"""Sizes that are no product of powers, worked out by hand from the kernels' sources."""

from __future__ import annotations

import pytest

from autotune.memory.traces.terms import CHUNK_ROWS, RULES, flash_splits


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
