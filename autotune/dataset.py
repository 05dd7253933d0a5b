"""Reads how long a dataset's samples are, in a worker: tokenizers are Transformers'."""

from __future__ import annotations

from pathlib import Path

from autotune.errors import ConfigError
from autotune.isolate import run
from autotune.lengths import Lengths

DEADLINE_SECONDS = 900.0


def read_lengths(
    dataset: Path, *, text_field: str, tokenizer: str, sequence_length: int
) -> Lengths:
    """Tokens per sample, cut off at `sequence_length`.

    `tokenizer` is a folder, or an id whose files are in the Hub's cache: nothing is downloaded, and
    nothing of it is run. Raises ConfigError, WorkerError.
    """
    request = {"dataset": str(dataset), "text_field": text_field, "tokenizer": tokenizer}
    end = run("lengths", request, deadline_seconds=DEADLINE_SECONDS)
    if end.how != "ok" or not end.answers:
        raise end.to_error("lengths")
    answer = end.answers[-1]
    if "problem" in answer:
        raise ConfigError(
            f"The dataset {dataset} cannot be read",
            why=answer["problem"],
            remedy="--text-field names the text of a .jsonl, --tokenizer a folder with the tokenizer",
        )
    return Lengths.of(
        dict(answer["counts"]),
        sequence_length,
        num_samples=answer["num_samples"],
        longest=answer["longest"],
    )
