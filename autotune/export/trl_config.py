"""sft_config.yaml, dpo_config.yaml and the like: the files that `trl sft --config`, `trl dpo --config` take.

Keys of SFTConfig, DPOConfig, RewardConfig or KTOConfig, and of ModelConfig for the model, its quantisation
and its adapter (trl 1.16 trainer/sft_config.py and its like, model_config.py, scripts/sft.py and its like,
trainer/utils.py get_quantization_config and get_peft_config).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from autotune.catalogue.attention import EXPANDED
from autotune.catalogue.tasks import CAUSAL, PICTURES, TASKS
from autotune.export import dataset_entries, installed, targets
from autotune.export.carried import OF_LORA, QUANTIZED, Unsaid, comments, heading, unsaid
from autotune.export.exporter import Exporter
from autotune.export.references import model_reference
from autotune.export.trainer_rows import TEACHER_KEY
from autotune.export.training_args import CARRIED as OF_TRAINING_ARGUMENTS
from autotune.export.training_args import (
    IN_ENVIRONMENT,
    completion_arguments,
    environment,
    installed_fields,
    known_values,
    training_arguments,
    unknown_values,
)
from autotune.space.adapters import peft_fields, whole_alpha
from autotune.space.config import OF_COMPLETIONS, OF_VLLM, TrainConfig, Workload
from autotune.space.lengths import BY_TOKENS
from autotune.space.precisions import PRECISIONS, QUANTIZATIONS
from autotune.space.trainers import TRAINERS, Trainer

LIBRARIES = ("transformers", "trl")

NONE: Mapping[str, object] = MappingProxyType({})

SFT = TRAINERS["trl-sft"]
TRL = tuple(row for row in TRAINERS.values() if row.is_trl)

CARRIED = (
    *OF_TRAINING_ARGUMENTS, *OF_LORA, *QUANTIZED, "method", "sequence_length", "precision",
    "attention", "batching",
)  # fmt: skip
OF_REFERENCE = ("precompute_ref_log_probs",)
"""Settings that a trainer with a reference has besides."""


def applies(config: TrainConfig) -> bool:
    """Return whether ModelConfig can say the configuration: all that it knows of PEFT is LoRA."""
    return config.method in ("full", "lora", "qlora")


def lacks(workload: Workload, row: Trainer = SFT) -> str:
    if workload.task == (row.task or CAUSAL):
        return ""
    if workload.task == PICTURES and not row.task:
        return f"trl {row.command} loads no model that sees: train_{row.command}.py does"
    return f"{row.class_name} trains only {f'on {row.trains_on}' if row.task else 'causal language models'}"


def write(
    row: Trainer, *, workload: Workload, config: TrainConfig, result: Mapping[str, object]
) -> str:
    """Return a YAML document, opened by what is not in it and what is the user's to add."""
    import yaml

    fields, known = known_values(trl_arguments(config, workload, row)), trl_fields(row)
    model, of_model = model_fields(config, row), _named_model_fields()
    variables = environment(config)
    if (on_one := on_one_card(config)) and (known is None or "model_init_kwargs" in known):
        model["model_init_kwargs"] = on_one
        of_model = None if of_model is None else {*of_model, "model_init_kwargs"}
    content = {
        **({"env": variables} if variables else {}),
        "model_name_or_path": model_reference(workload.model),
        **teacher_fields(workload, config),
        **{key: value for key, value in model.items() if of_model is None or key in of_model},
        **{key: fields[key] for key in fields if known is None or key in known},
        **dataset_entries.trl_dataset(workload.dataset),
    }
    what = f"trl {row.command} --config{targets.said(*LIBRARIES)}"
    lost = (*cannot_express(row, config), *has_no_words_for(row, workload))
    head = heading(what, config, result["evidence"], lost)
    data = "" if workload.dataset else "dataset_name, "
    rewards = "reward_funcs, " if row.is_rewarded else ""
    lines = [f"Yours to add: {data}{rewards}num_train_epochs."]
    if content.get("assistant_only_loss"):
        # trl 1.16 chat_template_utils.py, get_training_chat_template
        lines.append(
            "TRL stops at a chat template that neither marks answers ({% generation %}) nor is one of those "
            "that it knows: train.py takes any; or say assistant_only_loss: false here."
        )
    return head + comments(lines) + yaml.safe_dump(content, sort_keys=False)


def cannot_express(row: Trainer, config: TrainConfig) -> tuple[Unsaid, ...]:
    precision = PRECISIONS[config.precision]
    of_4_bits = QUANTIZATIONS[config.quantization].codes
    words = []
    if of_4_bits and precision.compute_dtype != precision.parameter_dtype:
        words.append(
            f"products of the 4-bit weights in {precision.compute_dtype} "
            f"(trl takes {precision.parameter_dtype}, the dtype of the others)"
        )
    if config.quantization != "none" and precision.grad_scaler:
        # trl 1.16 trainer/sft_trainer.py; torch 2.13 amp/grad_scaler.py, _unscale_grads_.
        words.append(
            "adapters in float32 (trl makes them bfloat16, whose gradients GradScaler refuses)"
        )
    lost = [Unsaid("precision", " and ".join(words), in_part=True)] if words else []
    if config.attention == EXPANDED:
        lost.append(Unsaid("attention", f"{EXPANDED} (trl takes sdpa)"))
    return (
        *lost,
        *unsaid_by_trl(row, config, IN_ENVIRONMENT),
        *installed.unknown(model_fields(config, row), _named_model_fields(), "trl"),
    )


def has_no_words_for(
    row: Trainer, workload: Workload, reads: Iterable[str] = ()
) -> tuple[Unsaid, ...]:
    """Return words for a dataset of other fields, and for extra arguments that an older version lacks.

    `reads`: keys of dataset_entries.UNUSUAL that a program reads itself.
    """
    extra = installed.unknown(workload.extra, trl_fields(row), "trl")
    return (*dataset_entries.unsaid_by_trl(workload.dataset, reads), *extra)


def unsaid_by_trl(
    row: Trainer, config: TrainConfig, carried: Collection[str] = ()
) -> tuple[Unsaid, ...]:
    """Return words for settings that TRL's trainer cannot be given, in whatever form.

    `carried`: what a program says beside its arguments.
    """
    said = {*CARRIED, *(OF_REFERENCE if row.has_reference else ()), "trainer"}
    uncut: tuple[Unsaid, ...] = ()
    if row.generates is not None:
        said.update(OF_COMPLETIONS)
        if row.is_rewarded:
            said.update(OF_VLLM)
        if "sequence_length" not in carried:
            tokens = config.sequence_length - (config.max_completion_length or 0)
            words = f"prompts of {tokens} tokens at most ({row.class_name} cuts none off)"
            uncut = (Unsaid("sequence_length", words),)
    if config.batching == BY_TOKENS:
        said.remove("batching")
    lost = []
    if config.trainer != row.name:
        why = f"{row.class_name} makes its loss without logits, which takes less memory"
        lost.append(Unsaid("trainer", f"Trainer ({why})"))
    return (
        *lost,
        *uncut,
        *unsaid(config, {*said, *carried}),
        *installed.unknown(trl_arguments(config, None, row), trl_fields(row), "trl"),
        *unknown_values(trl_arguments(config, None, row)),
    )


def trl_arguments(
    config: TrainConfig, workload: Workload | None = None, row: Trainer = SFT
) -> dict[str, object]:
    """Return keyword arguments of SFTConfig or its like, by the names of the installed Transformers."""
    fields = trl_fields(row) or ()
    is_old = "max_seq_length" in fields and "max_length" not in fields
    plain: dict[str, Any] = training_arguments(
        config, installed_fields(), NONE if workload is None else workload.extra
    )
    if row.task:
        scored = {name: getattr(config, name) for name in OF_REFERENCE if row.has_reference}
        loss = [*row.loss_type] if isinstance(row.loss_type, tuple) else row.loss_type
        # What the user has set is the user's.
        losses = {} if loss is None or "loss_type" in plain else {"loss_type": loss}
        if row.generates is not None:
            number = config.num_generations or row.generates.num_generations
            # An evaluation writes as many completions of a prompt as a batch has room for.
            room = math.gcd(plain["per_device_eval_batch_size"] * config.num_gpus, number)
            groups = {"num_generations_eval": room} if row.is_rewarded and room < number else {}
            return {**plain, **completion_arguments(config), **groups, **losses}
        return {**plain, "max_length": config.sequence_length, **scored, **losses}
    return {
        **plain,
        **dataset_entries.trl_loss(None if workload is None else workload.dataset),
        "max_seq_length" if is_old else "max_length": config.sequence_length,
        "packing": config.batching == "packed",
        # One stream, cut into blocks. The others leave gaps, and need FlashAttention.
        "packing_strategy": "wrapped",
        "padding_free": config.batching == "padding-free",
    }


def teacher_fields(workload: Workload, config: TrainConfig) -> dict[str, object]:
    """Return keys of DistillationConfig that name the teacher; none without one."""
    if workload.teacher is None:
        return {}
    return {
        TEACHER_KEY: model_reference(workload.teacher.name),
        "teacher_model_init_kwargs": {
            "dtype": PRECISIONS[config.precision].compute_dtype,
            **on_one_card(config),
        },
    }


def on_one_card(config: TrainConfig) -> dict[str, object]:
    """Return arguments of `from_pretrained` by which the Trainer brings the model to a single card.

    That is predicted. By TRL's default, `auto`, the loader does, which lets blocks lie otherwise (trl 1.16
    trainer/utils.py, create_model_from_path).
    """
    return {"device_map": None} if config.num_gpus == 1 else {}


def model_fields(config: TrainConfig, row: Trainer = SFT) -> dict[str, object]:
    """Return keys of ModelConfig."""
    is_old = "dtype" not in (_named_model_fields() or {"dtype"})
    fields: dict[str, object] = {
        "torch_dtype" if is_old else "dtype": PRECISIONS[config.precision].parameter_dtype,
        "attn_implementation": "sdpa" if config.attention == EXPANDED else config.attention,
    }
    quantization = QUANTIZATIONS[config.quantization]
    if quantization.codes:
        fields |= {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": quantization.codes,
            "use_bnb_nested_quant": quantization.double,
        }
        if config.quantization_storage != "uint8":
            fields["bnb_4bit_quant_storage"] = config.quantization_storage
    elif quantization.name != "none":
        fields["load_in_8bit"] = True
    if config.method != "full":
        fields["use_peft"] = True
        fields |= lora_fields(config)
        # TRL's own default is that of a language model.
        if (kind := TASKS[row.model_task].peft_type) != TASKS[SFT.model_task].peft_type:
            fields["lora_task_type"] = kind
    return fields


def lora_fields(config: TrainConfig) -> dict[str, object]:
    adapter = peft_fields(config)
    targets = adapter["target_modules"]
    return {
        "lora_r": adapter["r"],
        "lora_alpha": whole_alpha(config.lora_alpha_ratio, adapter["r"]),
        # TRL's own default is another.
        "lora_dropout": config.lora_dropout,
        # A list of one is taken for its entry: trl 1.16 ModelConfig.__post_init__.
        "lora_target_modules": [targets] if isinstance(targets, str) else targets,
        **{key: value for key, value in adapter.items() if key in ("use_rslora", "use_dora")},
    }


def trl_fields(row: Trainer = SFT) -> Collection[str] | None:
    """Return fields of SFTConfig or its like, installed or named; None without TRL."""
    target = targets.of("trl")
    if target is not None:
        return {*target.fields, *installed_fields()}
    own = installed.fields("trl", f"trainer/{row.command}_config.py", row.arguments_class)
    shared = installed.fields("trl", "trainer/base_config.py", "_BaseConfig")
    return None if own is None else {*own, *(shared or ()), *installed_fields()}


def _named_model_fields() -> Collection[str] | None:
    """Return field names of a named version's ModelConfig; None where the installed TRL is meant."""
    target = targets.of("trl")
    if target is None:
        return None
    prefix = "ModelConfig."
    return {name.removeprefix(prefix) for name in target.names if name.startswith(prefix)}


EXPORTERS = tuple(
    Exporter(
        name=row.command,
        filename=f"{row.command}_config.yaml",
        write=functools.partial(write, row),
        applies=applies,
        lacks=functools.partial(lacks, row=row),
        cannot_express=functools.partial(cannot_express, row),
        has_no_words_for=functools.partial(has_no_words_for, row),
        # Other versions' fields are known of SFTConfig alone.
        libraries=() if row.task else LIBRARIES,
    )
    for row in TRL
)
