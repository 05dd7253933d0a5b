"""Rows of samples that have an answer each, which no language model writes.

train_py puts all that follows the imports into train.py, after encode.py; the worker counts lengths with the
same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from autotune.export.encode import AT_ONCE
from autotune.export.samples import Samples

Row = dict[str, Any]


def tokenised(texts: Sequence[Any], tokenizer: Any, **limits: Any) -> Iterator[Row]:
    """What the tokenizer makes of each text."""
    for start in range(0, len(texts), AT_ONCE):
        batch = tokenizer(texts[start : start + AT_ONCE], verbose=False, **limits)
        for number in range(len(batch["input_ids"])):
            yield {name: values[number] for name, values in batch.items()}


def plain(data: Samples, tokenizer: Any, _: Sequence[Any], **limits: Any) -> Iterator[Row]:
    """Rows of texts alone."""
    yield from tokenised([each.text for each in data.samples], tokenizer, **limits)


def classified(
    data: Samples, tokenizer: Any, classes: Sequence[Any], **limits: Any
) -> Iterator[Row]:
    """Rows of texts, each with the number of its class."""
    numbers = {name: number for number, name in enumerate(classes)}
    rows = plain(data, tokenizer, classes, **limits)
    for row, sample in zip(rows, data.samples, strict=True):
        yield {**row, "labels": numbers[sample.answer]}


def translated(data: Samples, tokenizer: Any, _: Sequence[Any], **limits: Any) -> Iterator[Row]:
    """Rows of texts, each with the tokens of its target."""
    targets = tokenised([each.answer for each in data.samples], tokenizer, **limits)
    for row, target in zip(plain(data, tokenizer, (), **limits), targets, strict=True):
        yield {**row, "labels": target["input_ids"]}


# How rows are made of the samples, the tokenizer, the names of the classes, and limits of their length.
ROWS_OF_TASKS: dict[str, Callable[..., Iterator[Row]]] = {
    "masked-lm": plain,
    "sequence-classification": classified,
    "seq2seq-lm": translated,
}


def classes_of(*datasets: Samples | None) -> list[Any]:
    """The classes of all samples, in order."""
    return sorted({each.answer for data in datasets if data for each in data.samples}, key=str)
