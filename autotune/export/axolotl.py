"""axolotl.yaml: the settings in axolotl's words, and axolotl's words back.

Keys, values and defaults are those of axolotl 0.19.0, utils/schemas/config.py, model.py, peft.py and
training.py; what they do is in its loaders/model.py, loaders/adapter.py, core/builders/ and
utils/config/__init__.py (resolve_dtype). tests/contracts/test_axolotl.py asks its own schema.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

from autotune.catalogue.checkpoint import NOT_MODELLED
from autotune.export import dataset_entries
from autotune.export.mapping import (
    Row,
    Spelling,
    TrainerFile,
    choices,
    module_names,
    of_key,
    of_values,
    said_only,
    table,
    targets_of,
    value_at,
)
from autotune.export.text import exporter_of
from autotune.export.trainer_rows import (
    ALL_LOGITS,
    AS_DPO,
    COMPILE_BACKEND,
    FP8_IS_OURS,
    FSDP2_BY_ACCELERATE,
    LORA,
    NO_SYNC,
    NOT_FROM_FILES,
    NOT_PREDICTED,
    PARALLELISM,
    attention,
    fixed_of,
    lora_rows,
    method_row,
    rows_of_vllm,
    targets_row,
    without_fixed,
)
from autotune.space.config import COMPILE_MODES, LOADER_SETTINGS
from autotune.space.lengths import BY_TOKENS
from autotune.space.optimizers import OPTIMIZERS
from autotune.space.parallelisms import PARALLELISMS
from autotune.space.trainers import BY_TASK
from autotune.space.values import positive

_DOUBLE = "bnb_config_kwargs.bnb_4bit_use_double_quant"
_CODES = "bnb_config_kwargs.bnb_4bit_quant_type"
_STORAGE = "bnb_config_kwargs.bnb_4bit_quant_storage"
_LIGER_PLUGIN = {"plugins": "axolotl.integrations.liger.LigerPlugin"}
_LIGER = (
    "liger_fused_linear_cross_entropy",
    "liger_rope",
    "liger_rms_norm",
    "liger_glu_activation",
)


def _base(adapter: str | None, bits: int | None = None) -> dict[str, Any]:
    return {"adapter": adapter, "load_in_8bit": bits == 8, "load_in_4bit": bits == 4}


def _say_targets(targets: str) -> dict[str, Any]:
    is_all = targets == "all-linear"
    return {
        "lora_target_linear": is_all,
        "lora_target_modules": None if is_all else module_names(targets),
    }


def _hear_targets(said: Mapping[str, Any]) -> str:
    """Read the targets: `lora_target_linear` adds the linear modules to those that are named."""
    if said["lora_target_linear"]:
        return "all-linear"
    if said["lora_target_modules"] is None:
        raise ValueError("is off: name lora_target_modules, or switch it on")
    return targets_of(said["lora_target_modules"])


def _hear_steps(said: Mapping[str, Any]) -> Any:
    """Read the accumulation, which a file may say by the samples of all its micro-batches on one GPU."""
    steps, samples, micro = said.values()
    return positive(samples) // positive(micro) if samples else steps


_OF_OPTIMIZERS = {
    "optim_args": ("optim_args", "bf16_stochastic_round=True"),
    "optim_target_modules": ("optim_target_modules", "all_linear"),
    "lr_scheduler_type": ("lr_scheduler", "constant"),
}
"""Pairs (axolotl's key, its value) by the TrainingArguments that belong to an optimizer."""


def _say_optimizer(optimizer: str) -> dict[str, Any]:
    arguments = (name for name, _ in OPTIMIZERS[optimizer].arguments)
    added = dict(_OF_OPTIMIZERS[argument] for argument in arguments)
    return {"optimizer": optimizer, "optim_args": None, "optim_target_modules": None, **added}


TARGET = TrainerFile(
    name="axolotl",
    source="axolotl 0.19.0",
    model_key="base_model",
    launch="axolotl train {file}",
    auto_bf16="bf16",
    rows=(
        # Where no storage is named axolotl takes bfloat16, float32 for some models: the bytes of uint8.
        method_row(
            _base(None),
            _base("lora"),
            _base("lora", 8),
            _base("qlora", 4),
            {"double": _DOUBLE, "codes": _CODES, "storage": _STORAGE},
        ),
        *lora_rows(
            targets_row(
                ("lora_target_linear", "lora_target_modules"),
                _say_targets,
                _hear_targets,
                unheard=("lora_target_modules",),
            ),
            rank="lora_r",
            variant="peft_use_dora peft_use_rslora",
        ),
        of_key("sequence_length", "sequence_len"),
        of_key("micro_batch_size"),
        Row(
            ours=("gradient_accumulation_steps",),
            keys=("gradient_accumulation_steps", "batch_size", "micro_batch_size"),
            also=("micro_batch_size",),
            say=lambda steps, _: {"gradient_accumulation_steps": steps, "batch_size": None},
            hear=_hear_steps,
            unheard=("micro_batch_size",),
        ),
        Row(
            ours=("optimizer",),
            keys=("optimizer", "optim_args", "optim_target_modules", "lr_scheduler"),
            say=_say_optimizer,
            hear=lambda said: said["optimizer"],
            unheard=("optim_args", "optim_target_modules", "lr_scheduler"),
        ),
        # With bf16 or fp16 the weights are loaded in 16 bits, whatever trains; else in float32.
        # "auto" is for bf16 what the card has, and off beside fp16.
        table(
            "precision",
            "bf16 fp16 tf32",
            ("bf16-autocast", True, False),
            ("bf16-autocast", "auto", False),
            ("fp16-autocast", False, True),
            ("fp16-autocast", "auto", True),
            ("tf32", False, False, True),
            ("tf32", False, False, "auto"),
            ("fp32", False, False, False),
            nearest={("fp16-mixed",): ("fp16-autocast",), (): ("bf16-autocast",)},
        ),
        table(
            "activation_checkpointing activation_offloading",
            "gradient_checkpointing activation_offloading",
            (0, False, False, False),
            (1, False, True, False),
            (1, True, True, "hidden_states"),
            beside={"gradient_checkpointing_kwargs.use_reentrant": False},
            nearest={(): (1, False)},
        ),
        attention(),
        table(
            "batching",
            "sample_packing group_by_length batch_flattening",
            ("packed", True, False),
            ("grouped", False, True, False),
            ("padded", False, False, False),
            ("padding-free", False, False, True),
            ("padded", False, False, "auto"),  # on with FlashAttention and more than one sample
            nearest={(BY_TOKENS,): ("padded",)},
        ),
        choices(
            ("liger",),
            Spelling(ours=(False,), theirs=dict.fromkeys(_LIGER, False)),
            Spelling(ours=(True,), theirs=dict.fromkeys(_LIGER, True), within=_LIGER_PLUGIN),
            # Its loss without logits is what most of its memory is about.
            Spelling(ours=(False,), theirs={_LIGER[0]: False}),
            Spelling(ours=(True,), theirs={_LIGER[0]: True}, within=_LIGER_PLUGIN),
            Spelling(ours=(False,), theirs={}),  # without the plugin the keys say nothing
        ),
        of_key("torch_empty_cache_steps"),
        of_key("neftune_noise_alpha"),
        table(
            "torch_compile",
            "torch_compile torch_compile_mode",
            ("none", False),
            *(
                (mode, switch, mode)
                for mode in COMPILE_MODES
                if mode != "max-autotune-no-cudagraphs"
                for switch in (True, "auto")
            ),
        ),
        COMPILE_BACKEND,
        *said_only(*LOADER_SETTINGS),
        PARALLELISM,
    ),
    defaults={
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "sequence_len": 512,
        "optimizer": "adamw_torch_fused",
        "bf16": "auto",
        "tf32": "auto",
        "attn_implementation": "sdpa",  # none is named to Transformers, which takes it
        "torch_compile_mode": "default",
        "dataloader_pin_memory": True,
        "gradient_checkpointing_kwargs.use_reentrant": True,
        _DOUBLE: True,
        _CODES: "nf4",
    },
    # Segments grow unless the environment says otherwise (utils/__init__.py, set_pytorch_cuda_alloc_conf).
    fixed={"trainer": "transformers", "expandable_segments": True},
    renamed={
        "liger_swiglu": "liger_glu_activation",
        "noisy_embedding_alpha": "neftune_noise_alpha",
    },
    flags={
        "bfloat16": ("bf16", True),
        "eager_attention": ("attn_implementation", "eager"),
        "sdp_attention": ("attn_implementation", "sdpa"),
        "flash_attention": ("attn_implementation", "flash_attention_2"),
        "flex_attention": ("attn_implementation", "flex_attention"),
    },
    of_adapters=(
        "lora_r", "lora_alpha", "lora_dropout", "lora_target_linear", "lora_target_modules",
        "lora_fan_in_fan_out", "lora_modules_to_save", "lora_mlp_kernel", "lora_qkv_kernel",
        "lora_o_kernel", "lora_embedding_kernel", "peft_use_dora", "peft_use_rslora",
        "bnb_config_kwargs",
    ),
    refused={
        "rl": "trains with another loss: dpo, ipo, kto and grpo are predicted",
        "reward_model": "trains another kind of model",
        "process_reward_model": "trains another kind of model",
        "relora": "restarts the adapter",
        "lisa_n_layers": "trains a part of the layers at a time",
        "expert_parallel_size": NOT_PREDICTED,
        "sequence_parallel_degree": NOT_PREDICTED,
        "fp8": FP8_IS_OURS,
        "gptq": NOT_MODELLED,
        "qat": "adds quantisation to the step",
        "unfrozen_parameters": "trains a part of the weights",
        "layer_offloading": "moves weights from and to host memory",
        "fsdp": NOT_FROM_FILES,
        "fsdp_config": NOT_FROM_FILES,
        "deepspeed": f"{NOT_FROM_FILES}, or that file as --base",
        "tensor_parallel_size": NOT_PREDICTED,
        "context_parallel_size": NOT_PREDICTED,
        "float16": "loads float16 weights without autocast",
    },
    unpredicted={
        "lora_modules_to_save": "trains further modules in full",
        "lora_target_parameters": "adds adapters",
        "peft_trainable_token_indices": "trains tokens beside the adapter",
        "cut_cross_entropy": "makes the loss without logits, with kernels of its own",
        "chunked_cross_entropy": "makes the loss in pieces",
        "flash_attn_cross_entropy": "is another kernel for the loss",
        "quantize_moe_experts": "quantises experts, too",
        "flash_attn_fuse_mlp": "is another kernel",
        "flash_attn_rms_norm": "is another kernel",
        "fused_attn_kernel": "is another kernel",
        "tiled_mlp": "computes the MLP in pieces",
        "selective_checkpointing": "keeps attention's outputs",
    },
    has_own_names=True,
    arguments={
        name: {"lr_scheduler": "lr_scheduler_type", "num_epochs": "num_train_epochs"}.get(name, name)
        for name in (
            "adam_beta1", "adam_beta2", "adam_epsilon", *LOADER_SETTINGS, "learning_rate",
            "logging_steps", "lr_scheduler", "max_grad_norm", "max_steps", "num_epochs", "output_dir",
            "save_only_model", "save_steps", "save_strategy", "save_total_limit", "seed",
            "warmup_ratio", "warmup_steps", "weight_decay",
        )
    },
    caveats=(
        (
            lambda config: config.method == "full" and config.attention in ("eager", "sdpa"),
            "axolotl keeps embeddings, head and norms in float32 with this attention "
            "(loaders/model.py): more memory than predicted",
        ),
        (
            lambda config: config.method in LORA and config.quantization != "int8",
            "axolotl switches its fused LoRA kernels on (lora_mlp_kernel and others), which are not "
            "predicted: they take less memory",
        ),
    ),
)  # fmt: skip

_YOURS = {
    "datasets": [{"path": "data.jsonl", "ds_type": "json", "type": "completion"}],
    "num_epochs": 3,
    "output_dir": "./output",
}
"""Values for the user to fill in, where no base has said them."""


def _of_task(task: str, key: str, *rows: Row, **more: Any) -> TrainerFile:
    """Return the table of a task that has a trainer of its own, which a file says by this key."""
    trainer = BY_TASK[task]
    return dataclasses.replace(
        TARGET,
        name=f"axolotl's {key}",
        rows=(*without_fixed(TARGET.rows, fixed_of(trainer)), *rows),
        fixed={**TARGET.fixed, "trainer": trainer.name, **fixed_of(trainer)},
        refused={
            **{name: why for name, why in TARGET.refused.items() if name != key},
            **more.pop("refused", {}),
        },
        **more,
    )


REWARD = _of_task(
    "reward",
    "reward_model",
    # It pads to the whole length where it is not told otherwise.
    table("", "reward_model pad_to_sequence_len", (True, False), (True, True)),
    defaults={**TARGET.defaults, "pad_to_sequence_len": True},
    unpredicted={
        **TARGET.unpredicted,
        "pad_to_sequence_len": "pads every answer to the whole length",
    },
)
"""A reward model. axolotl runs the RewardTrainer of TRL 1.9, whose loss is that of 1.16."""

_OTHER_LOSSES = {
    "dpo_use_weighting": "weighs pairs, which is not predicted",
    "dpo_padding_free": "puts pairs into one row",
    "dpo_use_liger_kernel": "makes the loss with Liger's kernels",
    "rl_adapter_ref_model": "has an adapter as its reference",
}
_OF_COMPLETIONS = ("num_generations", "max_completion_length", "num_iterations")
_SCORED_BEFORE = of_values(
    "precompute_ref_log_probs", "precompute_ref_log_probs", {False: False, True: True}
)


def _of_pairs(*losses: tuple[Any, ...], **more: Any) -> TrainerFile:
    return _of_task(
        "dpo",
        "rl",
        table("", "rl dpo_loss_type", *losses),
        _SCORED_BEFORE,
        refused=_OTHER_LOSSES,
        caveats=(ALL_LOGITS, *TARGET.caveats),
        **more,
    )


DPO = _of_pairs(("dpo", None), ("dpo", ["sigmoid"]))
"""Pairs of answers. axolotl runs the DPOTrainer of TRL 1.9."""
IPO = _of_pairs(("ipo", None), noted={"rl": AS_DPO})
"""Pairs of answers with another loss, which differs by a number a pair (core/trainers/dpo/__init__.py)."""
KTO = _of_task(
    "kto",
    "rl",
    # Its schema refuses KTO without.
    table("", "rl remove_unused_columns", ("kto", False)),
    _SCORED_BEFORE,
    defaults={**TARGET.defaults, "remove_unused_columns": True},
    refused=_OTHER_LOSSES,
    caveats=(ALL_LOGITS, *TARGET.caveats),
)
"""Labelled answers. axolotl runs the KTOTrainer of TRL 1.9."""
_ANOTHER_WAY = "writes completions in another way than the one that is predicted"
GRPO = _of_task(
    "grpo",
    "rl",
    table("", "rl", ("grpo",), beside={"trl.reward_funcs": ["rewards.reward"]}),
    *(of_key(name, f"trl.{name}") for name in _OF_COMPLETIONS),
    of_key("kl_beta", "trl.beta", off=0.0),
    rows_of_vllm(modes=("colocate",), trl="trl.", vllm="vllm.")[0],
    defaults={
        **TARGET.defaults,
        "trl.num_generations": 8,
        "trl.num_iterations": 1,
        "trl.beta": 0.0,
        "trl.use_vllm": False,
        "vllm.gpu_memory_utilization": 0.9,
    },
    refused={
        "trl.vllm_enable_sleep_mode": "does not go with segments that grow, which axolotl sets",
        "trl.vllm_lora_sync": _ANOTHER_WAY,
        "trl.vllm_sync_interval": _ANOTHER_WAY,
        "rl_beta": "is not read: say trl.beta",
        "trl.generation_batch_size": "is not read: leave it out, and a step's completions are written at a "
        "time",
        "trl.rollout_func": _ANOTHER_WAY,
        "trl.use_data_producer": _ANOTHER_WAY,
        "trl.async_prefetch": _ANOTHER_WAY,
        "trl.sync_ref_model": "changes the reference, which is not predicted",
        "trl.use_liger_loss": "makes the loss with Liger's kernels",
        "batch_flattening": "puts completions into one row",
    },
    caveats=(
        ALL_LOGITS,
        (
            lambda _: True,
            "trl.reward_funcs names your own functions, here reward of rewards.py beside this file",
        ),
        (
            lambda config: config.writes_with_vllm,
            "axolotl tells vLLM no length: its share of the card has to hold the cache of one sequence as "
            "long as the model reads, or vLLM does not start",
        ),
        *TARGET.caveats,
    ),
)
"""Completions that are rewarded. axolotl runs the GRPOTrainer of TRL 1.9.

Prompts are not cut off: sequence_len keeps the length that was planned.
"""
_BY_RL = {"dpo": DPO, "kto": KTO, "grpo": GRPO}
_PADS = {"pad_to_sequence_len": "pads every sample to the whole length"}
_UNPACKED = dataclasses.replace(TARGET, unpredicted={**TARGET.unpredicted, **_PADS})
_NO_REFERENCE = (
    "trains with a loss that has no reference: the nearest that is predicted is dpo with "
    "precompute_ref_log_probs, whose steps have none either"
)
_OFFLOADS = (
    "parks what every layer keeps by TRL's own offloading, which is not predicted: the nearest that is "
    "predicted is gradient_checkpointing: true with activation_offloading: hidden_states"
)
_REFUSED_VALUES = {
    "rl": {"orpo": _NO_REFERENCE, "simpo": _NO_REFERENCE},
    "gradient_checkpointing": {"offload": _OFFLOADS, "offload_disk": _OFFLOADS},
}
"""Values of keys that are not predicted, and what comes nearest."""


_OF_FSDP = ("fsdp", "fsdp_version", "fsdp_config")


def _shared_by_fsdp2(target: TrainerFile, content: Mapping[str, Any]) -> TrainerFile:
    """Return the table with FSDP2 as the file has it; as it is where that is not predicted, or not there.

    Its keys go with FSDP2; older files have them with fsdp_ before.
    """
    config = content.get("fsdp_config")
    if not isinstance(config, Mapping):
        return target
    keys = {str(key).removeprefix("fsdp_"): f"fsdp_config.{key}" for key in config}
    said = {name: value_at(content, key) for name, key in keys.items()}
    wraps = said.get("auto_wrap_policy") or "TRANSFORMER_BASED_WRAP"
    is_second = 2 in (content.get("fsdp_version"), said.get("version"))
    if not is_second or wraps != "TRANSFORMER_BASED_WRAP":
        return target
    offload = keys.get("offload_params", "fsdp_config.offload_params")
    reshard = keys.get("reshard_after_forward", "fsdp_config.reshard_after_forward")
    within = [
        Spelling(
            ours=(name,),
            theirs={
                "deepspeed": None,
                offload: PARALLELISMS[name].offload,
                reshard: not PARALLELISMS[name].keeps_gathered,
            },
        )
        for name in FSDP2_BY_ACCELERATE
    ]
    gone = {key: None for key in _OF_FSDP if content.get(key)}
    without = [
        dataclasses.replace(each, theirs={**each.theirs, **gone}) for each in PARALLELISM.choices
    ]
    rows = [row for row in target.rows if row is not PARALLELISM]
    shared = choices(PARALLELISM.ours, *within, *without, nearest=PARALLELISM.nearest)
    if said.get("activation_checkpointing"):
        checkpointing = next(row for row in rows if row.ours[0] == "activation_checkpointing")
        rows.remove(checkpointing)
        shared = _together(within, without, checkpointing, keys["activation_checkpointing"])
    return dataclasses.replace(
        target,
        rows=(*rows, shared, NO_SYNC),
        defaults={**target.defaults, reshard: True},
        refused={key: why for key, why in target.refused.items() if key not in _OF_FSDP},
    )


def _together(within: list[Spelling], without: list[Spelling], checkpointing: Row, own: str) -> Row:
    """Return the row of both, where FSDP2 checkpoints every layer itself: the key `own`."""
    off = dict.fromkeys(checkpointing.keys, False)
    every = Spelling(ours=(1, False), theirs={own: True, **off})
    others = [
        dataclasses.replace(how, theirs={own: False, **how.theirs}) for how in checkpointing.choices
    ]
    pairs = [
        *itertools.product(within, (every, *others)),
        *itertools.product(without, checkpointing.choices),
    ]
    return choices(
        (*PARALLELISM.ours, *checkpointing.ours),
        *(
            dataclasses.replace(
                how, ours=(*way.ours, *how.ours), theirs={**way.theirs, **how.theirs}
            )
            for way, how in pairs
        ),
        nearest={(): ("ddp", 1, False)},
    )


_BESIDE_MODEL = {
    *(key.partition(".")[0] for row in TARGET.rows for key in row.keys),
    *TARGET.refused,
    *TARGET.unpredicted,
    *(
        "datasets",
        "learning_rate",
        "model_type",
        "num_epochs",
        "plugins",
        "pretraining_dataset",
        "rl",
    ),
}
"""Keys of axolotl's files: one of them stands beside the model."""


def is_axolotl(content: Mapping[str, Any]) -> bool:
    """Return whether it is a file of axolotl's: other programs have a `base_model`, too."""
    return "base_model" in content and not _BESIDE_MODEL.isdisjoint(content)


def fitted(content: Mapping[str, Any], method: str) -> TrainerFile:  # noqa: ARG001
    """Return the table for what a file trains."""
    loss = "reward" if content.get("reward_model") else str(content.get("rl"))
    usual = TARGET if content.get("sample_packing") else _UNPACKED
    target = {**_BY_RL, "ipo": IPO, "reward": REWARD}.get(loss, usual)
    target = _shared_by_fsdp2(target, content)
    refused = {
        key: whys[said]
        for key, whys in _REFUSED_VALUES.items()
        if (said := str(content.get(key))) in whys
    }
    return dataclasses.replace(target, refused={**target.refused, **refused}) if refused else target


def _data_of(task: str) -> Mapping[str, Any]:
    entry = {"path": "data.jsonl", "ds_type": "json", "type": dataset_entries.AXOLOTL_TYPES[task]}
    return {**_YOURS, "datasets": [entry]}


EXPORTER = exporter_of(
    TARGET,
    filename="axolotl.yaml",
    yours=_YOURS,
    data=dataset_entries.axolotl,
    data_lines=dataset_entries.axolotl_lines,
    of_tasks={task: (file, _data_of(task)) for task, file in {"reward": REWARD, **_BY_RL}.items()},
)
