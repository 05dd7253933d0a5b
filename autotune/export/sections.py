"""The tables of what several calls or files say together: TrainingArguments, adapter, quantisation, model.

Keys of TrainingArguments (or SFTConfig) stand for themselves, the others behind a section's name:
`adapter:r`. A Target is made for what is there: what no call or file of the user's carries has no words.
Defaults are those of peft 0.21 tuners/*/config.py, transformers 5.23 utils/quantization_config.py, trl
1.16 trainer/sft_trainer.py and, for Unsloth, of unsloth 2026.10.9 models/loader.py, models/llama.py.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.adapters import ADAPTERS, read_peft
from autotune.config import (
    ATTENTIONS,
    PEFT_TASK_TYPES,
    PRECISIONS,
    QUANTIZATION_STORAGES,
    QUANTIZATIONS,
    TRAINERS,
    TrainConfig,
)
from autotune.export.huggingface import SFT, TRAINING_ARGUMENTS
from autotune.export.mapping import (
    Choice,
    Row,
    Target,
    choices,
    module_names,
    of_key,
    of_values,
    targets_of,
    value_at,
)
from autotune.export.training_args import environment
from autotune.knobs import KNOBS
from autotune.lengths import BATCHINGS

ADAPTER, QUANTIZATION, MODEL, RECIPE = "adapter:", "quantization:", "model:", "recipe:"
_LORA = ("lora", "qlora")
_SECTION = re.compile(r"\b(adapter|quantization|model|recipe|deepspeed):(?=\w)")
_16_BITS = ("bfloat16", "auto", None)
_UNSLOTH_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_COMPUTE = f"{QUANTIZATION}bnb_4bit_compute_dtype"
_ALL = ("gradient_accumulation_steps", "method", *KNOBS)


def in_words(text: str) -> str:
    """Text with keys in it, for people."""
    return _SECTION.sub(r"\1 ", text)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What is there of a run, and in whose words."""

    name: str
    sections: frozenset[str]
    """Of arguments, ADAPTER, QUANTIZATION, MODEL; RECIPE is our own train.py."""
    is_sft: bool = False
    """TRL's SFTTrainer trains."""
    has_sft_defaults: bool = False
    """Its arguments are an SFTConfig."""
    loads_by_name: bool = False
    """SFTTrainer is given a name, and SFTConfig how its model is loaded."""
    is_unsloth: bool = False
    is_fp8: bool = False
    """The program sets accelerate's variables for fp8."""
    keeps_checkpointing: bool = False
    """Something beside the arguments switches it on."""
    is_part: bool = False
    """What is missing is made elsewhere, and open."""


def adapter_method(fields: Mapping[str, Any], *, is_quantized: bool) -> str:
    """The method of a PeftConfig's fields."""
    kind = fields.get("peft_type", "LORA")
    if kind == "LORA":
        return "qlora" if is_quantized else "lora"
    return next((row.name for row in ADAPTERS.values() if row.peft_type == kind), "peft")


def target_for(shape: Shape, content: Mapping[str, Any], method: str) -> Target:
    """The table for that shape. `method` is for shapes that leave it open. ValueError: an adapter that no
    prediction has."""
    if shape.is_unsloth:
        return _unsloth(shape, content)
    is_quantized = QUANTIZATION in shape.sections
    fixed: dict[str, Any] = {}
    rows: list[Row] = []
    if ADAPTER in shape.sections:
        fields = {
            key.removeprefix(ADAPTER): value
            for key, value in content.items()
            if key.startswith(ADAPTER)
        }
        # An adapter's file says nothing of its base, which may be quantised.
        fixed["method"] = adapter_method(
            fields, is_quantized=is_quantized or (shape.is_part and method == "qlora")
        )
        rows += _adapter_rows(fixed["method"])
        tokens = fields.get("token_indices")
        if fixed["method"] == "trainable_tokens" and isinstance(tokens, int):
            rows.append(of_key("num_virtual_tokens", f"{ADAPTER}token_indices"))  # train.py's
        elif fixed["method"] == "trainable_tokens" and isinstance(tokens, list):
            fixed["num_virtual_tokens"] = max(1, len(tokens))
        if fixed["method"] == "peft":
            # What follows from the task is no choice.
            if fields.get("task_type") in PEFT_TASK_TYPES.values():
                fields = {key: value for key, value in fields.items() if key != "task_type"}
            fixed["peft"] = read_peft(fields)
    elif not shape.is_part:
        fixed["method"] = "full"
    elif is_quantized and "arguments" not in shape.sections:
        fixed["method"] = "qlora"
    if is_quantized:
        rows.append(_quantization_row())
    of_sft, of_trainer = _by_setting(SFT), _by_setting(TRAINING_ARGUMENTS)
    if "arguments" in shape.sections:
        own = [row for name, row in of_trainer.items() if name not in ("precision", "batching")]
        if shape.keeps_checkpointing:
            own = [_switched_on(row) for row in own]
        rows += own if RECIPE not in shape.sections else _without_parallelism(own)
        rows += _recipe_rows() if RECIPE in shape.sections else ()
        if shape.is_sft:
            rows += [of_sft["sequence_length"], of_sft["batching"]]
        elif RECIPE not in shape.sections:
            rows.append(of_trainer["batching"])
    loading = "model_init_kwargs." if shape.loads_by_name else MODEL
    if RECIPE in shape.sections:
        rows.append(_recipe_precision(is_quantized=is_quantized))
    elif shape.is_fp8:
        dtype = value_at(content, f"{loading}dtype", "bfloat16")
        fixed["precision"] = "fp8-mixed" if dtype == "float32" else "fp8-autocast"
    elif shape.loads_by_name or MODEL in shape.sections:
        rows.append(_precision(f"{loading}dtype", is_quantized=is_quantized))
    elif "arguments" in shape.sections:
        switches = list(of_trainer["precision"].choices)
        rows.append(_with_products(switches, is_quantized=is_quantized))
    if shape.loads_by_name or {MODEL, RECIPE} & shape.sections:
        key = f"{loading}attn_implementation"
        rows.append(of_values("attention", key, {name: name for name in ATTENTIONS}))
    if RECIPE not in shape.sections:
        fixed["trainer"] = "trl-sft" if shape.is_sft else "transformers"
    return Target(
        name=shape.name,
        source="transformers 5.23",
        rows=tuple(rows),
        defaults=_defaults(shape, fixed.get("method", method), loading),
        model_key=_model_key(shape),
        alpha_key=f"{ADAPTER}lora_alpha",
        fixed=fixed,
        elsewhere=_elsewhere(shape, rows, fixed) if shape.is_part else (),
        renamed={
            **TRAINING_ARGUMENTS.renamed,
            f"{MODEL}torch_dtype": f"{MODEL}dtype",
            "max_seq_length": "max_length",
        },
        flags=TRAINING_ARGUMENTS.flags,
        refused={**_refused(shape), **_REFUSED},
        unpredicted=_UNPREDICTED,
        caveats=TRAINING_ARGUMENTS.caveats if shape.sections == {"arguments"} else (),
    )


_REFUSED = {
    f"{MODEL}load_in_4bit": "says nothing to Transformers 5: BitsAndBytesConfig has it",
    f"{MODEL}load_in_8bit": "says nothing to Transformers 5: BitsAndBytesConfig has it",
    f"{QUANTIZATION}llm_int8_enable_fp32_cpu_offload": "keeps a part of the model in host memory",
}
_UNPREDICTED = {
    f"{ADAPTER}modules_to_save": "trains further modules in full",
    f"{ADAPTER}target_parameters": "adds adapters",
    f"{ADAPTER}trainable_token_indices": "trains tokens beside the adapter",
    f"{ADAPTER}rank_pattern": "gives some modules another rank",
    f"{ADAPTER}layers_to_transform": "adapts some layers only",
    f"{ADAPTER}exclude_modules": "leaves modules out",
    f"{ADAPTER}layer_replication": "repeats layers",
    f"{ADAPTER}use_qalora": "is another adapter",
}


def _refused(shape: Shape) -> dict[str, str]:
    if RECIPE not in shape.sections:
        return dict(TRAINING_ARGUMENTS.refused)
    return {"auto_find_batch_size": TRAINING_ARGUMENTS.refused["auto_find_batch_size"]}


def _model_key(shape: Shape) -> str:
    if ADAPTER in shape.sections and shape.is_part:
        return f"{ADAPTER}base_model_name_or_path"
    return f"{MODEL}name"


def _switched_on(row: Row) -> Row:
    """Without the choices that switch checkpointing off."""
    if row.ours[0] != "activation_checkpointing":
        return row
    return dataclasses.replace(row, choices=tuple(c for c in row.choices if c.ours[0]))


def _by_setting(target: Target) -> dict[str, Row]:
    return {row.ours[0]: row for row in target.rows}


def _without_parallelism(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.ours != ("parallelism",)]


def _elsewhere(shape: Shape, rows: Iterable[Row], fixed: Mapping[str, Any]) -> tuple[str, ...]:
    said = {*fixed, *(name for row in rows for name in row.ours)}
    names = TRAINING_ARGUMENTS.elsewhere if "arguments" in shape.sections else _ALL
    return tuple(name for name in names if name not in said)


def _defaults(shape: Shape, method: str, loading: str) -> dict[str, Any]:
    sizes = {"lora": 8, "qlora": 8, "vera": 256, "miss": 64}
    defaults = {
        **TRAINING_ARGUMENTS.defaults,
        f"{ADAPTER}r": sizes.get(method),
        f"{ADAPTER}lora_dropout": 0.0,
        f"{QUANTIZATION}bnb_4bit_quant_type": "fp4",
        f"{loading}attn_implementation": "sdpa",
        f"{RECIPE}num_processes": 1,
        f"{RECIPE}parallelism": "none",
        "max_length": SFT.defaults["max_length"],
    }
    if shape.has_sft_defaults:
        defaults |= {name: SFT.defaults[name] for name in ("activation_checkpointing", "bf16")}
    if shape.loads_by_name:
        defaults[f"{loading}dtype"] = "float32"
    return defaults


def _adapter_rows(method: str) -> list[Row]:
    row = ADAPTERS[method]
    methods = _LORA if method in _LORA else (method,)
    rows = []
    if row.size in ("lora_rank", "num_virtual_tokens") and row.size_field != "token_indices":
        rows.append(of_key(row.size, f"{ADAPTER}{row.size_field}", methods=methods))
    if row.takes_targets:
        key = f"{ADAPTER}target_modules"
        rows.append(
            Row(
                ours=("lora_targets",),
                keys=(key,),
                say=lambda targets: {
                    key: targets if targets == "all-linear" else module_names(targets)
                },
                hear=lambda said: _hear_targets(said[key]),
                methods=methods,
            )
        )
    if row.peft_type == "LORA":
        variants = {"plain": (False, False), "rslora": (False, True), "dora": (True, False)}
        rows.append(
            choices(
                ("lora_variant",),
                *(
                    Choice(
                        ours=(name,),
                        theirs={f"{ADAPTER}use_dora": dora, f"{ADAPTER}use_rslora": rslora},
                    )
                    for name, (dora, rslora) in variants.items()
                ),
                methods=methods,
            )
        )
        rows.append(of_key("lora_dropout", f"{ADAPTER}lora_dropout", off=0.0, methods=methods))
    return rows


def _hear_targets(names: object) -> str:
    if names is None:
        raise ValueError("must be named: PEFT's default differs by model")
    if isinstance(names, str) and names != "all-linear":
        raise ValueError("is a pattern: name the modules in a list")
    return targets_of(names)


def _codes() -> list[tuple[str, str, dict[str, Any]]]:
    """(quantization, quantization_storage, BitsAndBytesConfig's keywords)."""
    return [
        ("int8", "uint8", {"load_in_8bit": True, "load_in_4bit": False}),
        *(
            (
                row.name,
                storage or "uint8",
                {
                    "load_in_8bit": False,
                    "load_in_4bit": True,
                    "bnb_4bit_quant_type": row.codes,
                    "bnb_4bit_use_double_quant": row.double,
                    "bnb_4bit_quant_storage": storage,
                },
            )
            for row in QUANTIZATIONS.values()
            if row.codes
            for storage in (None, *QUANTIZATION_STORAGES)
        ),
    ]


def _quantization_row(**more: Any) -> Row:
    """`more` are keys of the model's loader that go with it."""
    return choices(
        ("quantization", "quantization_storage"),
        *(
            Choice(
                ours=(name, storage),
                theirs={
                    **{f"{QUANTIZATION}{key}": value for key, value in keys.items()},
                    **{key: keys[of] for key, of in more.items()},
                },
            )
            for name, storage, keys in _codes()
        ),
    )


def _precision(dtype_key: str, *, is_quantized: bool) -> Row:
    """The weights' dtype with TrainingArguments' switches. A dtype that is not named is the
    checkpoint's, taken to be bfloat16; it is float32 for the fp16 of scripts that name none."""
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
    return _with_products(
        [
            Choice(ours=(ours,), theirs={dtype_key: dtype, **switches})
            for ours, switches, dtypes in table
            for dtype in dtypes
        ],
        is_quantized=is_quantized,
    )


def _with_products(rows: list[Choice], *, is_quantized: bool) -> Row:
    """Products of 4-bit weights follow the precision where it is written, and are not asked for."""
    if not is_quantized:
        return choices(("precision",), *rows)
    written = [
        dataclasses.replace(
            row,
            theirs={**row.theirs, _COMPUTE: PRECISIONS[row.ours[0]].compute_dtype},
        )
        for row in rows
    ]
    return choices(("precision",), *written, *rows)


def _recipe_precision(*, is_quantized: bool) -> Row:
    """train.py has fp8 in variables that it sets, and every dtype by name."""
    rows = []
    for name, row in PRECISIONS.items():
        is_mixed = row.autocast and not row.fp8
        variables = environment(_plain(precision=name))
        theirs = {
            f"{MODEL}dtype": row.parameter_dtype,
            "bf16": is_mixed and row.compute_dtype == "bfloat16",
            "fp16": is_mixed and row.compute_dtype == "float16",
            "tf32": row.tf32 if row.compute_dtype == "float32" else None,
            f"{RECIPE}environment": variables,
        }
        rows.append(Choice(ours=(name,), theirs=theirs))
    return _with_products(rows, is_quantized=is_quantized)


def _recipe_rows() -> list[Row]:
    return [
        of_key("sequence_length", f"{RECIPE}sequence_length"),
        choices(
            ("batching",),
            *(
                Choice(
                    ours=(name,),
                    theirs={
                        f"{RECIPE}batching": name,
                        "train_sampling_strategy": (
                            "group_by_length" if name == "grouped" else "random"
                        ),
                    },
                )
                for name in BATCHINGS
            ),
        ),
        of_values("trainer", f"{RECIPE}trainer", {name: name for name in TRAINERS}),
        Row(
            ours=("parallelism",),
            keys=(f"{RECIPE}parallelism",),
            say=lambda name: {f"{RECIPE}parallelism": name},
            hear=lambda said: said[f"{RECIPE}parallelism"],
        ),
        of_key("num_gpus", f"{RECIPE}num_processes"),
    ]


def _unsloth(shape: Shape, content: Mapping[str, Any]) -> Target:
    """FastLanguageModel loads, adapts, quantises and checkpoints by words of its own."""
    is_full = bool(content.get(f"{MODEL}full_finetuning"))
    has_config = QUANTIZATION in shape.sections
    if not is_full and ADAPTER not in shape.sections:
        raise ValueError("nothing trains: there is neither get_peft_model nor full_finetuning=True")
    bits = {f"{MODEL}load_in_4bit": "load_in_4bit", f"{MODEL}load_in_8bit": "load_in_8bit"}
    fixed: dict[str, Any] = {"trainer": "trl-sft"}
    rows: list[Row] = []
    if is_full:
        fixed |= {"method": "full", "quantization": "none", "quantization_storage": "uint8"}
    elif has_config:
        fixed["method"] = "qlora"
        rows.append(_quantization_row(**bits))
    else:
        # Without a BitsAndBytesConfig its 4 bits are NF4 with quantised scales.
        ways = (("lora", "none"), ("qlora", "nf4-double"), ("qlora", "int8"))
        rows.append(
            choices(
                ("method", "quantization"),
                *(
                    Choice(
                        ours=way,
                        theirs={
                            f"{MODEL}load_in_4bit": way[1] == "nf4-double",
                            f"{MODEL}load_in_8bit": way[1] == "int8",
                        },
                    )
                    for way in ways
                ),
            )
        )
    if not is_full:
        rows += _adapter_rows("lora")
    of_sft, of_trainer = _by_setting(SFT), _by_setting(TRAINING_ARGUMENTS)
    own = ("precision", "batching", "activation_checkpointing", "liger", "torch_compile",
           "torch_compile_backend")  # fmt: skip
    rows += [row for name, row in of_trainer.items() if name not in own]
    packing = [
        dataclasses.replace(
            choice,
            theirs={
                key: value
                for key, value in choice.theirs.items()
                if key != "train_sampling_strategy"
            },
        )
        for choice in of_sft["batching"].choices
        if choice.ours != ("grouped",)
    ]
    rows += [
        of_key("sequence_length", f"{MODEL}max_seq_length"),
        choices(("batching",), *packing),
        _unsloth_checkpointing(is_full=is_full),
        _precision(f"{MODEL}dtype", is_quantized=has_config),
    ]
    return Target(
        name=shape.name,
        source="unsloth 2026.10.9",
        rows=tuple(rows),
        defaults={
            **_defaults(shape, "lora", MODEL),
            f"{MODEL}load_in_4bit": not is_full,
            f"{MODEL}max_seq_length": 2048,
            f"{MODEL}use_gradient_checkpointing": "unsloth",
            f"{ADAPTER}use_gradient_checkpointing": "unsloth",
            f"{ADAPTER}r": 16,
            f"{ADAPTER}target_modules": _UNSLOTH_TARGETS,
        },
        model_key=f"{MODEL}name",
        alpha_key=f"{ADAPTER}lora_alpha",
        fixed=fixed,
        renamed={**TRAINING_ARGUMENTS.renamed, "max_seq_length": "max_length"},
        refused=dict(TRAINING_ARGUMENTS.refused),
        unpredicted=_UNPREDICTED,
        caveats=(
            (lambda _: True, "Unsloth has a loss and kernels of its own, which are not predicted"),
        ),
    )


def _unsloth_checkpointing(*, is_full: bool) -> Row:
    """`unsloth` checkpoints every layer and parks what is left in host memory. Of an adapter's two
    switches the one where it is made decides."""
    of_model, of_adapter = (f"{name}use_gradient_checkpointing" for name in (MODEL, ADAPTER))
    ways = (((0, False), False), ((1, False), True), ((1, True), "unsloth"))
    both = (of_model,) if is_full else (of_adapter, of_model)
    return choices(
        ("activation_checkpointing", "activation_offloading"),
        *(
            Choice(ours=ours, theirs=dict.fromkeys(keys, said))
            for keys in (both, both[:1])
            for ours, said in ways
        ),
        nearest={(): (1, False)},
    )


def _plain(**settings: Any) -> TrainConfig:
    needed = {"method": "full", "precision": "fp32", "optimizer": "sgd"}
    sizes = {"micro_batch_size": 1, "gradient_accumulation_steps": 1, "sequence_length": 1}
    return TrainConfig(**{**needed, **sizes, **settings})
