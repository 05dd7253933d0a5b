"""Weights as the checkpoint has them: in float32 where a file leaves it open, quantised whatever it says."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from autotune.catalogue import models
from autotune.errors import AutotuneError
from autotune.export.mapping import Row, TrainerFile, table, value_at
from autotune.export.trainer_rows import LORA

_SWITCHES = {"bf16", "fp16", "tf32"}
OF_FLOAT32 = table(
    "precision",
    "bf16 fp16 tf32",
    ("bf16-mixed", True, False),
    ("fp16-mixed", False, True),
    ("tf32", False, False, True),
    ("fp32", False, False, None),
)
"""The precisions of float32 weights by TrainingArguments' switches; 16-bit weights cannot be said there."""

_LOADED = (
    "weights are taken to be loaded in float32, as the checkpoint is: TrainingArguments do not say. Where "
    "yours are not, give the program with its from_pretrained(dtype=...), or an answer's train_config.yaml"
)


def with_checkpoint_dtype(
    target: TrainerFile, content: Mapping[str, Any], model: str | None
) -> tuple[TrainerFile, Mapping[str, Any]]:
    """Return the table and the content with float32 where the checkpoint decides, and has it.

    Both stay as they are for other checkpoints, and where nothing here knows the model.
    Source: transformers 5.23, whose `from_pretrained` loads dtype="auto" by default.
    """
    row = next((each for each in target.rows if each.ours == ("precision",)), None)
    if row is None or not target.source.startswith(("transformers", "trl")):
        return target, content
    if not _is_float32(model):
        return target, content
    if set(row.keys) == _SWITCHES:
        rows = tuple(OF_FLOAT32 if each is row else each for each in target.rows)
        caveats = (*target.caveats, (lambda _: True, _LOADED))
        return dataclasses.replace(target, rows=rows, caveats=caveats), content
    key = _dtype_key(row)
    if key is None:
        return target, content
    named = next((old for old, new in target.renamed.items() if new == key and old in content), key)
    if value_at(content, named, target.defaults.get(key)) in (None, "auto"):
        first, _, below = named.partition(".")
        value = {**(content.get(first) or {}), below: "float32"} if below else "float32"
        return target, {**content, first: value}
    return target, content


def as_stored(
    target: TrainerFile, values: Mapping[str, Any], model: str | None
) -> tuple[TrainerFile, dict[str, Any], tuple[str, ...]]:
    """Return the table, the settings and notes with the quantisation of the checkpoint beneath LoRA.

    A checkpoint's own wins over the one that is asked for (transformers 5.23 merge_quantization_configs).
    """
    stored = _stored(model)
    if stored in ("none", values.get("quantization", "none")) or values.get("method") not in LORA:
        return target, dict(values), ()
    said = {name for row in target.rows for name in row.ours}
    beneath = {"method": "qlora", "quantization": stored}
    fixed = {name: value for name, value in beneath.items() if name not in said}
    target = dataclasses.replace(target, fixed={**target.fixed, **fixed})
    note = f"the weights of {model} are stored in {stored}, and an adapter trains over that"
    return target, {**values, **beneath}, (note,)


def _dtype_key(row: Row) -> str | None:
    """The key of the weights' dtype; bitsandbytes' is of products."""
    dtypes = (key for key in row.keys if key.endswith("dtype"))
    return next((key for key in dtypes if "bnb" not in key), None)


def _stored(model: str | None) -> str:
    """Return the quantisation that a run of the checkpoint has; `none` where that is open."""
    if model is None:
        return "none"
    try:
        checkpoint = models.resolve(model, asks_hub=False).checkpoint
    except AutotuneError:
        return "none"
    return "none" if checkpoint is None else checkpoint.quantization


def _is_float32(model: str | None) -> bool:
    if model is None:
        return False
    try:
        return models.resolve(model, asks_hub=False).is_float32
    except AutotuneError:
        return False
