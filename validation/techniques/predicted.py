"""What each technique saves and costs, predicted: one setting changed at a time from a plain base.

Every value of every knob (autotune/space/knobs.py) and every method. Full fine-tuning is the base of what
full fine-tuning has; the settings of adapters start from LoRA, those of quantised bases from QLoRA.
Nothing here is measured.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from typing import Any

from autotune import __version__
from autotune.catalogue.gpus import Gpu, find_gpu
from autotune.catalogue.models import ModelSource, resolve
from autotune.common.units import GIB
from autotune.predict.estimator import Estimator
from autotune.predict.tracing import trace_all
from autotune.records.estimate import Estimate, TraceSpec
from autotune.records.question import SEQUENCE_LENGTH
from autotune.space.config import METHODS, TrainConfig, Workload
from autotune.space.defaults import default_base
from autotune.space.knobs import KNOBS, METHOD_WORDS, Knob
from autotune.space.optimizers import OPTIMIZERS
from autotune.space.rules import Context, broken_rules
from autotune.space.tradeoffs import tradeoff_class
from autotune.space.words import describe

MICRO_BATCH = 4
EFFECTIVE_BATCH = 16
SAMPLES = {
    "activation_checkpointing": (1, 2),
    "neftune_noise_alpha": (5.0,),
    "lora_dropout": (0.05,),
    "torch_empty_cache_steps": (1,),
    "lora_rank": (8, 64),
    "micro_batch_size": (1, 8),
    "batching": ("padded",),
}
"""Values of the knobs that are numbers, and what needs no FlashAttention."""
NOT_COMPARED = ("peft", "parallelism", "lora_alpha_ratio")
"""These need a file, several GPUs; or cost nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    words: str
    base: Estimate
    changed: Estimate


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="Qwen/Qwen2.5-1.5B")
    parser.add_argument("--gpu", default="a100-40gb")


def main(options: argparse.Namespace) -> None:
    model, card = resolve(options.model), find_gpu(options.gpu)
    bases = {method: base_of(method, model, card) for method in METHODS}
    changes = list(changes_of(bases, card))
    specs = {TraceSpec.of(config) for pair in changes for config in pair[1:]}
    sequence_length = bases["full"].sequence_length
    traces = trace_all(model, model.task, sequence_length, card, specs)
    estimator = Estimator(traces, card, memory_budget_bytes=card.capacity_bytes)
    print(heading(model, card, bases["full"], estimator))
    for words, base, changed in changes:
        if not estimator.supports(changed):
            print(f"| {words} | not for this model | | |")
            continue
        print(
            line(
                Row(words=words, base=estimator.estimate(base), changed=estimator.estimate(changed))
            )
        )


def base_of(
    method: str, model: ModelSource, card: Gpu, sequence_length: int = SEQUENCE_LENGTH
) -> TrainConfig:
    workload = Workload(
        model=model.name,
        sequence_length=sequence_length,
        effective_batch_size=EFFECTIVE_BATCH,
        methods=(method,),
        memory_budget_bytes=card.capacity_bytes,
    )
    return dataclasses.replace(
        default_base(workload, card, model),
        micro_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=EFFECTIVE_BATCH // MICRO_BATCH,
    )


def changes_of(
    bases: dict[str, TrainConfig], card: Gpu
) -> Iterator[tuple[str, TrainConfig, TrainConfig]]:
    """(words, base, the same with one setting changed)."""
    for method, base in bases.items():
        if method not in ("full", "peft"):
            yield METHOD_WORDS[method], bases["full"], base
    for knob in KNOBS.values():
        if knob.name in NOT_COMPARED:
            continue
        plain = bases["qlora" if knob.name == "quantization" else knob.methods[0]]
        for value in SAMPLES.get(knob.name, knob.choices):
            base = plain
            if knob.name == "update_in_backward" or (
                knob.name == "optimizer" and OPTIMIZERS[str(value)].updates
            ):
                # Weights are updated in the backward pass, so that there is nothing to accumulate.
                base = dataclasses.replace(plain, gradient_accumulation_steps=1)
            if value == getattr(base, knob.name) or value in knob.unpredicted:
                continue
            changed = changed_to(base, knob, value)
            context = Context(
                effective_batch_size=base.effective_batch_size,
                compute_capability=card.compute_capability,
            )
            if not broken_rules(changed, context):
                yield knob.words(value), base, changed


def changed_to(base: TrainConfig, knob: Knob, value: object) -> TrainConfig:
    change: dict[str, Any] = {knob.name: value}
    changed = dataclasses.replace(base, **change)
    if knob.name == "activation_offloading":  # of what checkpointing keeps
        changed = dataclasses.replace(changed, activation_checkpointing=1)
    accumulation = base.effective_batch_size // changed.micro_batch_size
    return dataclasses.replace(changed, gradient_accumulation_steps=accumulation)


def heading(model: ModelSource, card: Gpu, base: TrainConfig, estimator: Estimator) -> str:
    plain = estimator.estimate(base)
    assert plain.tokens_per_second is not None
    return f"""# What each technique saves and costs

**Predicted, not measured**, by autotune {__version__}:

    python -m validation.techniques predicted --model {model.name} --gpu {card.slug}

{model.short_name} on an {card.name}, {base.sequence_length} tokens, effective batch {EFFECTIVE_BATCH}.
The base, {describe(base)}, takes {plain.peak_device_bytes / GIB:.1f} GiB
at {plain.tokens_per_second:,.0f} tokens/s. One setting is changed at a time; what only adapters or
quantised bases have is compared with LoRA and QLoRA. Memory that is saved is worth more than its own
row says where it lets another setting go: that is what `autotune find` is for. Padded batches cost
their mask here; how much of them is padding depends on the dataset.

| technique | memory | speed | class |
|---|---:|---:|---|"""


def line(row: Row) -> str:
    saved = (row.changed.peak_device_bytes - row.base.peak_device_bytes) / GIB
    assert row.changed.tokens_per_second is not None
    assert row.base.tokens_per_second is not None
    speed = row.changed.tokens_per_second / row.base.tokens_per_second - 1
    tradeoff = tradeoff_class(row.changed.config, row.base.config)
    return f"| {row.words} | {saved:+.1f} GiB | {100 * speed:+.0f} % | {tradeoff} |"
