"""Counts the tokens of a dataset's samples as the exported train.py makes them.

With the model's own tokenizer, from local files only.
"""

from __future__ import annotations

import dataclasses
import heapq
import json
import os
import random
import shlex
from collections import Counter
from collections.abc import Iterable
from typing import Any

from autotune.catalogue.tasks import CAUSAL
from autotune.errors import first_sentence
from autotune.export.encode import IGNORED, Encoded, encode, has_words
from autotune.export.rows_of_tasks import ROWS_OF_TASKS, Row, classes_of, classes_to_learn
from autotune.export.samples.formats import Columns
from autotune.export.samples.read import Samples, read_samples
from autotune.export.samples.rows import Sample, open_picture
from autotune.export.samples.values import UnusableData
from autotune.space.trainers import row_of

MAX_TOKENISED = 20_000
"""Most samples that are tokenised: a larger dataset is sampled. [judgement] Its mean is then known to a per
cent."""
NUM_LONGEST = 200
"""Number of samples, those of the most characters, among which the one of the most tokens is looked for."""
NUM_TRIED = 100
"""Number of samples whose answers are looked for, so that a template that hides them is known now."""


def count_lengths(request: dict[str, Any]) -> dict[str, Any]:
    """Recognise the samples and count their tokens: the answer of the verb `lengths`.

    The counts are of at most MAX_TOKENISED samples. Raises UnusableData.
    """
    columns = Columns(request["format"], request["text_field"], request["answer_field"])
    data = read_samples(request["dataset"], columns, request["task"])
    loss_on = data.loss_on(request["loss_on"]) if request["task"] == CAUSAL else "all"
    longest = heapq.nlargest(NUM_LONGEST, data.samples, _num_characters)
    some = data.samples
    if len(some) > MAX_TOKENISED:
        some = random.Random(0).sample(some, MAX_TOKENISED)
    row = row_of(request["task"])
    if row.reads == "pixels":
        _check_pictures(_of(data, some))
    if row.reads in ("sound", "waves"):
        _check_sounds(_of(data, some))
    if row.has_classes:
        classes_to_learn(data)
    if not row.has_lengths:
        return {**_recognised(data, loss_on), "counts": [(1, len(data.samples))], "longest": 1}
    tokenizer = load_tokenizer(request["tokenizer"])
    if loss_on == "answers":
        tried = list(encode(_of(data, some[:NUM_TRIED]), tokenizer, loss_on))
        if not _teaches(tried) and not _teaches(encode(_of(data, some), tokenizer, loss_on)):
            raise UnusableData(
                "no sample has an answer",
                "Nothing would be learnt: --loss-on all takes the loss on everything",
            )
    counts = _counted(_of(data, some), tokenizer, request["task"])
    counts.pop(0, None)
    if not counts:
        raise UnusableData("it has no tokens")
    return {
        **_recognised(data, loss_on),
        "counts": sorted(counts.items()),
        "longest": max(*counts, *_counted(_of(data, longest), tokenizer, request["task"])),
        "vocabulary_size": len(tokenizer),
    }


def _recognised(data: Samples, loss_on: str) -> dict[str, Any]:
    return {
        "format": data.format,
        "text_field": data.text_field,
        "answer_field": data.answer_field,
        "input_field": data.input_field,
        "system_field": data.system_field,
        "history_field": data.history_field,
        "has_weights": data.has_weights,
        "is_sharegpt": data.is_sharegpt,
        "loss_on": loss_on,
        "num_samples": len(data.samples),
        "unread": list(data.unread),
        "unusual": list(data.unusual),
    }


def _teaches(encoded: Iterable[Encoded]) -> bool:
    return any(label != IGNORED for _, labels in encoded for label in labels)


def _check_pictures(data: Samples) -> None:
    """Read the headers of the pictures. Raises UnusableData."""
    for number, sample in enumerate(data.samples, start=1):
        open_picture(sample.text, data.folder, f"sample {number}").close()


def _check_sounds(data: Samples) -> None:
    """Look for the files of the sounds, and read the headers of those that are .wav. Raises UnusableData."""
    from autotune.worker.build.sound_rows import seconds_of  # It needs torch, which takes seconds.

    for number, sample in enumerate(data.samples, start=1):
        seconds_of(sample.text, data.folder, f"sample {number}")


def _of(data: Samples, samples: list[Sample]) -> Samples:
    return dataclasses.replace(data, samples=samples)


def _num_characters(sample: Sample) -> int:
    texts = [
        *_texts(sample.text),
        sample.context,
        sample.answer,
        *(message["content"] for message in sample.messages),
    ]
    return sum(len(text) for text in texts if isinstance(text, str))


def _texts(text: Any) -> list[Any]:
    return text if isinstance(text, list) else [text]


def _counted(data: Samples, tokenizer: Any, task: str) -> Counter[int]:
    """Samples by their tokens: of a source or its target, where a model reads both apart, the more."""
    rows_of = ROWS_OF_TASKS.get(task)
    if rows_of is None:
        return Counter(len(ids) for ids, _ in encode(data, tokenizer, "all"))
    classes = classes_of(data) if row_of(task).has_classes else ()
    return Counter(_longer(row) for row in rows_of(data, tokenizer, classes))


def _longer(row: Row) -> int:
    """Return the tokens of a row: of a source or its target, where a model reads both apart, the more."""
    labels = row.get("labels")
    return max(len(row.get("input_ids", ())), len(labels) if isinstance(labels, list) else 0)


def load_tokenizer(tokenizer: str) -> Any:
    """Load the tokenizer from local files. Raises UnusableData."""
    return _load("AutoTokenizer", "tokenizer", tokenizer)


def load_processor(name: str, reads: str) -> Any:
    """Load what makes a model's samples of pixels or of sound, from local files. Raises UnusableData."""
    if reads == "sound":
        return _load("AutoProcessor", "processor", name)
    if reads == "waves":
        return _load("AutoFeatureExtractor", "feature extractor", name)
    return _load("AutoImageProcessor", "image processor", name)


def _load(kind: str, what: str, name: str) -> Any:
    import transformers

    remedy = "--tokenizer names a folder that has it"
    try:
        reader = getattr(transformers, kind).from_pretrained(
            name, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:
        missing = f"there is no {what} in local files for {name}"
        if os.path.exists(name):
            # Others are of Transformers' own code.
            is_said = isinstance(error, OSError | ValueError)
            why = f": {first_sentence(error)}" if is_said else ""
            raise UnusableData(f"{missing}{why}", remedy) from error
        fetch = f"import transformers; transformers.{kind}.from_pretrained({json.dumps(name)})"
        raise UnusableData(
            missing, f"Fetch it once: python -c {shlex.quote(fetch)}; or {remedy}"
        ) from error
    if kind in ("AutoProcessor", "AutoTokenizer") and not has_words(
        getattr(reader, "tokenizer", reader)
    ):
        raise UnusableData(f"there are no files of a tokenizer for {name}", remedy)
    return reader
