"""torchtune's recipes read back: the table between our settings and the keys of a torchtune YAML.

Keys as in torchtune 0.6.1, recipes/*_single_device.py and *_distributed.py. Whether there is an adapter is in
the name of the model's builder, which stays; a recipe without an adapter keeps none.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from autotune.catalogue.models import CONFIG_NAME, known
from autotune.export.mapping import (
    Row,
    Spelling,
    TrainerFile,
    choices,
    of_alpha,
    of_key,
    of_values,
    table,
    value_at,
)
from autotune.export.torchtune import ATTENTION, MLP, OPTIMIZERS, families, split_targets
from autotune.export.trainer_rows import LORA, MOST_LAYERS, NOT_PREDICTED, targets_row

_BUILDER = "model._component_"
_QUANTIZES = "model.quantize_base"


def is_torchtune(content: Mapping[str, Any]) -> bool:
    builder = value_at(content, _BUILDER)
    return isinstance(builder, str) and "torchtune" in builder


_OTHER_LOSSES = {"rlhf", "grpo", "rl"}
"""Modules of torchtune whose losses are of preferences and rewards."""


def fitted(content: Mapping[str, Any], method: str) -> TrainerFile:  # noqa: ARG001
    """Return the table for the builder that a file names."""
    builder = str(value_at(content, _BUILDER)).rpartition(".")[2]
    fixed = dict(TARGET.fixed)
    rows = [row for row in TARGET.rows if row.ours[0] != "method"]
    if value_at(content, "tokenizer.max_seq_len") is None:
        rows = [row for row in rows if row.ours != ("sequence_length",)]
    if builder.startswith("lora_"):
        rows.insert(0, _ADAPTED)
    elif builder.startswith("qlora_"):
        fixed |= {"method": "qlora", "quantization": "nf4-double"}
    else:
        fixed |= {"method": "full", "quantization": "none"}
    if builder.startswith(("lora_", "qlora_")) or value_at(content, "fsdp_cpu_offload") is None:
        rows = [
            _every_layer(row) if "activation_checkpointing" in row.ours else row for row in rows
        ]
    refused = dict(TARGET.refused)
    if not _OTHER_LOSSES.isdisjoint(str(value_at(content, "loss._component_")).split(".")):
        refused["loss"] = "trains on preferences or rewards, which is read from TRL's files alone"
    # A recipe for several GPUs alone has this key.
    is_offloaded = value_at(content, "fsdp_cpu_offload")
    recipe = "full" if fixed.get("method") == "full" else "lora"
    where = "single_device" if is_offloaded is None else "distributed"
    return dataclasses.replace(
        TARGET,
        rows=tuple(rows),
        fixed=fixed,
        refused=refused,
        several_gpus="fsdp2-offload" if is_offloaded else "fsdp2",
        launch=f"tune run{{gpus}} {recipe}_finetune_{where} --config {{file}}",
        launch_several=" --nproc_per_node {number}",
    )


def _every_layer(row: Row) -> Row:
    """Return the row without ac_mode, so that every layer is checkpointed or none.

    Only full_finetune_distributed.py reads ac_mode.
    """
    kept = tuple(choice for choice in row.choices if "ac_option" not in choice.theirs)
    return dataclasses.replace(row, choices=kept)


def model_of(content: Mapping[str, Any]) -> str | None:
    """Return the folder of the checkpoint, or the Hub id that its name and the builder stand for."""
    folder = value_at(content, "checkpointer.checkpoint_dir")
    if not isinstance(folder, str):
        return None
    if os.path.isfile(os.path.join(folder, CONFIG_NAME)):
        return folder
    last = folder.rstrip("/").rpartition("/")[2].casefold()
    parts = str(value_at(content, _BUILDER)).split(".")
    builder = parts[-1].removeprefix("q").removeprefix("lora_")
    if parts[-1].startswith("qwen"):
        builder = parts[-1]
    builds = any(
        family.folder in parts and family.builders.get(last) == builder for family in families()
    )
    if not builds:
        return None
    return next((each.hub_id for each in known() if each.short_name.casefold() == last), None)


def _say_targets(targets: str) -> dict[str, Any]:
    said = split_targets(targets)
    assert said is not None  # can_say
    return {"model.lora_attn_modules": said[0], "model.apply_lora_to_mlp": said[1]}


def _hear_targets(said: Mapping[str, Any]) -> str:
    named, has_mlp = said["model.lora_attn_modules"], said["model.apply_lora_to_mlp"]
    ours = {theirs: name for name, theirs in ATTENTION.items()}
    if not isinstance(named, list) or not all(isinstance(each, str) for each in named):
        raise ValueError("must be a list of names")
    unknown = [name for name in named if name not in ours]
    if unknown:
        raise ValueError(f"has {unknown[0][:40]!r}, and torchtune knows {', '.join(ours)}")
    if len(set(named)) == len(ours):
        return "all-linear" if has_mlp else "attention"
    names = [ours[each] for each in named] + (sorted(MLP) if has_mlp else [])
    if not names:
        raise ValueError("names no module, and apply_lora_to_mlp is off")
    return ",".join(names)


_ADAPTED = table(
    "method quantization",
    _QUANTIZES,
    ("lora", "none", False),
    ("qlora", "nf4-double", True),
    nearest={("qlora", "nf4"): ("qlora", "nf4-double")},
)

TARGET = TrainerFile(
    name="torchtune",
    source="torchtune 0.6.1",
    model_of=model_of,
    rows=(
        choices(
            ("method", "quantization"),
            Spelling(ours=("full", "none"), theirs={}),
            *_ADAPTED.choices,
        ),
        of_key("lora_rank", "model.lora_rank", methods=LORA),
        of_alpha("model.lora_rank", "model.lora_alpha", is_whole=False, methods=LORA),
        targets_row(
            ("model.lora_attn_modules", "model.apply_lora_to_mlp"),
            _say_targets,
            _hear_targets,
            can_say=lambda targets: split_targets(targets) is not None,
        ),
        of_values("lora_variant", "model.use_dora", {"plain": False, "dora": True}, methods=LORA),
        of_key("lora_dropout", "model.lora_dropout", off=0.0, methods=LORA),
        of_key("sequence_length", "tokenizer.max_seq_len"),
        of_key("micro_batch_size", "batch_size"),
        of_key("gradient_accumulation_steps"),
        table(
            "optimizer",
            "optimizer._component_ optimizer.fused",
            *((name, keys["_component_"], keys.get("fused")) for name, keys in OPTIMIZERS.items()),
            ("paged_adamw_32bit", "bitsandbytes.optim.PagedAdamW", None),
        ),
        table(
            "precision",
            "dtype",
            ("bf16-true", "bf16"),
            ("fp32", "fp32"),
            nearest={("tf32",): ("fp32",), (): ("bf16-true",)},
        ),
        table(
            "activation_checkpointing activation_offloading",
            "enable_activation_checkpointing enable_activation_offloading ac_mode ac_option",
            (0, False, False, False, None),
            (1, False, True, False, None),
            (1, True, True, True, None),
            *(
                (every, False, False, False, "selective", every)
                for every in range(1, MOST_LAYERS + 1)
            ),
            nearest={(): (1, False)},
        ),
        of_values("update_in_backward", "optimizer_in_bwd", {False: False, True: True}),
        of_values("torch_compile", "compile", {"none": False, "default": True}),
        of_values("batching", "dataset.packed", {"packed": True, "padded": False}),
    ),
    defaults={"model.apply_lora_to_mlp": False, "model.lora_dropout": 0.0},
    fixed={"trainer": "transformers"},
    refused={
        "tensor_parallel_dim": NOT_PREDICTED,
        "teacher_model": "distils from a second model",
        "policy_model": "trains by reinforcement",
        "ref_checkpointer": "trains with a second model",
        "quantizer": "adds quantisation to the step",
        "early_exit_loss": "adds losses of further layers",
        "layer_dropout": "leaves layers out at random",
    },
    unpredicted={
        "model.apply_lora_to_output": "adapts the head as well",
        "custom_sharded_layers": "shares out further layers by themselves",
    },
    has_own_names=True,
    arguments={
        "optimizer.lr": "learning_rate",
        "optimizer.weight_decay": "weight_decay",
        "lr_scheduler.num_warmup_steps": "warmup_steps",
        "epochs": "num_train_epochs",
        "clip_grad_norm": "max_grad_norm",
        "seed": "seed",
    },
    caveats=(
        (lambda _: True, "torchtune's own loop and loss are not Trainer's, which is predicted"),
    ),
)
