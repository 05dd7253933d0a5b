"""TrainingArguments and TRL's SFTConfig as files: the tables that `--base` reads them with.

Keys and defaults are those of transformers 5.23 training_args.py, and of trl 1.16
trainer/base_config.py, sft_config.py and model_config.py (what `trl sft --config` takes).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.export.mapping import (
    Row,
    Spelling,
    TrainerFile,
    choices,
    module_names,
    of_alpha,
    of_key,
    of_values,
    said_only,
    targets_of,
)
from autotune.export.trainer_rows import COMPILE_BACKEND, COMPILE_MODE
from autotune.memory.alloc_conf import EXPANDABLE, VARIABLES, is_expandable
from autotune.space.config import LOADER_SETTINGS
from autotune.space.optimizers import OPTIMIZERS
from autotune.space.precisions import QUANTIZATION_STORAGES, QUANTIZATIONS

_LORA = ("lora", "qlora")
_SWITCH = "activation_checkpointing"
_EVERY = "activation_checkpointing_kwargs.every_n_layers"
_OFFLOAD = "activation_checkpointing_kwargs.offload"
_MOST_LAYERS = 128


def _say_optimizer(optimizer: str) -> dict[str, Any]:
    arguments = dict(OPTIMIZERS[optimizer].arguments)
    return {"optim": optimizer, "optim_target_modules": None, **arguments}


_CHECKPOINTING = choices(
    ("activation_checkpointing", "activation_offloading"),
    Spelling(ours=(0, False), theirs={_SWITCH: False}),
    *(
        Spelling(
            ours=(every, offload),
            theirs={
                _SWITCH: True,
                _EVERY: None if every == 1 else every,
                _OFFLOAD: True if offload else None,
            },
            beside={"activation_checkpointing_kwargs.use_reentrant": False},
        )
        for every in range(1, _MOST_LAYERS + 1)
        for offload in (False, True)
    ),
)

_SHARED = (
    of_key("micro_batch_size", "per_device_train_batch_size"),
    of_key("gradient_accumulation_steps"),
    Row(
        ours=("optimizer",),
        keys=("optim", "optim_target_modules", "lr_scheduler_type"),
        say=_say_optimizer,
        hear=lambda said: said["optim"],
    ),
    _CHECKPOINTING,
    of_values("liger", "use_liger_kernel", {False: False, True: True}),
    of_key("torch_empty_cache_steps"),
    of_key("neftune_noise_alpha"),
    COMPILE_MODE,
    COMPILE_BACKEND,
    *said_only(*LOADER_SETTINGS),
    choices(
        ("parallelism",),
        Spelling(ours=("none",), theirs={"deepspeed": None}),
        Spelling(ours=("ddp",), theirs={"deepspeed": None}),
    ),
)
_DEFAULTS = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "optim": "adamw_torch_fused",
    "train_sampling_strategy": "random",
    "torch_compile_mode": "default",
    "dataloader_pin_memory": True,
}
_RENAMED = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}
_FLAGS = {"group_by_length": ("train_sampling_strategy", "group_by_length")}
_REFUSED = {
    "fsdp": "shares the run among GPUs, which is not read from files: give --num-gpus instead",
    "deepspeed": "shares the run among GPUs, which is not read from files: give --num-gpus instead",
    "parallelism_config": "shares the run among GPUs as no prediction does",
    "auto_find_batch_size": "leaves the batch size open",
}

TRAINING_ARGUMENTS = TrainerFile(
    name="TrainingArguments",
    source="transformers 5.23",
    rows=(
        # Transformers 5 loads a model in its checkpoint's dtype, which is taken to be bfloat16.
        choices(
            ("precision",),
            Spelling(ours=("bf16-autocast",), theirs={"bf16": True, "fp16": False}),
            Spelling(ours=("fp16-mixed",), theirs={"bf16": False, "fp16": True}),
            Spelling(ours=("tf32",), theirs={"bf16": False, "fp16": False, "tf32": True}),
            Spelling(ours=("bf16-true",), theirs={"bf16": False, "fp16": False, "tf32": None}),
        ),
        of_values(
            "batching",
            "train_sampling_strategy",
            {"packed": "random", "grouped": "group_by_length"},
        ),
        *_SHARED,
    ),
    defaults=_DEFAULTS,
    fixed={"trainer": "transformers"},
    elsewhere=(
        "method",
        "quantization",
        "quantization_storage",
        "lora_rank",
        "lora_targets",
        "lora_variant",
        "lora_alpha_ratio",
        "lora_dropout",
    ),
    renamed=_RENAMED,
    flags=_FLAGS,
    refused=_REFUSED,
    caveats=(
        (
            lambda _: True,
            "TrainingArguments name neither method nor attention: --method, or a full fine-tune, and "
            "sdpa are taken",
        ),
    ),
)


def _say_targets(targets: str) -> dict[str, Any]:
    return {"lora_target_modules": module_names(targets)}


def _hear_targets(said: Mapping[str, Any]) -> str:
    if said["lora_target_modules"] is None:
        raise ValueError("must be named: PEFT's default differs by model")
    return targets_of(said["lora_target_modules"])


def _bits(peft: bool, bits: int | None, **more: Any) -> dict[str, Any]:
    return {"use_peft": peft, "load_in_8bit": bits == 8, "load_in_4bit": bits == 4, **more}


_16_BITS = ("bfloat16", "auto")

SFT = TrainerFile(
    name="TRL's SFTConfig",
    source="trl 1.16",
    model_key="model_name_or_path",
    rows=(
        choices(
            ("method", "quantization", "quantization_storage"),
            Spelling(ours=("full", "none", "uint8"), theirs=_bits(False, None)),
            Spelling(ours=("lora", "none", "uint8"), theirs=_bits(True, None)),
            Spelling(ours=("qlora", "int8", "uint8"), theirs=_bits(True, 8)),
            *(
                Spelling(
                    ours=("qlora", row.name, storage or "uint8"),
                    theirs=_bits(
                        True,
                        4,
                        bnb_4bit_quant_type=row.codes,
                        use_bnb_nested_quant=row.double,
                        bnb_4bit_quant_storage=storage,
                    ),
                )
                for row in QUANTIZATIONS.values()
                if row.codes
                for storage in (None, *QUANTIZATION_STORAGES)
            ),
        ),
        of_key("lora_rank", "lora_r", methods=_LORA),
        Row(
            ours=("lora_targets",),
            keys=("lora_target_modules",),
            say=_say_targets,
            hear=_hear_targets,
            methods=_LORA,
        ),
        choices(
            ("lora_variant",),
            Spelling(ours=("plain",), theirs={"use_dora": False, "use_rslora": False}),
            Spelling(ours=("rslora",), theirs={"use_dora": False, "use_rslora": True}),
            Spelling(ours=("dora",), theirs={"use_dora": True, "use_rslora": False}),
            methods=_LORA,
        ),
        of_key("lora_dropout", off=0.0, methods=_LORA),
        of_alpha("lora_r", methods=_LORA),
        of_key("sequence_length", "max_length"),
        # bf16 is on where fp16 is off; weights are float32 unless dtype says otherwise.
        choices(
            ("precision",),
            *(
                Spelling(ours=(ours,), theirs={"dtype": dtype, "fp16": fp16, "bf16": bf16})
                for ours, bf16, fp16, dtypes in (
                    ("bf16-mixed", True, False, ("float32",)),
                    ("bf16-autocast", True, False, _16_BITS),
                    ("bf16-true", False, False, _16_BITS),
                    ("fp16-autocast", False, True, ("float16",)),
                    ("fp16-autocast", True, True, ("float16",)),
                    ("fp16-mixed", False, True, ("float32",)),
                    ("fp16-mixed", True, True, ("float32",)),
                )
                for dtype in dtypes
            ),
            Spelling(ours=("tf32",), theirs={"bf16": False, "fp16": False, "tf32": True}),
            Spelling(ours=("fp32",), theirs={"bf16": False, "fp16": False, "tf32": False}),
        ),
        of_values(
            "attention",
            "attn_implementation",
            {
                "sdpa": "sdpa",
                "eager": "eager",
                "flash_attention_2": "flash_attention_2",
                "flash_attention_3": "flash_attention_3",
                "flex_attention": "flex_attention",
            },
        ),
        choices(
            ("batching",),
            Spelling(ours=("packed",), theirs={"packing": True}),
            Spelling(
                ours=("grouped",),
                theirs={
                    "packing": False,
                    "padding_free": False,
                    "train_sampling_strategy": "group_by_length",
                },
            ),
            Spelling(
                ours=("padded",),
                theirs={
                    "packing": False,
                    "padding_free": False,
                    "train_sampling_strategy": "random",
                },
            ),
            Spelling(ours=("padding-free",), theirs={"packing": False, "padding_free": True}),
        ),
        *_SHARED,
        # TrlParser sets the variables after TRL's imports (trl 1.16 scripts/utils.py): in time unless one of
        # them uses CUDA, as torchao does. So they are written, and said to be needed outside as well.
        Row(
            ours=("expandable_segments",),
            keys=tuple(f"env.{name}" for name in VARIABLES),
            say=lambda on: dict.fromkeys(
                (f"env.{name}" for name in VARIABLES), EXPANDABLE if on else None
            ),
            hear=lambda said: any(is_expandable(value) for value in said.values()),
        ),
    ),
    defaults={
        **_DEFAULTS,
        "activation_checkpointing": True,
        "bf16": True,
        "dtype": "float32",
        "max_length": 1024,
        "lora_r": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.05,
        "bnb_4bit_quant_type": "nf4",
        "attn_implementation": "sdpa",
    },
    fixed={"trainer": "trl-sft"},
    renamed=_RENAMED,
    flags=_FLAGS,
    of_adapters=(
        "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_modules_to_save",
        "lora_target_parameters", "use_dora", "use_rslora", "bnb_4bit_quant_type",
        "use_bnb_nested_quant", "bnb_4bit_quant_storage",
    ),
    refused={**_REFUSED, "activation_offloading": "is TRL's own offloading, which is not predicted"},
    unpredicted={
        "lora_modules_to_save": "trains further modules in full",
        "lora_target_parameters": "adds adapters",
    },
)  # fmt: skip
