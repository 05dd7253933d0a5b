"""Configurations in words: whole, by how they differ, and as options of `autotune estimate`."""

from __future__ import annotations

import dataclasses

from autotune.space.adapters import peft_words
from autotune.space.checkpoint_plans import plan_words
from autotune.space.config import TrainConfig
from autotune.space.knobs import CHECKPOINTING, KNOBS, METHOD_WORDS

_PLAIN = {field.name: field.default for field in dataclasses.fields(TrainConfig)}


def describe(config: TrainConfig) -> str:
    """Return one line for people: what every configuration has, and what differs from plain."""
    return ", ".join(description(config))


def description(config: TrainConfig) -> list[str]:
    """The parts of `describe`, a setting or several that belong together each."""
    method = METHOD_WORDS[config.method]
    if config.method == "full":
        method += " fine-tune"
    if config.lora_rank is not None:
        method += f" r={config.lora_rank}"
    if config.lora_targets is not None:
        method += f" on {config.lora_targets}"
    if config.peft is not None:
        method += f" {peft_words(config.peft)}"
    said = {
        "lora_rank": "",
        "lora_targets": "",
        "peft": "",
        "quantization": "" if config.quantization == "none" else config.quantization,
        "precision": config.precision,
        "optimizer": config.optimizer,
        "micro_batch_size": (
            f"micro-batch {config.micro_batch_size} x {config.gradient_accumulation_steps}"
        ),
        "attention": "",
        "parallelism": ""
        if config.parallelism == "none"
        else f"{config.parallelism} on {config.num_gpus} {'GPU' if config.num_gpus == 1 else 'GPUs'}",
    }
    if config.has_plan:
        said |= {**dict.fromkeys(CHECKPOINTING, ""), CHECKPOINTING[0]: words_of_plan(config)}
    others = [
        knob.words(value)
        for name, knob in KNOBS.items()
        if name not in said
        and has_meaning(name, config)
        and (value := getattr(config, name)) != _PLAIN[name]
    ]
    return [method, *filter(None, said.values()), *others, config.attention]


def has_meaning(name: str, config: TrainConfig) -> bool:
    """Return whether a setting tells anything of a configuration: pictures are not batched by length."""
    if name == "no_sync":
        return config.accumulates_shards
    return name != "batching" or config.sequence_length > 1


def words_of_plan(config: TrainConfig) -> str:
    """Return how a configuration checkpoints, by a plan or without, in words."""
    if not config.has_plan:
        return KNOBS["activation_checkpointing"].words(config.activation_checkpointing)
    return plan_words(config.checkpoint_plan, config.checkpoint_layers)


def difference(config: TrainConfig, other: TrainConfig) -> str:
    """Return words for the settings of `config` that `other` does not have."""
    words = []
    if config.method != other.method:
        return describe(config)
    if config.micro_batch_size != other.micro_batch_size:
        words.append(
            f"micro-batch {config.micro_batch_size} x {config.gradient_accumulation_steps}"
        )
    said = {"micro_batch_size"}
    if config.has_plan or other.has_plan:
        said.update(CHECKPOINTING)
        if any(getattr(config, name) != getattr(other, name) for name in CHECKPOINTING):
            words.append(words_of_plan(config))
    words += [
        f"no {knob.flag}" if (value := getattr(config, name)) is None else knob.words(value)
        for name, knob in KNOBS.items()
        if name not in said
        and has_meaning(name, config)
        and getattr(config, name) != getattr(other, name)
    ]
    return ", ".join(words) or "the same settings"


def as_options(config: TrainConfig) -> list[str]:
    """Options of `autotune estimate` for these settings, plain ones left out."""
    options: list[str] = []
    for name, knob in KNOBS.items():
        value = getattr(config, name)
        if value is True:
            options.append(knob.flag)
        elif value != _PLAIN[name]:
            options += [knob.flag, knob.typed(value)]
    return options
