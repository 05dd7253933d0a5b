"""Padding worked out by hand where it can be, and against what the batchings promise."""

from __future__ import annotations

import dataclasses
import json

import pytest

from autotune.space.config import TrainConfig, Workload
from autotune.space.cut_by_tokens import cut_by_tokens
from autotune.space.lengths import BATCHINGS, Lengths, draw, filling

HALF_AND_HALF = Lengths.of({100: 500, 300: 500}, 1000, num_samples=1000, longest=300)
"""Every other sample is three times as long."""


def test_cut_off_they_are_as_if_read_so() -> None:
    read = {2 * n: 10 for n in range(1, 101)}
    whole = Lengths.of(read, 1000, num_samples=1000, longest=200)
    cut = whole.cut(150)
    assert cut.percentiles == Lengths.of(read, 150, num_samples=1000, longest=200).percentiles
    again = Lengths.of(read, 150, num_samples=1000, longest=200)
    assert cut.num_kept_tokens == pytest.approx(again.num_kept_tokens, rel=0.01)
    assert cut.num_tokens == again.num_tokens
    assert whole.cut(200) is whole


def share(lengths: Lengths, batching: str, micro_batch_size: int, accumulation: int = 8) -> float:
    return filling(
        lengths,
        batching,
        micro_batch_size=micro_batch_size,
        gradient_accumulation_steps=accumulation,
        sequence_length=lengths.longest,
    ).useful_share


def test_samples_are_counted_and_cut_off() -> None:
    lengths = Lengths.of({10: 90, 50: 9, 400: 1}, 100, num_samples=100, longest=400)
    assert lengths.num_tokens == 90 * 10 + 9 * 50 + 400
    assert lengths.num_kept_tokens == 90 * 10 + 9 * 50 + 100
    # Only a stream of blocks has use for what is cut off.
    assert lengths.tokens_per_epoch("packed") == lengths.num_tokens
    assert lengths.tokens_per_epoch("padded") == lengths.num_kept_tokens
    assert lengths.tokens_per_epoch("padding-free") == lengths.num_kept_tokens
    # And only such a stream may be too short for one of them.
    for length, is_filled in ((1749, True), (1750, True), (1751, False)):
        assert lengths.fill_a_block("packed", length) == is_filled
        assert lengths.fill_a_block("padded", length)
    assert (lengths.percentiles[0], lengths.percentiles[50], lengths.longest) == (10, 10, 100)
    assert len(lengths.percentiles) == 101


def test_a_part_of_the_dataset_is_scaled_up_and_its_longest_is_the_whole_s() -> None:
    lengths = Lengths.of({10: 50, 20: 50}, 100, num_samples=1000, longest=77)
    assert (lengths.num_samples, lengths.num_tokens, lengths.longest) == (1000, 15_000, 77)


@pytest.mark.parametrize("batching", BATCHINGS)
def test_equal_samples_need_no_padding(batching: str) -> None:
    equal = Lengths.of({64: 500}, 1000, num_samples=500, longest=64)
    assert share(equal, batching, 16) == 1.0


def test_packed_batches_have_no_padding_and_single_samples_neither() -> None:
    assert share(HALF_AND_HALF, "packed", 8) == 1.0
    assert share(HALF_AND_HALF, "padding-free", 8) == 1.0
    assert share(HALF_AND_HALF, "padded", 1) == 1.0


@pytest.mark.parametrize("micro_batch_size", [2, 4, 8])
def test_padding_to_the_longest_of_random_samples(micro_batch_size: int) -> None:
    # All short with probability 1 / 2^m; the mean sample has 200 tokens.
    all_short = 0.5**micro_batch_size
    padded = 100 * all_short + 300 * (1 - all_short)
    assert share(HALF_AND_HALF, "padded", micro_batch_size) == pytest.approx(200 / padded, rel=0.02)


def test_grouping_pads_next_to_nothing_where_the_dataset_is_large() -> None:
    uniform = Lengths.of(dict.fromkeys(range(1, 1001), 10), 1000, num_samples=10_000, longest=1000)
    # Random pairs of uniform lengths: the mean is 1/2, the longer one of two 2/3.
    assert share(uniform, "padded", 2) == pytest.approx(3 / 4, rel=0.02)
    assert share(uniform, "grouped", 2) > 0.99
    # With samples for one mega-batch of one step only, sorted all the same.
    few = dataclasses.replace(uniform, num_samples=16)
    assert 0.75 < share(few, "grouped", 2) < share(uniform, "grouped", 2)


def test_by_tokens_few_batches_are_filled_with_samples_of_like_length() -> None:
    assert cut_by_tokens([100, 300, 100, 300, 100, 100], 600) == [[1, 3], [0, 2, 4, 5]]
    # The longest alone may have more than that; nothing is left out.
    assert cut_by_tokens([900, 1, 0, 400], 600) == [[0], [3], [1, 2]]
    assert cut_by_tokens([], 600) == []
    assert cut_by_tokens([0, 0, 1], 2) == [[2, 0], [1]]
    # Long samples two by two, and short ones beside the last where it has room: 8 x 100 + 8 x 300 of 16.
    assert share(HALF_AND_HALF, "by-tokens", 2) > 0.95
    assert share(HALF_AND_HALF, "by-tokens", 1) > 0.95 > share(HALF_AND_HALF, "padded", 2)


def test_a_workload_without_a_dataset_pads_nothing() -> None:
    config = TrainConfig(
        method="full",
        micro_batch_size=4,
        gradient_accumulation_steps=2,
        sequence_length=8,
        precision="fp32",
        optimizer="sgd",
        batching="padded",
    )
    workload = Workload(model="m", memory_budget_bytes=1)
    assert workload.filling(config).useful_share == 1.0
    assert "lengths" not in workload.to_dict()
    with_lengths = dataclasses.replace(workload, lengths=HALF_AND_HALF)
    assert with_lengths.filling(config).useful_share == pytest.approx(200 / 287.5, rel=0.02)
    assert json.dumps(with_lengths.to_dict()["lengths"])


def test_a_sound_takes_as_long_however_short_its_text_is() -> None:
    config = TrainConfig(
        method="full",
        micro_batch_size=1,
        gradient_accumulation_steps=2,
        sequence_length=300,
        precision="fp32",
        optimizer="sgd",
        batching="padded",
    )
    workload = Workload(model="m", memory_budget_bytes=1, lengths=HALF_AND_HALF)
    of_text = workload.filling(config)
    assert (of_text.useful_share, of_text.full_share) == (1.0, pytest.approx(200 / 300, rel=0.02))
    of_sound = dataclasses.replace(workload, task="automatic-speech-recognition").filling(config)
    assert (of_sound.useful_share, of_sound.full_share) == (of_text.full_share, 1.0)


def test_samples_are_drawn_as_the_dataset_has_them() -> None:
    drawn = draw(HALF_AND_HALF.percentiles, 1000, 4000)
    assert drawn[0] == 300
    assert {100, 300} == set(drawn) & {100, 300}
    # Between its two lengths lies one percentile.
    assert sum(length == 100 for length in drawn) / 4000 == pytest.approx(0.5, abs=0.03)
    assert sum(length == 300 for length in drawn) / 4000 == pytest.approx(0.5, abs=0.03)
    assert drawn == draw(HALF_AND_HALF.percentiles, 1000, 4000)


def test_where_no_dataset_is_known_every_length_is_as_likely() -> None:
    drawn = draw((), 1600, 4000)
    assert (drawn[0], min(drawn), max(drawn)) == (1600, 100, 1600)
    assert sum(drawn) / 4000 == pytest.approx(850, rel=0.03)


def test_no_sample_is_too_short_to_be_trained_on() -> None:
    assert min(draw((1, 1, 8), 8, 100)) == 2
    assert draw((), 1, 3) == [1, 1, 1]
