"""What tools/gpu_check/speedups.py calls the Trainer's defaults, against the Trainer's own."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from transformers import TrainingArguments
from transformers.trainer_utils import find_executable_batch_size

from autotune.catalogue.models import ModelSource
from autotune.export.training_args import installed_fields, training_arguments
from autotune.space.config import TrainConfig
from tools.gpu_check import speedups

BASE = TrainConfig(
    method="full",
    micro_batch_size=1,
    gradient_accumulation_steps=32,
    sequence_length=128,
    precision="bf16-true",
    optimizer="adamw_torch_fused",
)
SOURCE = ModelSource(
    name="m",
    config={"model_type": "llama", "torch_dtype": "bfloat16"},
    origin="file",
    path=Path("config.json"),
)


@pytest.mark.parametrize("fits", [8, 5, 1])
def test_the_sizes_are_those_that_the_trainer_tries(fits: int) -> None:
    tried: list[int] = []

    def train(batch_size: int) -> None:
        tried.append(batch_size)
        if batch_size > fits:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    start = TrainingArguments.per_device_train_batch_size
    find_executable_batch_size(train, start, auto_find_batch_size=True)()
    ours = [config.micro_batch_size for config in speedups.defaults(BASE, SOURCE)]
    assert ours[: len(tried)] == tried
    # The Trainer gives up after 1.
    assert ours[-1] == 1


def test_nothing_else_is_set_than_what_is_default() -> None:
    config = next(speedups.defaults(BASE, SOURCE))
    arguments = training_arguments(config, installed_fields())
    fields = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    # Held for the comparison, where the files go, and a rate that no speed depends on.
    for name in ("gradient_accumulation_steps", "output_dir", "learning_rate"):
        del arguments[name]
    # None: the Trainer leaves the model's own setting, which is off.
    fields["activation_checkpointing"] = bool(fields["activation_checkpointing"])
    assert {name: fields[name] for name in arguments} == arguments
    assert fields["gradient_accumulation_steps"] == 1
