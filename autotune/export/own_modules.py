"""Modules that a model has of those that `attention` stands for, for files that name modules.

Read from the syntax tree of the installed Transformers' code for the model's type: nothing is imported.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from autotune.catalogue import models
from autotune.errors import AutotuneError
from autotune.space.adapters import (
    ATTENTION_PROJECTIONS,
    BESIDE_OUT_PROJ,
    beside_out_proj,
)
from autotune.space.config import TrainConfig


def with_own_modules(config: TrainConfig, model: str) -> TrainConfig:
    """Return the configuration with the model's own names for `attention`.

    It stays as it is where Transformers is not installed or the model is not known here.
    """
    if config.lora_targets != "attention":
        return config
    names = attention_modules(model)
    return dataclasses.replace(config, lora_targets=",".join(names)) if names else config


def with_adaptable_modules(config: TrainConfig, model: str) -> TrainConfig:
    """Return the configuration with the names of modules where PEFT refuses one of those that are meant.

    It stays as it is where the model is not known here.
    """
    if config.lora_targets not in BESIDE_OUT_PROJ:
        return config
    try:
        kind = str(models.resolve(model, asks_hub=False).config["model_type"])
    except AutotuneError:
        return config
    wanted = beside_out_proj(config, kind)
    made = _made_by(kind) or wanted
    names = ",".join(name for name in wanted if name in made)
    return dataclasses.replace(config, lora_targets=names) if names else config


@functools.cache
def attention_modules(model: str) -> tuple[str, ...]:
    """Return the names of the attention projections that the model has; none where that is not known."""
    try:
        config = models.resolve(model, asks_hub=False).config
    except AutotuneError:
        return ()
    # A model that sees has a tower of another type.
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    kinds = {str(part["model_type"]) for part in parts if part.get("model_type")}
    return tuple(
        name
        for name in ATTENTION_PROJECTIONS
        if any(_made_by(kind).issuperset(name.split(".")) for kind in kinds)
    )


@functools.cache
def _made_by(kind: str) -> frozenset[str]:
    """Return the attributes that the layers of a model type make by a call, or a choice of calls: nn.Linear.

    The heads and poolers of other tasks are left out: a model of this task has none of them.
    """
    return frozenset(
        name
        for path in _files_of(kind)
        for layer in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(layer, ast.ClassDef) and not layer.name.endswith(("Head", "Pooler"))
        for node in ast.walk(layer)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call | ast.IfExp)
        for target in node.targets
        for name in _attribute(target)
    )


def _attribute(target: ast.expr) -> Iterator[str]:
    if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
        yield from (target.attr,) if target.value.id == "self" else ()


def _files_of(kind: str) -> list[Path]:
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return []
    folder = Path(spec.origin).parent / "models"
    for ending in ("", "_text", "_vision_model"):
        name = kind.removesuffix(ending).replace("-", "_")
        if (folder / name).is_dir():
            return sorted((folder / name).glob("modeling_*.py"))
    return []
