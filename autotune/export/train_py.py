"""train.py: the whole recipe as a program of its own (model, quantisation, adapter, Trainer).

The program is train.py.template with one table of values put in. It needs transformers, torch, and
peft or bitsandbytes where the recipe says so, but not autotune. Tested by
tests/contracts/test_export_trains.py, which runs what is written.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from autotune.adapters import ADAPTERS, peft_fields
from autotune.config import (
    CLASSIFIER_HEADS,
    PRECISIONS,
    QUANTIZATIONS,
    TrainConfig,
    Workload,
)
from autotune.export.training_args import environment, training_arguments

name = "train"
filename = "train.py"

_TEMPLATE = Path(__file__).with_name("train.py.template")
_OPENING = "RECIPE: dict[str, Any] = {"
"""Followed by a closing brace in the template, where the values go in between."""


def write(*, workload: Workload, config: TrainConfig, result: Mapping[str, object]) -> str:
    """A Python program. Every value in it is an ASCII literal, line breaks escaped."""
    recipe = _recipe(workload, config)
    recipe["evidence"] = result["evidence"]
    before, after = _TEMPLATE.read_text(encoding="utf-8").split(_OPENING)
    return f"{before}{_OPENING}\n{_entries(recipe, '    ')}{after}"


def _entries(values: Mapping[str, object], indent: str) -> str:
    """The inside of a dict display, one entry per line."""
    lines = []
    for key, value in values.items():
        if isinstance(value, dict):
            text = f"{{\n{_entries(value, indent + '    ')}{indent}}}"
        else:
            text = ascii(value)
        lines.append(f"{indent}{key!a}: {text},\n")
    return "".join(lines)


def _recipe(workload: Workload, config: TrainConfig) -> dict[str, object]:
    precision = PRECISIONS[config.precision]
    return {
        "model": _model_reference(workload.model),
        "task": workload.task,
        "sequence_length": config.sequence_length,
        "batching": config.batching,
        "num_processes": None if config.parallelism == "none" else config.num_gpus,
        "dtype": precision.parameter_dtype,
        "attention": config.attention,
        "trainer": config.trainer,
        "quantization": None
        if config.quantization == "none"
        else quantization_fields(config, workload.task),
        "adapter": peft_fields(config) if config.method in ADAPTERS else None,
        "environment": environment(config),
        # The newest names; the program translates them where it runs.
        "training_arguments": training_arguments(config, extra=workload.extra),
    }


def quantization_fields(config: TrainConfig, task: str) -> dict[str, object]:
    """Of Transformers' BitsAndBytesConfig, dtypes by name; for a quantised base only."""
    # Despite its name for 4-bit quantisation too. PEFT trains a copy of the head.
    skipped: dict[str, object] = {"llm_int8_skip_modules": list(CLASSIFIER_HEADS)}
    if task != "sequence-classification":
        skipped = {}
    row = QUANTIZATIONS[config.quantization]
    if not row.codes:
        return {**skipped, "load_in_8bit": True}
    return {
        **skipped,
        "load_in_4bit": True,
        "bnb_4bit_quant_type": row.codes,
        "bnb_4bit_use_double_quant": row.double,
        "bnb_4bit_compute_dtype": PRECISIONS[config.precision].compute_dtype,
    }


def _model_reference(model: str) -> str:
    """What `from_pretrained` takes: a Hub id, or a folder from wherever the program is run."""
    if not os.path.exists(model):
        return model
    folder = os.path.dirname(model) if os.path.isfile(model) else model
    return os.path.abspath(folder)
