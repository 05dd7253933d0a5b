"""training_args.py: `transformers.TrainingArguments` to import or to paste."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.export import training_args
from autotune.export.carried import Unsaid, keywords
from autotune.export.training_args import (
    environment,
    has_no_words_for,
    head_of,
    known_arguments,
    libraries,
    part,
)
from autotune.space.config import TrainConfig, Workload

__all__ = [
    "cannot_express", "filename", "has_no_words_for", "libraries", "name", "part", "write",
]  # fmt: skip

name = "training-args-python"
filename = "training_args.py"


_IN_ENVIRONMENT = ("expandable_segments",)


def cannot_express(config: TrainConfig) -> tuple[Unsaid, ...]:
    """Return words for each setting that the file does not carry."""
    return training_args.cannot_express(config, _IN_ENVIRONMENT)


def write(*, workload: Workload, config: TrainConfig, result: Mapping[str, object]) -> str:
    """Return a Python module that makes `arguments`. Every value in it is an ASCII literal."""
    head = head_of(workload, config, result, _IN_ENVIRONMENT)
    return f"""{head}{set_environment(config)}from transformers import TrainingArguments

arguments = TrainingArguments(
{keywords(known_arguments(workload, config))})
"""


def set_environment(config: TrainConfig) -> str:
    """Return the opening of a program that sets what no argument can; empty where nothing is to be set.

    Before all imports: some use CUDA, and torch's allocator reads its settings then.
    """
    variables = environment(config)
    if not variables:
        return ""
    entries = "".join(f"    {key!a}: {value!a},\n" for key, value in variables.items())
    return f"import os\n\n# Before what follows is imported.\nos.environ |= {{\n{entries}}}\n\n"
