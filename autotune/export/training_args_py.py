"""training_args.py: `transformers.TrainingArguments` to import or to paste."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.config import TrainConfig, Workload
from autotune.export import training_args
from autotune.export.carried import keywords
from autotune.export.training_args import (
    environment,
    has_no_words_for,
    head_of,
    known_arguments,
    libraries,
    part,
)

__all__ = [
    "cannot_express", "filename", "has_no_words_for", "libraries", "name", "part", "write",
]  # fmt: skip

name = "training-args-python"
filename = "training_args.py"


_IN_ENVIRONMENT = ("expandable_segments",)


def cannot_express(config: TrainConfig) -> tuple[str, ...]:
    """Words for each setting that the file does not carry."""
    return training_args.cannot_express(config, _IN_ENVIRONMENT)


def write(*, workload: Workload, config: TrainConfig, result: Mapping[str, object]) -> str:
    """A Python module that makes `arguments`. Every value in it is an ASCII literal."""
    head = head_of(workload, config, result, _IN_ENVIRONMENT)
    variables = set_environment(config)
    system = "import os\n\n" if variables else ""
    return f"""{head}{system}from transformers import TrainingArguments

{variables}arguments = TrainingArguments(
{keywords(known_arguments(workload, config))})
"""


def set_environment(config: TrainConfig) -> str:
    """A statement that sets what no argument can; empty where nothing is to be set."""
    variables = environment(config)
    if not variables:
        return ""
    entries = "".join(f"    {key!a}: {value!a},\n" for key, value in variables.items())
    return f"# Read when the arguments are made.\nos.environ |= {{\n{entries}}}\n"
