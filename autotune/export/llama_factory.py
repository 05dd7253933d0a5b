"""llama_factory.yaml: the settings in LLaMA-Factory's words, and LLaMA-Factory's words back.

Keys, values and defaults are those of llamafactory 0.9.5, hparams/model_args.py, finetuning_args.py,
data_args.py, and of the Seq2SeqTrainingArguments that its training_args.py extends; what they do is in its
hparams/parser.py, model/adapter.py, model/model_utils/. tests/contracts/test_llama_factory.py asks its own
parser.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from autotune.export import dataset_entries
from autotune.export.mapping import (
    Row,
    TrainerFile,
    module_names,
    of_key,
    of_values,
    said_only,
    table,
    targets_of,
)
from autotune.export.text import exporter_of
from autotune.export.trainer_rows import (
    ALL_LOGITS,
    AS_DPO,
    COMPILE_BACKEND,
    COMPILE_MODE,
    FIXED_OF_TASKS,
    FP8_IS_OURS,
    LORA,
    NOT_FROM_FILES,
    NOT_PREDICTED,
    OPTIMIZER,
    PARALLELISM,
    lora_rows,
    method_row,
    targets_row,
    without_fixed,
)
from autotune.space.config import LOADER_SETTINGS
from autotune.space.trainers import BY_TASK


def _say_targets(targets: str) -> dict[str, Any]:
    names = "all" if targets == "all-linear" else ",".join(module_names(targets))
    return {"lora_target": names}


def _hear_targets(said: Mapping[str, Any]) -> str:
    names = said["lora_target"]
    return "all-linear" if names in ("all", ["all"]) else targets_of(names)


def _quantized(bits: int | None, **more: Any) -> dict[str, Any]:
    return {"finetuning_type": "lora", "quantization_bit": bits, **more}


_METHOD = method_row(
    {"finetuning_type": "full", "quantization_bit": None},
    _quantized(None),
    _quantized(8, quantization_method="bnb"),
    _quantized(4, quantization_method="bnb"),
    {"codes": "quantization_type", "double": "double_quantization"},
)
_BEFORE_0_9_2 = tuple(
    dataclasses.replace(each, theirs={**each.theirs, "quantization_method": "bitsandbytes"})
    for each in _METHOD.choices
    if "quantization_method" in each.theirs
)
"""Spellings of older files, which are read."""


TARGET = TrainerFile(
    name="LLaMA-Factory",
    source="llamafactory 0.9.5",
    model_key="model_name_or_path",
    launch="llamafactory-cli train {file}",
    rows=(
        dataclasses.replace(_METHOD, choices=(*_METHOD.choices, *_BEFORE_0_9_2)),
        table("", "stage", ("sft",), ("pt",)),
        *lora_rows(
            targets_row(("lora_target",), _say_targets, _hear_targets),
            rank="lora_rank",
            is_twice=True,
        ),
        of_key("sequence_length", "cutoff_len"),
        of_key("micro_batch_size", "per_device_train_batch_size"),
        of_key("gradient_accumulation_steps"),
        OPTIMIZER,
        # What trains is put into float32, but for pure_bf16 (model/adapter.py).
        table(
            "precision",
            "bf16 fp16 pure_bf16 tf32",
            ("bf16-mixed", True, False, False),
            ("fp16-mixed", False, True, False),
            ("bf16-true", False, False, True),
            ("bf16-autocast", True, False, True),
            ("tf32", False, False, False, True),
            ("fp32", False, False, False, False),
            methods=("full",),
            nearest={
                ("fp16-autocast",): ("fp16-mixed",),
                ("fp8-autocast",): ("bf16-autocast",),
                (): ("bf16-mixed",),
            },
        ),
        # Frozen weights are loaded in the dtype of bf16 or fp16; with neither, in the checkpoint's.
        table(
            "precision",
            "bf16 fp16 pure_bf16",
            ("bf16-autocast", True, False, False),
            ("fp16-autocast", False, True, False),
            ("bf16-true", False, False, True),
            methods=LORA,
            nearest={("fp16-mixed",): ("fp16-autocast",), (): ("bf16-autocast",)},
        ),
        # use_unsloth_gc keeps a layer's input in host memory (model/model_utils/checkpointing.py).
        table(
            "activation_checkpointing activation_offloading",
            "disable_gradient_checkpointing use_unsloth_gc",
            (1, False, False, False),
            (1, True, False, True),
            (0, False, True, False),
            (0, False, True),
            nearest={(): (1, False)},
        ),
        # auto leaves it to Transformers, which takes sdpa.
        table(
            "attention",
            "flash_attn",
            ("sdpa", "sdpa"),
            ("sdpa", "auto"),
            ("eager", "disabled"),
            ("flash_attention_2", "fa2"),
            nearest={("flash_attention_3",): ("flash_attention_2",), (): ("sdpa",)},
        ),
        table(
            "batching",
            "packing train_sampling_strategy stage",
            ("packed", True, "random"),
            ("packed", False, ..., "pt"),
            ("grouped", False, "group_by_length"),
            ("padded", False, "random"),
            nearest={(): ("padded",)},
        ),
        of_values("liger", "enable_liger_kernel", {False: False, True: True}),
        of_key("torch_empty_cache_steps"),
        of_key("neftune_noise_alpha"),
        COMPILE_MODE,
        COMPILE_BACKEND,
        *said_only(*LOADER_SETTINGS),
        PARALLELISM,
    ),
    defaults={
        "finetuning_type": "lora",
        "quantization_method": "bnb",
        "quantization_type": "nf4",
        "double_quantization": True,
        "lora_rank": 8,
        "lora_target": "all",
        "cutoff_len": 2048,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "optim": "adamw_torch_fused",
        "flash_attn": "auto",
        "stage": "sft",
        "train_sampling_strategy": "random",
        "torch_compile_mode": "default",
        "dataloader_pin_memory": True,
    },
    fixed={"trainer": "transformers"},
    flags={
        "neat_packing": ("packing", True),
        "group_by_length": ("train_sampling_strategy", "group_by_length"),
        "use_liger_kernel": ("enable_liger_kernel", True),
    },
    of_adapters=(
        "lora_rank", "lora_alpha", "lora_dropout", "lora_target", "use_dora", "use_rslora",
        "loraplus_lr_ratio", "pissa_init", "additional_target", "quantization_type",
        "quantization_method", "double_quantization",
    ),
    refused={
        "use_unsloth": "replaces the model's code",
        "use_galore": "is said by optim: galore_adamw",
        "use_apollo": "is said by optim: apollo_adamw",
        "use_badam": "trains a block at a time, which is not predicted",
        "use_adam_mini": "is not predicted",
        "use_muon": "is not predicted",
        "use_asft_loss": "compares with a frozen reference, which is not predicted",
        "use_llama_pro": "trains further blocks",
        "use_mca": "trains with Megatron",
        "use_kt": "trains with KTransformers",
        "use_hyper_parallel": NOT_PREDICTED,
        "fp8": FP8_IS_OURS,
        "shift_attn": "is another attention",
        "mixture_of_depths": "is another model",
        "freeze_language_model": "trains a part of the weights",
        "adapter_name_or_path": "starts from adapters, which may be merged",
        "fsdp": NOT_FROM_FILES,
        "deepspeed": NOT_FROM_FILES,
    },
    unpredicted={
        "additional_target": "trains further modules in full",
        "neat_packing": "gives attention a mask of blocks",
        "upcast_layernorm": "keeps norms in float32",
        "upcast_lmhead_output": "makes a float32 copy of the logits",
    },
    noted={"freeze_vision_tower": "leaves out the tower that sees, which is predicted to train"},
)  # fmt: skip

_YOURS = {
    "do_train": True,
    "dataset": "my_dataset",
    "template": "default",
    "num_train_epochs": 3.0,
    "output_dir": "./output",
}
"""Values for the user to fill in, where no base has said them: a name of data/dataset_info.json, ..."""


_OTHER_REFERENCE = dict.fromkeys(
    ("ref_model", "ref_model_adapters", "ref_model_quantization_bit"), "has another reference"
)


def _of_stage(stage: str, *rows: Row, **refused: str) -> TrainerFile:
    """Return the table of a stage with a reference (llamafactory 0.9.5 train/dpo and train/kto)."""
    kept = (row for row in without_fixed(TARGET.rows) if row.keys != ("stage",))
    return dataclasses.replace(
        TARGET,
        name=f"LLaMA-Factory's {stage}",
        rows=(*kept, *rows),
        defaults={**TARGET.defaults, "pref_loss": "sigmoid"},
        fixed={**TARGET.fixed, "trainer": BY_TASK[stage].name, **FIXED_OF_TASKS},
        refused={**TARGET.refused, **_OTHER_REFERENCE, **refused},
        caveats=(ALL_LOGITS, *TARGET.caveats),
    )


DPO = _of_stage(
    "dpo",
    table("", "stage pref_loss", ("dpo", "sigmoid")),
    pref_ftx="adds the loss of SFT",
    ld_alpha="weighs tokens by their place",
)
"""Pairs of answers, with a loss of LLaMA-Factory's own on TRL's DPOTrainer."""
KTO = _of_stage("kto", table("", "stage", ("kto",)), pref_ftx="adds the loss of SFT")
"""Labelled answers, with a loss of LLaMA-Factory's own on TRL's KTOTrainer."""
_LOSSES = {
    loss: dataclasses.replace(
        DPO,
        rows=(*DPO.rows[:-1], table("", "stage pref_loss", ("dpo", loss))),
        noted={**DPO.noted, "pref_loss": AS_DPO},
    )
    for loss in ("hinge", "ipo")
}
"""Other losses of pairs, by TRL's DPOTrainer (train/dpo/trainer.py); they differ by a number a pair."""
_BY_STAGE = {"dpo": DPO, "kto": KTO}
_OF_V1 = {"dist_config", "init_config", "kernel_config", "peft_config", "train_dataset"}
"""Keys of its other trainer, whose files say a batch and an adapter in words of their own."""
_OTHER_STAGES = {
    "rm": "trains a head on values, which is not predicted: the nearest is --task reward, TRL's",
    "ppo": "writes completions and trains a head on values, which is not predicted: pt, sft, dpo and kto are",
}


def is_llama_factory(content: Mapping[str, Any]) -> bool:
    """Return whether it has keys that only a file of LLaMA-Factory's has."""
    marks = ("finetuning_type", "cutoff_len", "stage", "template", "quantization_bit")
    return any(key in content for key in marks)


def fitted(content: Mapping[str, Any], method: str) -> TrainerFile:  # noqa: ARG001
    """Return the table for what a file trains."""
    stage, loss = (str(content.get(key)) for key in ("stage", "pref_loss"))
    if not _OF_V1.isdisjoint(content):
        raise ValueError(
            "it is a file of LLaMA-Factory's v1, which is not read: say the run in a train_config.yaml, as "
            "examples/my-run.yaml does"
        )
    if stage in _OTHER_STAGES:
        refused = {**TARGET.refused, "stage": f"{stage} {_OTHER_STAGES[stage]}"}
        return dataclasses.replace(TARGET, refused=refused)
    return _LOSSES[loss] if stage == "dpo" and loss in _LOSSES else _BY_STAGE.get(stage, TARGET)


EXPORTER = exporter_of(
    TARGET,
    filename="llama_factory.yaml",
    yours=_YOURS,
    data=dataset_entries.llama_factory,
    data_lines=dataset_entries.llama_factory_lines,
    of_tasks={stage: (file, _YOURS) for stage, file in _BY_STAGE.items()},
)
