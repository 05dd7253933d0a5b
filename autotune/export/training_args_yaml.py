"""training_args.yaml: keyword arguments of `transformers.TrainingArguments`.

For `HfArgumentParser(TrainingArguments).parse_yaml_file`; the same values as training_args.json.
"""

from __future__ import annotations

from collections.abc import Mapping

from autotune.export.training_args import (
    cannot_express,
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

name = "training-args-yaml"
filename = "training_args.yaml"


def write(*, workload: Workload, config: TrainConfig, result: Mapping[str, object]) -> str:
    """Return a YAML document, opened by what is not in it."""
    import yaml

    return head_of(workload, config, result) + yaml.safe_dump(
        known_arguments(workload, config), sort_keys=False
    )
