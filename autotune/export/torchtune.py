"""torchtune.yaml: the file for `tune run RECIPE --config torchtune.yaml`.

Keys as in torchtune 0.6.1, recipes/*_single_device.py and *_distributed.py and their configs; builders
of models and tokenizers in torchtune/models. A model that has none has no such file. Its LoRA is
counted by projections, so that families whose weights are fused in Transformers (Phi-3) are not here.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autotune.catalogue.tasks import CAUSAL
from autotune.export import dataset_entries
from autotune.export.carried import Unsaid, comments, heading, one_line, unsaid, words_of
from autotune.export.exporter import Exporter
from autotune.space.adapters import lora_alpha
from autotune.space.config import TrainConfig, Workload
from autotune.space.learning_rates import learning_rate
from autotune.space.parallelisms import PARALLELISMS
from autotune.space.precisions import PRECISIONS


@dataclass(frozen=True, kw_only=True, slots=True)
class _Family:
    """Models that torchtune builds, as torchtune_models.toml has them."""

    folder: str
    """Folder of torchtune.models."""
    model_type: str
    """Type of the model for the checkpointer."""
    tokenizer: str
    files: Mapping[str, str]
    """File in the model's folder by the argument of the tokenizer."""
    builders: Mapping[str, str]
    """Builder by the last part of a Hub id, in small letters."""


@functools.cache
def families() -> tuple[_Family, ...]:
    text = Path(__file__).with_name("torchtune_models.toml").read_text(encoding="utf-8")
    return tuple(_Family(**row) for row in tomllib.loads(text)["families"])


def _torchao(name: str) -> dict[str, object]:
    return {"_component_": f"torchao.optim.{name}", "bf16_stochastic_round": True}


OPTIMIZERS: dict[str, dict[str, object]] = {
    "adamw_torch": {"_component_": "torch.optim.AdamW"},
    "adamw_torch_fused": {"_component_": "torch.optim.AdamW", "fused": True},
    "adamw_torch_8bit": _torchao("AdamW8bit"),
    "adamw_torch_4bit": _torchao("AdamW4bit"),
    "adamw_bnb_8bit": {"_component_": "bitsandbytes.optim.AdamW8bit"},
    "adamw_8bit": {"_component_": "bitsandbytes.optim.AdamW8bit"},
    "paged_adamw_8bit": {"_component_": "bitsandbytes.optim.PagedAdamW8bit"},
    "paged_adamw_32bit": {"_component_": "bitsandbytes.optim.PagedAdamW32bit"},
    "lion_32bit": {"_component_": "bitsandbytes.optim.Lion32bit"},
    "lion_8bit": {"_component_": "bitsandbytes.optim.Lion8bit"},
    "paged_lion_32bit": {"_component_": "bitsandbytes.optim.PagedLion32bit"},
    "paged_lion_8bit": {"_component_": "bitsandbytes.optim.PagedLion8bit"},
    "sgd": {"_component_": "torch.optim.SGD"},
    "adagrad": {"_component_": "torch.optim.Adagrad"},
}
"""Class of each optimizer that Trainer takes for it too (transformers 5.23 trainer_optimizer.py)."""
_NEAREST_OPTIMIZER = "adamw_torch_fused"

ATTENTION = {
    "q_proj": "q_proj",
    "k_proj": "k_proj",
    "v_proj": "v_proj",
    "o_proj": "output_proj",
}
MLP = {"gate_proj", "up_proj", "down_proj"}

_CARRIED = (
    "method",
    "micro_batch_size",
    "gradient_accumulation_steps",
    "sequence_length",
    "activation_offloading",
    "update_in_backward",
    "lora_rank",
    "lora_alpha_ratio",
    "lora_dropout",
)


def applies(config: TrainConfig) -> bool:
    """Return whether torchtune can train the configuration: its only quantised base is torchao's NF4."""
    return config.method in ("full", "lora", "qlora") and config.quantization in (
        "none",
        "nf4",
        "nf4-double",
    )


def lacks(workload: Workload) -> str:
    if workload.task != CAUSAL:
        return "torchtune's recipes train causal language models only"
    return "" if _find(workload) else "torchtune has no builder for this model"


def write(*, workload: Workload, config: TrainConfig, result: Mapping[str, object]) -> str:
    """Return a YAML document; its comments name what is not in it, and what is the user's to fill in."""
    import yaml

    found = _find(workload)
    assert found is not None  # lacks() says so beforehand
    content = _content(*found, config, workload)
    where = "single_device" if config.num_gpus == 1 else "distributed"
    recipe = f"{'full' if config.method == 'full' else 'lora'}_finetune_{where}"
    launch = "" if config.num_gpus == 1 else f"--nproc_per_node {config.num_gpus} "
    what = f"tune run {launch}{recipe} --config"
    lost = (*cannot_express(config), *has_no_words_for(workload))
    head = heading(what, config, result["evidence"], lost)
    yours = comments(
        [
            "Yours: the folder of the model and the names of its checkpoint_files, the dataset "
            "and the number of epochs.",
            f"The folder is what `tune download {one_line(workload.model)} --output-dir ./model` makes.",
        ]
    )
    return head + yours + yaml.safe_dump(content, sort_keys=False)


def cannot_express(config: TrainConfig) -> tuple[Unsaid, ...]:
    lost = [Unsaid("trainer", "torchtune's own loop and loss, not Trainer's")]
    carried = {*_CARRIED, "trainer"}
    simple = {
        "optimizer": config.optimizer in OPTIMIZERS,
        "precision": PRECISIONS[config.precision] == PRECISIONS[_nearest_precision(config)],
        "torch_compile": config.torch_compile in ("none", "default"),
        "batching": config.batching in ("packed", "padded"),
        "lora_targets": split_targets(config.lora_targets) is not None,
        "lora_variant": config.lora_variant != "rslora",
        "activation_checkpointing": config.activation_checkpointing < 2 or _has_intervals(config),
        "parallelism": config.parallelism in ("none", "fsdp2", "fsdp2-offload"),
        "num_gpus": True,
    }
    carried |= {setting for setting, is_said in simple.items() if is_said}
    if config.quantization == "nf4":
        words = f"{words_of(config, 'quantization')} (torchao quantises its scales as well)"
        lost.append(Unsaid("quantization", words, in_part=True))
    if config.num_gpus > 1:
        words = f"{words_of(config, 'num_gpus')} (--nproc_per_node of tune run)"
        lost.append(Unsaid("num_gpus", words))
    return (*lost, *unsaid(config, {*carried, "quantization"}))


def has_no_words_for(workload: Workload) -> tuple[Unsaid, ...]:
    """Return words for TrainingArguments that the user set, which are Trainer's."""
    others = (pair for pair in workload.extra.items() if pair[0] != "learning_rate")
    extra = tuple(Unsaid(key, f"{value}") for key, value in others)
    return (*dataset_entries.unsaid_by_torchtune(workload.dataset), *extra)


def _content(
    family: _Family, builder: str, config: TrainConfig, workload: Workload
) -> dict[str, object]:
    models = "torchtune.models"
    model: dict[str, object] = {"_component_": f"{models}.{family.folder}.{builder}"}
    if config.method != "full":
        model = _adapter(family, builder, config)
    content: dict[str, object] = {
        "output_dir": "./output",
        "model": model,
        "tokenizer": {
            "_component_": f"{models}.{family.tokenizer}",
            **{argument: f"./model/{file}" for argument, file in family.files.items()},
            "max_seq_len": config.sequence_length,
        },
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": "./model",
            "checkpoint_files": ["model.safetensors"],
            "recipe_checkpoint": None,
            "output_dir": "${output_dir}",
            "model_type": family.model_type,
        },
        "resume_from_checkpoint": False,
        "dataset": {
            **dataset_entries.torchtune(workload.dataset),
            "packed": config.batching == "packed",
        },
        "seed": 42,
        "shuffle": True,
        "epochs": 1,
        "max_steps_per_epoch": None,
        "batch_size": config.micro_batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "optimizer": {
            **OPTIMIZERS.get(config.optimizer, OPTIMIZERS[_NEAREST_OPTIMIZER]),
            "lr": learning_rate(config, workload.extra),
        },
        "lr_scheduler": {
            "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "num_warmup_steps": 0,
        },
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        # torchtune refuses to clip beside optimizer_in_bwd.
        "clip_grad_norm": None if config.update_in_backward else 1.0,
        "compile": config.torch_compile != "none",
        "device": "cuda",
        "dtype": "bf16" if _nearest_precision(config) == "bf16-true" else "fp32",
        "enable_activation_checkpointing": config.activation_checkpointing > 0
        and not _has_intervals(config),
        "enable_activation_offloading": config.activation_offloading,
        "metric_logger": {
            "_component_": "torchtune.training.metric_logging.DiskLogger",
            "log_dir": "${output_dir}/logs",
        },
        "log_every_n_steps": 1,
        "log_peak_memory_stats": True,
    }
    if config.method == "full":
        content["optimizer_in_bwd"] = config.update_in_backward
    else:
        content["save_adapter_weights_only"] = True
    if config.num_gpus > 1:
        content["fsdp_cpu_offload"] = PARALLELISMS[config.parallelism].offload
        if _has_intervals(config):
            content["ac_mode"] = "selective"
            content["ac_option"] = config.activation_checkpointing
    return content


def _adapter(family: _Family, builder: str, config: TrainConfig) -> dict[str, object]:
    attention, has_mlp = split_targets(config.lora_targets) or (list(ATTENTION.values()), True)
    assert config.lora_rank is not None
    return {
        "_component_": f"torchtune.models.{family.folder}.lora_{builder}",
        "lora_attn_modules": attention,
        "apply_lora_to_mlp": has_mlp,
        "lora_rank": config.lora_rank,
        "lora_alpha": float(lora_alpha(config.lora_alpha_ratio, config.lora_rank)),
        "lora_dropout": config.lora_dropout,
        "use_dora": config.lora_variant == "dora",
        "quantize_base": config.quantization != "none",
    }


def split_targets(targets: str | None) -> tuple[list[str], bool] | None:
    """Return (attention's projections, whether the MLP has adapters); None for what it cannot say."""
    if targets in (None, "all-linear"):
        return list(ATTENTION.values()), True
    if targets == "attention":
        return list(ATTENTION.values()), False
    names = set(targets.split(","))
    has_mlp = names >= MLP
    if (has_mlp and names - MLP <= set(ATTENTION)) or names <= set(ATTENTION):
        return [theirs for ours, theirs in ATTENTION.items() if ours in names], has_mlp
    return None


def _nearest_precision(config: TrainConfig) -> str:
    return "bf16-true" if PRECISIONS[config.precision].compute_dtype != "float32" else "fp32"


def _has_intervals(config: TrainConfig) -> bool:
    """Return whether ac_mode is read: only full_finetune_distributed.py reads it, in place of its switch."""
    is_full = config.num_gpus > 1 and config.method == "full"
    return is_full and config.activation_checkpointing > 1 and not config.activation_offloading


def _find(workload: Workload) -> tuple[_Family, str] | None:
    last = workload.model.rpartition("/")[2].casefold()
    found = ((each, each.builders[last]) for each in families() if last in each.builders)
    return next(found, None)


EXPORTER = Exporter(
    name="torchtune",
    filename="torchtune.yaml",
    write=write,
    applies=applies,
    lacks=lacks,
    cannot_express=cannot_express,
    has_no_words_for=has_no_words_for,
)
