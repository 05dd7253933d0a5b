"""Modules that PEFT adapts where a run names none: its own table by the model's type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.catalogue import models
from autotune.errors import AutotuneError
from autotune.export import installed
from autotune.export.mapping import TrainerFile, value_at

_TABLE = "TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING"


def with_default_targets(
    target: TrainerFile, content: Mapping[str, Any], model: str | None
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return (the content with PEFT's modules for the model, a note on them).

    The content stays as it is where it names modules, or where nothing here knows the model: then the note is
    on the table's default.
    """
    key = target.peft_names
    has_switch = any("use_peft" in row.keys for row in target.rows)
    is_lora = value_at(content, "use_peft") if has_switch else True
    if not key or not is_lora or content.get(key) is not None:
        return content, ()
    default = target.defaults.get(key)
    unknown = (f"it names no modules for LoRA: {default} is taken",) if default else ()
    if model is None:
        return content, unknown
    try:
        kind = models.resolve(model, asks_hub=False).config["model_type"]
    except AutotuneError:
        return content, unknown
    table = installed.literal("peft", "utils/constants.py", _TABLE)
    names = table.get(kind) if isinstance(table, dict) else None
    if not isinstance(names, list):
        return content, unknown
    return {**content, key: names}, (
        f"it names no modules for LoRA: {', '.join(names)} are PEFT's own for {kind}",
    )
