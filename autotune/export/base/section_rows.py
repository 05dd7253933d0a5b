"""Rows of the tables that read sections: an adapter's, a quantisation's, a model's.

Keys of TrainingArguments (or SFTConfig) stand for themselves, the others behind a section's name:
`adapter:r`. They are those of peft 0.21 tuners/*/config.py and transformers 5.23
utils/quantization_config.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from autotune.export.mapping import (
    Row,
    Spelling,
    TrainerFile,
    choices,
    module_names,
    names_of,
    of_alpha,
    of_key,
)
from autotune.export.trainer_rows import LORA, OF_DDP, named_targets_row, quantized, variant_row
from autotune.space.adapters import ADAPTERS
from autotune.space.precisions import PRECISIONS

ADAPTER, QUANTIZATION, MODEL, RECIPE = "adapter:", "quantization:", "model:", "recipe:"
"""Prefixes of the sections' keys. RECIPE: the table of our own train.py."""
ACCELERATOR, LOADER = "accelerator:", "loader:"
"""Prefixes of those of a program that trains by a loop of its own."""
MIXED = f"{ACCELERATOR}mixed_precision"
DEFAULTS_OF_LOOPS = {f"{ACCELERATOR}gradient_accumulation_steps": 1, f"{LOADER}batch_size": 1}
OWN_LOOP = "its loop is its own: a step of Trainer's is predicted, with what could be read of it"
DEALT_OUT = ("auto", "balanced", "balanced_low_0", "sequential")
"""Values of device_map that deal the layers out where several GPUs are seen."""
NAMES = ("pretrained_model_name_or_path", "model_name", "model_name_or_path")
"""Keywords that name the model, of the functions that load one."""
_16_BITS = ("bfloat16", "auto", None)
_COMPUTE = f"{QUANTIZATION}bnb_4bit_compute_dtype"

UNPREDICTED = {
    f"{ADAPTER}modules_to_save": "trains further modules in full",
    f"{ADAPTER}target_parameters": "adds adapters",
    f"{ADAPTER}trainable_token_indices": "trains tokens beside the adapter",
    f"{ADAPTER}rank_pattern": "gives some modules another rank",
    f"{ADAPTER}layers_to_transform": "adapts some layers only",
    f"{ADAPTER}exclude_modules": "leaves modules out",
    f"{ADAPTER}layer_replication": "repeats layers",
    f"{ADAPTER}use_qalora": "is another adapter",
    **OF_DDP,
}


def by_setting(target: TrainerFile) -> dict[str, Row]:
    return {row.ours[0]: row for row in target.rows}


def adapter_rows(method: str) -> list[Row]:
    row = ADAPTERS[method]
    methods = LORA if method in LORA else (method,)
    rows = []
    if row.size in ("lora_rank", "num_virtual_tokens") and row.size_field != "token_indices":
        rows.append(of_key(row.size, f"{ADAPTER}{row.size_field}", methods=methods))
    if row.takes_targets:
        rows.append(
            named_targets_row(
                f"{ADAPTER}target_modules",
                say=lambda targets: targets if targets == "all-linear" else module_names(targets),
                read=_names_in,
                methods=methods,
            )
        )
    if row.peft_type == "LORA":
        keys = f"{ADAPTER}r", f"{ADAPTER}lora_alpha"
        rows.append(of_alpha(*keys, is_whole=False, methods=methods))
        rows.append(variant_row(f"{ADAPTER}use_dora {ADAPTER}use_rslora", methods))
        rows.append(of_key("lora_dropout", f"{ADAPTER}lora_dropout", off=0.0, methods=methods))
    return rows


def _names_in(modules: object) -> object:
    """Return the names that a pattern stands for; what is no pattern stays."""
    if isinstance(modules, str) and modules != "all-linear":
        return names_of(modules)
    return modules


def quantization_row(**more: Any) -> Row:
    """Row of the quantisation. `more` are keys of the model's loader that belong to it."""
    bases = quantized(
        {"load_in_8bit": True, "load_in_4bit": False},
        {"load_in_8bit": False, "load_in_4bit": True},
        {
            "codes": "bnb_4bit_quant_type",
            "double": "bnb_4bit_use_double_quant",
            "storage": "bnb_4bit_quant_storage",
        },
    )
    return choices(
        ("quantization", "quantization_storage"),
        *(
            Spelling(
                ours=(name, storage),
                theirs={
                    **{f"{QUANTIZATION}{key}": value for key, value in keys.items()},
                    **{key: keys[of] for key, of in more.items()},
                },
            )
            for name, storage, keys in bases
        ),
    )


def precision_row(dtype_key: str, *, is_quantized: bool) -> Row:
    """Row of the weights' dtype with TrainingArguments' switches.

    A dtype that is not named is the checkpoint's, taken to be bfloat16; it is float32 for the fp16 of scripts
    that name none.
    """
    table = (
        ("bf16-autocast", {"bf16": True, "fp16": False}, _16_BITS),
        ("bf16-mixed", {"bf16": True, "fp16": False}, ("float32",)),
        ("bf16-true", {"bf16": False, "fp16": False}, _16_BITS),
        *(
            (ours, {"bf16": bf16, "fp16": True}, dtypes)
            for bf16 in (False, True)
            for ours, dtypes in (("fp16-autocast", ("float16",)), ("fp16-mixed", ("float32", None)))
        ),
        ("tf32", {"bf16": False, "fp16": False, "tf32": True}, ("float32",)),
        ("fp32", {"bf16": False, "fp16": False, "tf32": False}, ("float32",)),
    )
    return with_products(
        [
            Spelling(ours=(ours,), theirs={dtype_key: dtype, **switches})
            for ours, switches, dtypes in table
            for dtype in dtypes
        ],
        is_quantized=is_quantized,
    )


def with_products(rows: list[Spelling], *further: str, is_quantized: bool) -> Row:
    """Row of the precision, and of `further` settings that are said with it.

    Products of 4-bit weights follow the precision where it is written, and are not asked for.
    """
    ours = ("precision", *further)
    if not is_quantized:
        return choices(ours, *rows)
    written = [
        dataclasses.replace(
            row,
            theirs={**row.theirs, _COMPUTE: PRECISIONS[row.ours[0]].compute_dtype},
        )
        for row in rows
    ]
    return choices(ours, *written, *rows)


def loop_rows(sections: Collection[str], dtype_key: str, *, is_quantized: bool) -> list[Row]:
    """Return the rows of a loop: the precision, and what its Accelerator and its loader say."""
    row = precision_row(dtype_key, is_quantized=is_quantized)
    said = []
    for each in row.choices:
        theirs = dict(each.theirs)
        bf16, fp16 = theirs.pop("bf16"), theirs.pop("fp16")
        if not (bf16 and fp16) and not theirs.pop("tf32", False):
            said += [
                dataclasses.replace(each, theirs={**theirs, MIXED: mixed})
                for mixed in (("bf16",) if bf16 else ("fp16",) if fp16 else ("no", None))
            ]
    rows = [choices(row.ours, *said)]
    if ACCELERATOR in sections:
        key = f"{ACCELERATOR}gradient_accumulation_steps"
        rows.append(of_key("gradient_accumulation_steps", key))
    if LOADER in sections:
        rows.append(of_key("micro_batch_size", f"{LOADER}batch_size"))
    return rows
