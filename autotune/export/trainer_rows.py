"""Rows that several trainers share: TrainingArguments' own keys, LoRA's, a quantised base's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from autotune.catalogue.attention import ATTENTIONS, EXPANDED
from autotune.export.deepspeed_json import filename as deepspeed_filename
from autotune.export.mapping import (
    Row,
    Spelling,
    choices,
    module_names,
    of_alpha,
    of_key,
    table,
    targets_of,
)
from autotune.space.config import COMPILE_BACKENDS, COMPILE_MODES, TrainConfig
from autotune.space.optimizers import OPTIMIZERS
from autotune.space.parallelisms import PARALLELISMS
from autotune.space.precisions import QUANTIZATION_STORAGES, QUANTIZATIONS
from autotune.space.trainers import FIXED_BY_A_TEACHER, Trainer

LORA = ("lora", "qlora")
MOST_LAYERS = 128
"""Longest interval of checkpointed layers that a file is read with."""
NOT_FROM_FILES = (
    "shares the run among GPUs, which is not read from files: take it out, and give --num-gpus"
)
OF_DDP = {"ddp_bucket_cap_mb": "makes DDP's buckets of another size"}
"""Keys of TrainingArguments that change what DDP keeps, and how."""
NOT_PREDICTED = "shares the run among GPUs as no prediction does"
FP8_IS_OURS = "is read from our own train_config.yaml alone (precision: fp8-mixed, fp8-autocast)"

COMPILE_MODE = table(
    "torch_compile",
    "torch_compile torch_compile_mode",
    ("none", False),
    *((mode, True, mode) for mode in COMPILE_MODES),
)
COMPILE_BACKEND = table(
    "torch_compile_backend",
    "torch_compile_backend",
    ("inductor", None),
    *((backend, backend) for backend in COMPILE_BACKENDS),
)

# ddp is how it is launched.
PARALLELISM = table(
    "parallelism",
    "deepspeed",
    ("none", None),
    ("ddp", None),
    *(
        (f"zero{stage}{offload}", deepspeed_filename)
        for stage in (1, 2, 3)
        for offload in ("", "-offload")
    ),
    nearest={(): ("ddp",)},
)

FSDP2_BY_ACCELERATE = ("fsdp2", "fsdp2-offload", "fsdp2-no-reshard")
"""Ways to share that accelerate's and Transformers' settings of FSDP2 mean."""
SYNC = "accelerator_config.gradient_accumulation_kwargs.sync_each_batch"
"""Key of TrainingArguments by which FSDP2 reduces gradients in each micro-step: left out, it does not."""


KEEPS_WHOLE_GRADIENTS = (
    lambda config: config.accumulates_shards and not config.no_sync,
    "gradients are predicted to be reduced in each micro-step, which FSDP2 does where accelerate is told to: "
    "sync_each_batch=True in GradientAccumulationPlugin, or in accelerator_config of TrainingArguments; "
    "whole ones take more memory",
)
"""Caveat for files that cannot say SYNC."""


def _say_no_sync(no_sync: bool, parallelism: str, steps: int) -> dict[str, Any]:
    syncs = PARALLELISMS[parallelism].is_fsdp and steps > 1 and not no_sync
    return {SYNC: True if syncs else None}


NO_SYNC = Row(
    ours=("no_sync",),
    also=("parallelism", "gradient_accumulation_steps"),
    keys=(SYNC,),
    say=_say_no_sync,
)
"""Row of FSDP2's gradients between micro-steps. export.base.read hears it, by what it says of the others."""


def _say_optimizer(optimizer: str) -> dict[str, Any]:
    arguments = dict(OPTIMIZERS[optimizer].arguments)
    return {"optim": optimizer, "optim_args": None, "optim_target_modules": None, **arguments}


OPTIMIZER = Row(
    ours=("optimizer",),
    keys=("optim", "optim_args", "optim_target_modules", "lr_scheduler_type"),
    say=_say_optimizer,
    hear=lambda said: said["optim"],
    unheard=("optim_args", "optim_target_modules", "lr_scheduler_type"),
)


_OF_HUB = (
    ("flash_attention_2", "kernels-community/flash-attn2"),
    ("flash_attention_3", "kernels-community/flash-attn3"),
    ("flash_attention_3", "kernels-community/vllm-flash-attn3"),
)
"""The same kernels as the Hub has them, which Transformers loads by these names."""


def attention(key: str = "attn_implementation", *, expands: bool = False) -> Row:
    """Return the row of a key that takes Transformers' own names.

    `expands`: whether EXPANDED is one of them, since the program lets Transformers know it.
    """
    named = [(name, name) for name in ATTENTIONS if expands or name != EXPANDED]
    return table("attention", key, *named, *_OF_HUB, nearest={(EXPANDED,): ("sdpa",)})


TEACHER_KEY = "teacher_model_name_or_path"
"""The key of a teacher, whose name a program gives to its trainer."""
FIXED_OF_TASKS = {"batching": "padded", "lora_dropout": 0.0}
"""Settings of TRL's trainers that have a task of their own: they pad, and switch dropout off."""


ALL_LOGITS: tuple[Callable[[TrainConfig], bool], str] = (
    lambda _: True,
    "its loss makes the logits of all tokens at once, which what was predicted does not: it takes more "
    "memory, so try whether it fits",
)
"""Caveat for trainers of other tools whose loss is not that of TRL 1.16."""
AS_DPO = "takes the memory and time of DPO's usual loss, with which the other files train"
"""Note on another loss of DPO's in a user's file."""


def fixed_of(trainer: Trainer) -> dict[str, Any]:
    """Return FIXED_OF_TASKS and what a teacher fixes; what writes completions leaves dropout on."""
    left = () if trainer.generates is None else ("lora_dropout",)
    of_teacher = FIXED_BY_A_TEACHER if trainer.has_teacher else {}
    fixed = {name: value for name, value in FIXED_OF_TASKS.items() if name not in left}
    return {**fixed, **of_teacher}


def without_fixed(
    rows: Iterable[Row], fixed: Mapping[str, Any] = FIXED_OF_TASKS
) -> tuple[Row, ...]:
    """Return the rows without those of settings that are fixed."""
    return tuple(row for row in rows if row.ours[:1] not in [(name,) for name in fixed])


def lora_rows(
    targets: Row,
    *,
    rank: str,
    variant: str = "use_dora use_rslora",
    dropout_off: float | None = None,
    is_twice: bool = False,
) -> tuple[Row, ...]:
    """Return the rows of LoRA; `is_twice` is of_alpha's."""
    return (
        of_key("lora_rank", rank, methods=LORA),
        targets,
        variant_row(variant),
        of_key("lora_dropout", off=dropout_off, methods=LORA),
        of_alpha(rank, is_twice=is_twice, methods=LORA),
    )


def variant_row(keys: str, methods: tuple[str, ...] = LORA) -> Row:
    """Return the row of the variant; `keys` are the switches of DoRA and of rsLoRA."""
    plain, rslora, dora = ("plain", False, False), ("rslora", False, True), ("dora", True, False)
    return table("lora_variant", keys, plain, rslora, dora, methods=methods)


def targets_row(
    keys: tuple[str, ...],
    say: Callable[[str], Mapping[str, Any]],
    hear: Callable[[Mapping[str, Any]], str],
    methods: tuple[str, ...] = LORA,
    **more: Any,
) -> Row:
    """Return the row of the modules that have adapters."""
    return Row(ours=("lora_targets",), keys=keys, say=say, hear=hear, methods=methods, **more)


def named_targets_row(
    key: str,
    *,
    say: Callable[[str], Any] = module_names,
    read: Callable[[Any], Any] = lambda names: names,
    methods: tuple[str, ...] = LORA,
) -> Row:
    """Return the row of those modules for a key that has to name them; `read` is given what it has."""

    def hear(said: Mapping[str, Any]) -> str:
        if said[key] is None:
            raise ValueError("must be named: PEFT's default differs by model")
        return targets_of(read(said[key]))

    return targets_row((key,), lambda targets: {key: say(targets)}, hear, methods)


def quantized(
    of_8_bits: Mapping[str, Any], of_4_bits: Mapping[str, Any], fields: Mapping[str, str]
) -> list[tuple[str, str, dict[str, Any]]]:
    """Return (quantization, quantization_storage, keys) of each quantised base.

    `fields`: keys of a 4-bit base by what they hold: `codes`, `double`, and `storage` where there is a
    key for it.
    """
    return [
        ("int8", "uint8", dict(of_8_bits)),
        *(
            (
                row.name,
                storage or "uint8",
                {
                    **of_4_bits,
                    **{
                        key: {"codes": row.codes, "double": row.double, "storage": storage}[held]
                        for held, key in fields.items()
                    },
                },
            )
            for row in QUANTIZATIONS.values()
            if row.codes
            for storage in (None, *(QUANTIZATION_STORAGES if "storage" in fields else ()))
        ),
    ]


def method_row(
    full: Mapping[str, Any],
    lora: Mapping[str, Any],
    of_8_bits: Mapping[str, Any],
    of_4_bits: Mapping[str, Any],
    fields: Mapping[str, str],
) -> Row:
    """Return the row of the method with its base; the last three as in `quantized`."""
    ours = ("method", "quantization", "quantization_storage")
    num_ours = 3 if "storage" in fields else 2
    qlora = (("qlora", *way) for way in quantized(of_8_bits, of_4_bits, fields))
    ways = (("full", "none", "uint8", full), ("lora", "none", "uint8", lora), *qlora)
    return choices(ours[:num_ours], *(Spelling(ours=way[:num_ours], theirs=way[3]) for way in ways))


def rows_of_vllm(
    *, modes: tuple[str | None, ...], trl: str = "", vllm: str = "vllm_"
) -> tuple[Row, ...]:
    """Return rows of vLLM on the card that trains, by the names of TRL's arguments.

    `modes`: values of its mode that mean this card. `trl`, `vllm`: what is before TRL's keys and vLLM's own.
    """
    use, mode, asleep = f"{trl}use_vllm", f"{trl}vllm_mode", f"{trl}vllm_enable_sleep_mode"
    share, parts = f"{vllm}gpu_memory_utilization", f"{vllm}tensor_parallel_size"
    weighed = f"{trl}vllm_importance_sampling_"
    corrected, way = f"{weighed}correction", f"{weighed}mode"

    def hear(said: Mapping[str, Any]) -> Any:
        if not said[use]:
            return 0.0
        for key, values, why in (
            (mode, modes, "only vLLM in the process that trains is (colocate)"),
            (parts, (1, None), "only an engine of its own on each GPU is"),
            (corrected, (True, None), "only completions that are weighed by their odds are"),
            (way, ("sequence_mask", None), "only sequence_mask is"),
        ):
            if said[key] not in values:
                raise ValueError(f"with this {key} is not predicted: {why}")
        if not said[share]:
            raise ValueError(f"needs a share of the card: {share}")
        return said[share]

    return (
        Row(
            ours=("vllm_gpu_memory_utilization",),
            keys=(use, share, mode, parts, corrected, way),
            say=lambda value: (
                {use: True, mode: "colocate", share: value, parts: 1} if value else {use: False}
            ),
            hear=hear,
        ),
        Row(
            ours=("vllm_enable_sleep_mode",),
            keys=(asleep, use),
            say=lambda value: {asleep: value},
            hear=lambda said: bool(said[use] and said[asleep]),
        ),
    )
