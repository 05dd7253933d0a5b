"""training_args.py: `transformers.TrainingArguments` to import or to paste."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.config import TrainConfig, Workload
from autotune.export.carried import heading, keywords
from autotune.export.training_args import cannot_express, known_arguments, part

__all__ = ["cannot_express", "filename", "name", "part", "write"]

name = "training-args-python"
filename = "training_args.py"


def write(*, workload: Workload, config: TrainConfig, result: Mapping[str, object]) -> str:
    """A Python module that makes `arguments`. Every value in it is an ASCII literal."""
    what = "transformers.TrainingArguments"
    head = heading(what, config, result["evidence"], cannot_express(config))
    return f"""{head}from transformers import TrainingArguments

arguments = TrainingArguments(
{keywords(known_arguments(workload, config))})
"""
