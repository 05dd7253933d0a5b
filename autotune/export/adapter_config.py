"""adapter_config.json: PEFT's configuration, as `PeftConfig.from_pretrained(folder)` reads it.

`get_peft_model(model, PeftConfig.from_pretrained(folder))` makes the adapter that was chosen.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from autotune.catalogue.tasks import Task
from autotune.export import installed
from autotune.export.carried import OF_LORA, Unsaid, unsaid
from autotune.export.exporter import Exporter
from autotune.export.references import model_reference
from autotune.space.adapters import ADAPTERS, peft_fields
from autotune.space.config import TrainConfig, Workload
from autotune.space.trainers import row_of

_CARRIED = ("method", *OF_LORA, "peft")


def applies(config: TrainConfig) -> bool:
    return config.method in ADAPTERS


def write(*, workload: Workload, config: TrainConfig, result: Mapping[str, object]) -> str:  # noqa: ARG001
    """Return a JSON object; `peft_type` says which class of PEFT's it is for."""
    lora = _lora_fields(config)
    fields = {
        key: value
        for key, value in _fields(config, row_of(workload.task)).items()
        if lora is None or key in lora
    }
    content = {
        **fields,
        "task_type": fields.get("task_type", row_of(workload.task).peft_type),
        "base_model_name_or_path": model_reference(workload.model),
        "inference_mode": False,
    }
    return json.dumps(content, indent=2) + "\n"


def cannot_express(config: TrainConfig) -> tuple[Unsaid, ...]:
    """Return words for all but the adapter, and for what of the adapter needs the model to be said."""
    carried = {*_CARRIED}
    missing: tuple[Unsaid, ...] = ()
    if config.method == "adaption_prompt":
        missing = (Unsaid("adapter_layers", "set it to the model's number of layers"),)
    if config.method != "trainable_tokens":
        carried.add("num_virtual_tokens")
    return (
        *missing,
        *unsaid(config, carried),
        *installed.unknown(_fields(config), _lora_fields(config), "peft"),
    )


def _fields(config: TrainConfig, task: Task | None = None) -> dict[str, Any]:
    """Return the fields of the adapter that need no model."""
    fields = peft_fields(config, task=task)
    if fields.get("adapter_layers") == "all":
        del fields["adapter_layers"]
    if isinstance(fields.get("token_indices"), int):
        del fields["token_indices"]
    return fields


def _lora_fields(config: TrainConfig) -> Collection[str] | None:
    """Return the fields that the installed LoraConfig takes; None where that is not the class."""
    if config.method == "peft" or ADAPTERS[config.method].peft_type != "LORA":
        return None
    own = installed.fields("peft", "tuners/lora/config.py", "LoraConfig")
    shared = installed.fields("peft", "config.py", "PeftConfig")
    mixin = installed.fields("peft", "config.py", "PeftConfigMixin")
    return None if own is None else {*own, *(shared or ()), *(mixin or ())}


EXPORTER = Exporter(
    name="peft",
    filename="adapter_config.json",
    write=write,
    applies=applies,
    cannot_express=cannot_express,
    part="the adapter",
)
