"""Rows of samples that have an answer each, as Transformers' tokenizers make them."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from autotune.export.rows_of_tasks import answered
from autotune.export.samples import Sample, Samples, UnusableData


def test_a_question_that_leaves_no_room_for_its_context_is_refused_in_a_line() -> None:
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    data = Samples("", [Sample("a a a", answer=(0, 1), context="a a")])
    (row,) = answered(data, tokenizer, (), truncation=True, max_length=4)
    assert (row["start_positions"], row["end_positions"]) == (3, 3)
    with pytest.raises(UnusableData, match="A question leaves no room for its context"):
        list(answered(data, tokenizer, (), truncation=True, max_length=2))
