"""data/target_fields.toml says of the installed versions what their own classes say."""

from __future__ import annotations

import dataclasses
import inspect
from importlib.metadata import version

import pytest

from autotune.export import targets


def names_of(library: str) -> frozenset[str]:
    (target,) = targets.read([f"{library}=={version(library)}"])
    return target.names


def test_transformers() -> None:
    from transformers import PreTrainedModel, TrainingArguments
    from transformers.training_args import OptimizerNames

    method = inspect.signature(PreTrainedModel.activation_checkpointing_enable)
    _, _, *options = method.parameters
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert names_of("transformers") == {
        *fields,
        *(f"optim={name.value}" for name in OptimizerNames),
        *(f"checkpointing.{name}" for name in options),
    }


def test_trl() -> None:
    pytest.importorskip("trl")
    from transformers import TrainingArguments
    from trl import ModelConfig, SFTConfig

    names = names_of("trl")
    own = {name for name in names if name.isidentifier()}
    shared = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert own | shared == {field.name for field in dataclasses.fields(SFTConfig)}
    model = {f"ModelConfig.{field.name}" for field in dataclasses.fields(ModelConfig)}
    assert names - own == model
