"""Counts the tokens of samples with pictures, as TRL's collator makes them, without reading a picture.

The model's own processor writes the text by its chat template. What it puts in place of a picture follows
from the picture's size (autotune.worker.build.pictures), but for a few tokens around it that it adds alike
for each of them: those are counted once, with a blank picture.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from autotune.errors import first_line, first_sentence
from autotune.export.samples.values import UnusableData

Size = tuple[int, int]


_REMEDY = "Give `messages`, or `prompt` and `completion`, with a place for each picture"
_WITHOUT_TEMPLATE = "Give `prompt` and `completion` as texts: the model has no chat template"


def counted(
    samples: Iterable[tuple[Any, list[Size]]],
    tokens_of: Mapping[Size, int],
    folder: str | None,
    *,
    num_samples: int,
) -> dict[str, Any]:
    """Count samples by their tokens; or say why the texts are not read.

    `samples`: rows, each with the sizes of its pictures. `tokens_of`: how many tokens a picture becomes.
    Raises UnusableData for a sample whose text cannot be read.
    """
    try:
        import trl  # noqa: F401

        processor = _load(folder)
    except Exception as error:  # of whatever is missing in the model's folder
        return {"unread": first_sentence(error)}
    counts: Counter[int] = Counter()
    around: int | None = None
    for number, (row, sizes) in enumerate(samples):
        try:
            texts = _texts_of(row, len(sizes), processor)
            if around is None and sizes:
                around = _around(texts, sizes, processor) - sum(tokens_of[size] for size in sizes)
                around //= len(sizes)
            tokens = _num_tokens(texts, processor)
        except Exception as error:
            raise UnusableData(
                f"the text of sample {number + 1} cannot be read: {first_line(error, 200)}",
                _REMEDY if _has_template(processor) else _WITHOUT_TEMPLATE,
            ) from error
        counts[tokens + sum(tokens_of[size] + (around or 0) for size in sizes)] += 1
    return {"num_samples": num_samples, "counts": sorted(counts.items()), "longest": max(counts)}


def _has_template(processor: Any) -> bool:
    return bool(processor.chat_template or processor.tokenizer.chat_template)


def _load(folder: str | None) -> Any:
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


def _texts_of(row: Mapping[str, Any], num_images: int, processor: Any) -> list[str]:
    """Return a sample's texts, whose tokens lie one behind the other.

    Source: trl 1.16 sft_trainer.py, DataCollatorForVisionLanguageModeling.
    """
    from trl.data_utils import (
        apply_chat_template,
        is_conversational,
        prepare_multimodal_messages,
    )

    blanks = [None] * num_images
    if "messages" in row:
        messages = prepare_multimodal_messages(row["messages"], images=blanks)
        return [processor.apply_chat_template(messages, tokenize=False)]
    pair = {name: row[name] for name in ("prompt", "completion") if row.get(name) is not None}
    if len(pair) < 2:
        raise ValueError(f"it has {', '.join(row)} alone")
    if is_conversational(pair):
        pair["prompt"] = prepare_multimodal_messages(pair["prompt"], images=blanks)
        pair["completion"] = prepare_multimodal_messages(pair["completion"])
        pair = apply_chat_template(pair, processor)
    return [pair["prompt"], pair["completion"]]


def _num_tokens(texts: list[str], processor: Any) -> int:
    tokenizer = processor.tokenizer
    made = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return len(list(itertools.chain(*made)))


def _around(texts: list[str], sizes: list[Size], processor: Any) -> int:
    """Return how many tokens more a text has with blank pictures of these sizes."""
    from PIL import Image

    blanks = [Image.new("RGB", size) for size in sizes]
    made = processor(images=[blanks], text=texts[:1], add_special_tokens=False)["input_ids"]
    return len(made[0]) - _num_tokens(texts[:1], processor)
