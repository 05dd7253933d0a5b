"""Rows of samples that have an answer each, which no language model writes.

train_py puts all that follows the imports into train.py, after encode.py; the worker counts lengths with the
same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from autotune.export.encode import AT_ONCE, IGNORED
from autotune.export.samples.read import Samples
from autotune.export.samples.rows import Sample
from autotune.export.samples.values import UnusableData

Row = dict[str, Any]


def tokenised(texts: Sequence[Any], tokenizer: Any, **limits: Any) -> Iterator[Row]:
    """The row that the tokenizer makes of each text."""
    for start in range(0, len(texts), AT_ONCE):
        batch = tokenizer(texts[start : start + AT_ONCE], verbose=False, **limits)
        for number in range(len(batch["input_ids"])):
            yield of_row(batch, number)


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


def transcribed(data: Samples, tokenizer: Any, _: Sequence[Any], **__: Any) -> Iterator[Row]:
    """Rows of what is said in a sound, whole, without the token that the model itself begins with."""
    start = tokenizer.get_vocab().get("<|startoftranscript|>")
    for row in tokenised([each.answer for each in data.samples], tokenizer):
        ids = row["input_ids"]
        yield {"labels": ids[1:] if ids[:1] == [start] else ids}


def tagged(data: Samples, tokenizer: Any, classes: Sequence[Any], **limits: Any) -> Iterator[Row]:
    """Rows of words, the first token of each with the number of its tag."""
    numbers = {name: number for number, name in enumerate(classes)}
    for some in parts_of(data.samples):
        batch = made_fast(tokenizer)(
            [each.text for each in some], is_split_into_words=True, verbose=False, **limits
        )
        for number, sample in enumerate(some):
            words = batch.word_ids(number)
            labels = [
                IGNORED if word is None or word == before else numbers[sample.answer[word]]
                for word, before in zip(words, [None, *words], strict=False)
            ]
            yield {**of_row(batch, number), "labels": labels}


def answered(data: Samples, tokenizer: Any, _: Sequence[Any], **limits: Any) -> Iterator[Row]:
    """Rows of a question and its context, with the first and the last token of the answer.

    Both are the first of all where there is none. Rows whose answer is cut off are left out.
    """
    if limits:
        limits["truncation"] = "only_second"
    for some in parts_of(data.samples):
        questions, contexts = zip(*((each.text, each.context) for each in some), strict=True)
        try:
            batch = made_fast(tokenizer)(
                questions, contexts, return_offsets_mapping=True, verbose=False, **limits
            )
        except UnusableData:
            raise
        except Exception as error:  # tokenizers 0.22 has no other class for it
            raise UnusableData(f"a question leaves no room for its context: {error}") from error
        for number, sample in enumerate(some):
            row = of_row(batch, number)
            offsets = row.pop("offset_mapping")
            place = (0, 0)
            if sample.answer is not None:
                begin, end = sample.answer
                inside = [
                    token
                    for token, (part, (first, last)) in enumerate(
                        zip(batch.sequence_ids(number), offsets, strict=True)
                    )
                    if part == 1 and last > begin and first < end
                ]
                if not inside or offsets[inside[-1]][1] < end:
                    continue
                place = inside[0], inside[-1]
            yield {**row, "start_positions": place[0], "end_positions": place[1]}


def made_fast(tokenizer: Any) -> Any:
    """The tokenizer, which knows where its tokens are in a text."""
    if not tokenizer.is_fast:
        raise UnusableData(
            "the tokenizer does not say where its tokens are in a text: it is none of the fast ones",
            "Name a folder that has a tokenizer.json: --tokenizer FOLDER",
        )
    return tokenizer


def parts_of(samples: Sequence[Sample]) -> Iterator[Sequence[Sample]]:
    return (samples[start : start + AT_ONCE] for start in range(0, len(samples), AT_ONCE))


def of_row(batch: Any, number: int) -> Row:
    return {name: values[number] for name, values in batch.items()}


# How rows are made of the samples, the tokenizer, the names of the classes, and limits of their length.
ROWS_OF_TASKS: dict[str, Callable[..., Iterator[Row]]] = {
    "masked-lm": plain,
    "sequence-classification": classified,
    "token-classification": tagged,
    "question-answering": answered,
    "seq2seq-lm": translated,
    "automatic-speech-recognition": transcribed,
    "ctc": transcribed,
    "sentence-similarity": plain,
    "sentence-triplets": plain,
    "sentence-ratings": plain,
}


def classes_of(*datasets: Samples | None) -> list[Any]:
    """The classes of all samples, in order."""
    answers = (each.answer for data in datasets if data for each in data.samples)
    several = (answer if isinstance(answer, list) else [answer] for answer in answers)
    return sorted({each for some in several for each in some}, key=in_order)


def classes_to_learn(*datasets: Samples | None) -> list[Any]:
    """The classes of all samples, in order. Raises UnusableData where they are one, which teaches nothing."""
    classes = classes_of(*datasets)
    if len(classes) == 1:
        raise UnusableData(
            f"all samples are of one class, {classes[0]}",
            "A classifier tells classes apart: add samples of another",
        )
    return classes


def in_order(name: Any) -> tuple[bool, Any]:
    """A key for numbers in their order, then names."""
    return isinstance(name, str), name
