"""Counts the tokens of a dataset's samples with the model's own tokenizer, from local files only."""

from __future__ import annotations

import heapq
import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_TOKENISED = 20_000
"""Most samples that are tokenised: a larger dataset is sampled. [judgement] Its mean is then known to a per
cent."""
NUM_LONGEST = 200
"""Number of texts, those of the most characters, among which the sample of the most tokens is looked for."""
_AT_ONCE = 1000


_NOT_TEXT = (".arrow", ".csv", ".gz", ".json", ".parquet", ".tsv", ".zip", ".zst")
"""Endings of files that people keep samples in, but whose lines are no samples."""


class UnreadableDataset(Exception):
    """The dataset or the tokenizer cannot be used; the message, for the user, says what to do."""

    def __init__(self, why: str, remedy: str = "") -> None:
        super().__init__(why)
        self.remedy = remedy


def count_lengths(dataset: str, text_field: str, tokenizer: str) -> dict[str, Any]:
    """Count tokens: {"num_samples": all, "counts": [[tokens, samples], ...], "longest": tokens}.

    The counts are of at most MAX_TOKENISED samples. Raises UnreadableDataset.
    """
    texts = list(_texts(Path(dataset), text_field))
    if not texts:
        raise UnreadableDataset("It is empty")
    num_samples = len(texts)
    longest_texts = heapq.nlargest(NUM_LONGEST, texts, len)
    if num_samples > MAX_TOKENISED:
        texts = random.Random(0).sample(texts, MAX_TOKENISED)
    tokenise = load_tokenizer(tokenizer)
    counts = _counted(tokenise, texts)
    counts.pop(0, None)
    if not counts:
        raise UnreadableDataset("It has no tokens")
    return {
        "num_samples": num_samples,
        "counts": sorted(counts.items()),
        "longest": max(*counts, *_counted(tokenise, longest_texts)),
    }


def _counted(tokenise: Any, texts: list[str]) -> Counter[int]:
    counts: Counter[int] = Counter()
    for start in range(0, len(texts), _AT_ONCE):
        batch = tokenise(texts[start : start + _AT_ONCE], verbose=False)["input_ids"]
        counts.update(map(len, batch))
    return counts


def load_tokenizer(tokenizer: str) -> Any:
    """Load the tokenizer from local files.

    Raises UnreadableDataset.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            tokenizer, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise UnreadableDataset(
            f"There is no tokenizer in local files for {tokenizer}: {why}",
            "--tokenizer names a folder that has it",
        ) from error


def _texts(path: Path, text_field: str) -> Iterator[str]:
    """Read the texts as train.py does: objects of a .jsonl, or lines of text."""
    as_jsonl = (
        "Write it as .jsonl, with the text in a field (datasets: load_dataset(...).to_json(FILE))"
    )
    if path.suffix in _NOT_TEXT and os.path.exists(path):
        raise UnreadableDataset(f"A {path.suffix} is neither .jsonl nor a text per line", as_jsonl)
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _text(line, text_field, number) if path.suffix == ".jsonl" else line
    except OSError as error:
        remedy = "Name a file" if os.path.isdir(path) else ""
        raise UnreadableDataset(error.strerror or str(error), remedy) from error
    except UnicodeDecodeError as error:
        raise UnreadableDataset("It is not UTF-8 text", as_jsonl) from error


def _text(line: str, text_field: str, number: int) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UnreadableDataset(
            f"Line {number} is not JSON", "A .jsonl has an object per line"
        ) from error
    text = row.get(text_field) if isinstance(row, dict) else None
    if not isinstance(text, str):
        fields = ", ".join(map(str, row))[:100] if isinstance(row, dict) else "no fields"
        raise UnreadableDataset(
            f"Line {number} has no text in {text_field!r}; it has {fields}",
            "--text-field names the field; lists of messages have to be made one text first (the "
            "tokenizer's apply_chat_template)",
        )
    return text
