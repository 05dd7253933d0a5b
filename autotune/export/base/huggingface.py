"""TrainingArguments and TRL's SFTConfig as files: the tables that `--base` reads them with.

Keys and defaults are those of transformers 5.23 training_args.py, and of trl 1.16
trainer/base_config.py, sft_config.py and model_config.py (what `trl sft --config` takes).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from autotune.catalogue.tasks import CAUSAL, TASKS
from autotune.export.base.section_rows import precision_row
from autotune.export.carried import OF_LORA, QUANTIZED
from autotune.export.mapping import (
    Row,
    TrainerFile,
    of_key,
    of_values,
    said_only,
    table,
)
from autotune.export.trainer_rows import (
    COMPILE_BACKEND,
    COMPILE_MODE,
    MOST_LAYERS,
    NO_SYNC,
    NOT_FROM_FILES,
    NOT_PREDICTED,
    OF_DDP,
    OPTIMIZER,
    TEACHER_KEY,
    attention,
    fixed_of,
    lora_rows,
    method_row,
    named_targets_row,
    rows_of_vllm,
    without_fixed,
)
from autotune.memory.alloc_conf import EXPANDABLE, VARIABLES, is_expandable
from autotune.space.config import LOADER_SETTINGS, OF_COMPLETIONS, OF_VLLM, TrainConfig
from autotune.space.trainers import TRL_BY_TASK, Trainer

_KWARGS = "activation_checkpointing_kwargs"
_CHECKPOINTING = table(
    "activation_checkpointing activation_offloading",
    f"activation_checkpointing {_KWARGS}.every_n_layers {_KWARGS}.offload",
    (0, False, False),
    *(
        (every, offload, True, None if every == 1 else every, True if offload else None)
        for every in range(1, MOST_LAYERS + 1)
        for offload in (False, True)
    ),
    beside={f"{_KWARGS}.use_reentrant": False},
)

_SHARED = (
    of_key("micro_batch_size", "per_device_train_batch_size"),
    of_key("gradient_accumulation_steps"),
    OPTIMIZER,
    _CHECKPOINTING,
    of_values("liger", "use_liger_kernel", {False: False, True: True}),
    of_key("torch_empty_cache_steps"),
    of_key("neftune_noise_alpha"),
    COMPILE_MODE,
    COMPILE_BACKEND,
    *said_only(*LOADER_SETTINGS),
    table("parallelism", "deepspeed", ("none", None), ("ddp", None)),
    NO_SYNC,
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
_RENAMED_OF_TRL = {
    **_RENAMED,
    "torch_dtype": "dtype",
    "max_seq_length": "max_length",
    "use_liger": "use_liger_kernel",
}
"""Names of TRL's before 0.20, too: its ModelConfig's dtype and its SFTConfig's length."""
FLASH = ("use_flash_attn", "use_flash_attention_2", "use_flash_attention")
"""Switches of FlashAttention 2 in recipes and programs (alignment-handbook, PEFT's examples)."""
_FLAGS = {"group_by_length": ("train_sampling_strategy", "group_by_length")}
_REFUSED = {
    "fsdp": NOT_FROM_FILES,
    "deepspeed": NOT_FROM_FILES,
    "parallelism_config": NOT_PREDICTED,
    "auto_find_batch_size": "leaves the batch size open",
}

OF_ENVIRONMENT = Row(
    ours=("expandable_segments",),
    keys=tuple(f"env.{name}" for name in VARIABLES),
    say=lambda on: dict.fromkeys((f"env.{name}" for name in VARIABLES), EXPANDABLE if on else None),
    hear=lambda said: any(is_expandable(value) for value in said.values()),
)
"""Row of what the environment says, as `env`."""

TRAINING_ARGUMENTS = TrainerFile(
    name="TrainingArguments",
    source="transformers 5.23",
    rows=(
        # Transformers 5 loads a model in its checkpoint's dtype, which is taken to be bfloat16.
        table(
            "precision",
            "bf16 fp16 tf32",
            ("bf16-autocast", True, False),
            ("fp16-mixed", False, True),
            ("tf32", False, False, True),
            ("bf16-true", False, False, None),
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
    elsewhere=("method", *QUANTIZED, *OF_LORA),
    renamed=_RENAMED,
    flags=_FLAGS,
    refused=_REFUSED,
    unpredicted=OF_DDP,
    caveats=(
        (
            lambda _: True,
            "TrainingArguments name neither method nor attention: --method, or a full fine-tune, and "
            "sdpa are taken",
        ),
    ),
)

LENGTHS = ("block_size", "max_seq_length", "max_source_length", "model_max_length")
OF_EXAMPLES = (
    "block_size", "dataset_config_name", "doc_stride", "line_by_line", "max_source_length",
    "mlm_probability", "task_name", "train_file", "validation_file",
)  # fmt: skip
"""Arguments of Transformers' example scripts (examples/pytorch/*/run_*.py) that no other file here has."""
EXAMPLE = dataclasses.replace(
    TRAINING_ARGUMENTS,
    name="Transformers' example script",
    model_key="model_name_or_path",
    rows=(
        precision_row("dtype", is_quantized=False),
        *TRAINING_ARGUMENTS.rows[1:],
        Row(
            ours=("sequence_length",),
            keys=LENGTHS,
            say=lambda _: {},
            hear=lambda said: next(filter(None, said.values()), None),
        ),
    ),
    renamed={**_RENAMED, "torch_dtype": "dtype"},
)


def is_example(content: Mapping[str, Any]) -> bool:
    """Return whether it has arguments that no other file here has."""
    return any(key in content for key in OF_EXAMPLES)


def of_example(content: Mapping[str, Any], method: str) -> TrainerFile:  # noqa: ARG001
    """Return the table for a file of an example script's arguments, whose length may be left to the model."""
    if any(content.get(key) for key in LENGTHS):
        return EXAMPLE
    return dataclasses.replace(EXAMPLE, rows=EXAMPLE.rows[:-1])


def _bits(peft: bool, bits: int | None) -> dict[str, Any]:
    return {"use_peft": peft, "load_in_8bit": bits == 8, "load_in_4bit": bits == 4}


SFT = TrainerFile(
    name="TRL's SFTConfig",
    source="trl 1.16",
    model_key="model_name_or_path",
    peft_names="lora_target_modules",
    launch="trl sft --config {file}{gpus}",
    launch_several=" --num_processes {number}",
    rows=(
        method_row(
            _bits(False, None),
            _bits(True, None),
            _bits(True, 8),
            _bits(True, 4),
            {
                "codes": "bnb_4bit_quant_type",
                "double": "use_bnb_nested_quant",
                "storage": "bnb_4bit_quant_storage",
            },
        ),
        *lora_rows(
            named_targets_row("lora_target_modules"),
            rank="lora_r",
            dropout_off=0.0,
        ),
        of_key("sequence_length", "max_length"),
        # bf16 is on where fp16 is off; weights are float32 unless dtype says otherwise.
        table(
            "precision",
            "dtype fp16 bf16 tf32",
            ("bf16-mixed", "float32", False, True),
            ("bf16-autocast", "bfloat16", False, True),
            ("bf16-autocast", "auto", False, True),
            ("bf16-true", "bfloat16", False, False),
            ("bf16-true", "auto", False, False),
            ("fp16-autocast", "float16", True, False),
            ("fp16-autocast", "float16", True, True),
            ("fp16-mixed", "float32", True, False),
            ("fp16-mixed", "float32", True, True),
            ("tf32", ..., False, False, True),
            ("fp32", ..., False, False, False),
        ),
        attention(),
        table(
            "batching",
            "packing padding_free train_sampling_strategy",
            ("packed", True),
            ("grouped", False, False, "group_by_length"),
            ("padded", False, False, "random"),
            ("padding-free", False, True),
        ),
        *_SHARED,
        # TrlParser sets the variables after TRL's imports (trl 1.16 scripts/utils.py): in time unless one of
        # them uses CUDA, as torchao does. So they are written, and said to be needed outside as well.
        OF_ENVIRONMENT,
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
    renamed=_RENAMED_OF_TRL,
    flags={**_FLAGS, **dict.fromkeys(FLASH, ("attn_implementation", "flash_attention_2"))},
    of_adapters=(
        "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_modules_to_save",
        "lora_target_parameters", "use_dora", "use_rslora", "bnb_4bit_quant_type",
        "use_bnb_nested_quant", "bnb_4bit_quant_storage",
    ),
    refused={**_REFUSED, "activation_offloading": "is TRL's own offloading, which is not predicted"},
    unpredicted={
        "lora_modules_to_save": "trains further modules in full",
        "lora_target_parameters": "adds adapters",
        **OF_DDP,
    },
)  # fmt: skip


def of_own_model(target: TrainerFile) -> TrainerFile:
    """Return a table of TRL's for a program that makes the model and its adapter by options of its own."""
    settings = ("method", *QUANTIZED, *OF_LORA)
    return dataclasses.replace(
        target,
        rows=tuple(row for row in target.rows if set(settings).isdisjoint(row.ours)),
        defaults={**target.defaults, "dtype": "auto"},
        elsewhere=(*target.elsewhere, *settings),
        of_adapters=(),
        caveats=TRAINING_ARGUMENTS.caveats,
    )


REFUSED_OF_TASKS = {
    "activation_offloading": "is TRL's own offloading, which is not predicted",
    "sync_ref_model": "changes the reference, which is not predicted",
}
"""Keys of trainers that have a task of their own, as TrainerFile.refused."""
_REFUSED_OF_A_TEACHER = {
    "use_vllm": "writes completions with vLLM, which is predicted for GRPO and RLOO alone",
    "teacher_model_init_kwargs.quantization_config": "quantises the teacher, which is not predicted",
}
_NOTED_OF_A_TEACHER = {
    "beta": "between 0 and 1 goes through both heads once more, which is not timed",
}
_ANOTHER_WAY = "writes completions in another way than the one that is predicted"
_REFUSED_OF_COMPLETIONS = {
    "use_transformers_continuous_batching": _ANOTHER_WAY,
    "use_transformers_paged": _ANOTHER_WAY,
    "cache_implementation": _ANOTHER_WAY,
    "generation_batch_size": "is not read: say steps_per_generation",
    "cast_lm_head_to_fp32": "keeps the head in float32, which is not predicted",
}


_MOST_MICRO_BATCHES = 512
"""Most micro-batches that are written at a time in a file that is read."""


def refused_of_task(trainer: Trainer) -> dict[str, str]:
    """Return keys that are refused of a trainer that has a task of its own, as TrainerFile.refused."""
    more = {} if trainer.generates is None else _REFUSED_OF_COMPLETIONS
    of_teacher = _REFUSED_OF_A_TEACHER if trainer.has_teacher else {}
    return {**REFUSED_OF_TASKS, **more, **of_teacher}


def noted_of_task(trainer: Trainer) -> dict[str, str]:
    """Return keys of the trainer's that are noted, as TrainerFile.noted."""
    return _NOTED_OF_A_TEACHER if trainer.has_teacher else {}


def defaults_of_task(trainer: Trainer) -> dict[str, Any]:
    """Return the trainer's defaults beside those of SFTConfig."""
    if trainer.generates is None:
        return {}
    if trainer.has_teacher:
        return {"max_completion_length": trainer.generates.max_completion_length}
    return {
        "num_generations": trainer.generates.num_generations,
        "max_completion_length": trainer.generates.max_completion_length,
        "beta": trainer.generates.kl_beta,
        "num_iterations": 1,
        "use_vllm": False,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.3,
        "vllm_enable_sleep_mode": False,
        "vllm_tensor_parallel_size": 1,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "sequence_mask",
    }


def rows_of_task(trainer: Trainer) -> tuple[Row, ...]:
    """Return the rows of a trainer that has a task of its own, beside those of SFTConfig."""
    if trainer.has_teacher:
        return (of_key("max_completion_length", "max_completion_length"),)
    if trainer.generates is not None:
        at_a_time = {number: number for number in (None, *range(1, _MOST_MICRO_BATCHES + 1))}
        return (
            *map(of_key, ("num_generations", "max_completion_length", "num_iterations")),
            of_key("kl_beta", "beta", off=0.0),
            of_values("steps_per_generation", "steps_per_generation", at_a_time),
            *rows_of_vllm(modes=("colocate", None)),
        )
    scored = of_values(
        "precompute_ref_log_probs", "precompute_ref_log_probs", {False: False, True: True}
    )
    # The other losses of KTO make fewer passes; those of DPO differ by a number a pair.
    loss = table("", "loss_type", (trainer.loss_type,), (None,))
    return (
        table("", "disable_dropout", (True,), (None,)),
        *([scored] if trainer.has_reference else []),
        *([loss] if trainer.compares_samples else []),
    )


def rows_beside(trainer: Trainer, rows: Iterable[Row]) -> tuple[Row, ...]:
    """Return rows of SFTConfig that a trainer with a task of its own has as well."""
    kept = without_fixed(rows, fixed_of(trainer))
    if trainer.generates is None:
        return kept
    # Prompts are not cut off, so that nothing says how long they are.
    return tuple(row for row in kept if row.ours != ("sequence_length",))


def _of_task(trainer: Trainer) -> TrainerFile:
    kind = TASKS[trainer.model_task].peft_type

    def follows(config: TrainConfig) -> dict[str, Any]:
        return {"lora_task_type": None if config.method == "full" else kind}

    return dataclasses.replace(
        SFT,
        name=f"TRL's {trainer.arguments_class}",
        launch=f"trl {trainer.command} --config {{file}}{{gpus}}",
        rows=(*rows_beside(trainer, SFT.rows), *rows_of_task(trainer)),
        defaults={**SFT.defaults, **defaults_of_task(trainer)},
        fixed={"trainer": trainer.name, **fixed_of(trainer)},
        refused={**SFT.refused, **refused_of_task(trainer)},
        noted=noted_of_task(trainer),
        # A language model's is TRL's default.
        follows=None if kind == TASKS[CAUSAL].peft_type else follows,
    )


OF_TASKS = {task: _of_task(row) for task, row in TRL_BY_TASK.items()}
"""The files of TRL's commands beside `trl sft`, by the task."""


def trained_by(target: TrainerFile, trainer: Trainer) -> TrainerFile:
    """Return the table of a file that leaves the trainer open, with the one that has the task."""
    fixed = {"trainer": trainer.name, **fixed_of(trainer)}
    return dataclasses.replace(
        target,
        rows=without_fixed(target.rows, fixed),
        fixed={**target.fixed, **fixed},
        elsewhere=(*target.elsewhere, *OF_COMPLETIONS),
    )


_OF_DPO = ("ld_alpha", "f_divergence_type", "label_smoothing", "loss_weights", "use_weighting")
_OF_GRPO = (
    "scale_rewards",
    "epsilon_high",
    "importance_sampling_level",
    "top_entropy_quantile",
    "delta",
)
_LOSSES_OF_GRPO = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")
_OF_A_TEACHER = (TEACHER_KEY, "teacher_model_revision", "teacher_model_init_kwargs")
_OF_RLOO = ("normalize_advantages", "reward_clip_range")
_WITH_REFERENCE = ("dpo", "kto")
_WITH_COMPLETIONS = tuple(row.task for row in TRL_BY_TASK.values() if row.generates is not None)
_WITH_REWARDS = tuple(row.task for row in TRL_BY_TASK.values() if row.is_rewarded)
_SHARED_BY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("precompute_ref_log_probs", "precompute_ref_batch_size"), _WITH_REFERENCE),
    **dict.fromkeys(
        ("max_completion_length", "use_vllm", "cache_implementation"),
        _WITH_COMPLETIONS,
    ),
    **dict.fromkeys(
        ("num_generations", "num_iterations", *OF_VLLM, *_REFUSED_OF_COMPLETIONS), _WITH_REWARDS
    ),
    **dict.fromkeys(("beta", "sync_ref_model"), (*_WITH_REFERENCE, *_WITH_COMPLETIONS)),
}
"""Keys of several of TRL's trainers, and the tasks of these."""
_ONLY: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "distillation": lambda content: not content.keys().isdisjoint(_OF_A_TEACHER),
    "grpo": lambda content: (
        content.get("loss_type") in _LOSSES_OF_GRPO or not content.keys().isdisjoint(_OF_GRPO)
    ),
    "rloo": lambda content: not content.keys().isdisjoint(_OF_RLOO),
    "kto": lambda content: (
        content.get("loss_type") in ("kto", "apo_zero_unpaired")
        or not content.keys().isdisjoint(("desirable_weight", "undesirable_weight"))
    ),
    "reward": lambda content: (
        "center_rewards_coefficient" in content or content.get("lora_task_type") == "SEQ_CLS"
    ),
    "dpo": lambda content: (
        content.get("loss_type", "nll") not in ("nll", "dft", "chunked_nll")
        or not content.keys().isdisjoint(_OF_DPO)
    ),
}
"""Marks of the files of TRL's commands, in the order in which they are looked for."""


def of_trl(content: Mapping[str, Any], task: str | None) -> TrainerFile:
    """Return the table of a file of TRL's for the task, or for the one that it is marked by.

    Raises ValueError where it may be of several, or is of another.
    """
    marked = next((name for name, is_of in _ONLY.items() if is_of(content)), None)
    if marked is not None and task not in (None, marked):
        raise ValueError(f"it is a file of {TRL_BY_TASK[marked].arguments_class}: --task {marked}")
    shared = next((name for name in _SHARED_BY if name in content), None)
    if marked is None and task is None and shared is not None:
        tasks = _SHARED_BY[shared]
        classes = ", ".join(TRL_BY_TASK[name].arguments_class for name in tasks)
        raise ValueError(f"{shared} is of {classes}: say --task {' or '.join(tasks)}")
    return OF_TASKS.get(marked or task or "", SFT)
