"""What may vary (SearchSpace), which points of it are valid (RULES), and what each one gives up.

A space comes from a YAML file (autotune.space_file). Every combination of its values is a point;
gradient accumulation follows from the effective batch size of the workload.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.config import PRECISIONS, TRADEOFF_CLASSES, TrainConfig, Workload
from autotune.knobs import KNOBS
from autotune.optimizers import OPTIMIZERS

_ADAPTERS = ("lora", "qlora")
# CUDA C++ Programming Guide, arithmetic instructions: the first with bfloat16 and TF32 units.
_AMPERE = (8, 0)
_FLASH = ("flash_attention_2", "flash_attention_3")


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodSpace:
    """What may vary under one training method."""

    method: str
    domains: Mapping[str, tuple[Any, ...]]
    """By name of the knob; what is not in it keeps TrainConfig's default."""

    @property
    def num_points(self) -> int:
        return math.prod(map(len, self.domains.values()))


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchSpace:
    """What may vary."""

    name: str
    description: str
    methods: tuple[MethodSpace, ...]


def with_attentions(space: SearchSpace, attentions: tuple[str, ...]) -> SearchSpace:
    """The space for a model that has only these; theirs where it would have none left."""
    sections = []
    for section in space.methods:
        left = tuple(name for name in section.domains.get("attention", ()) if name in attentions)
        domains = {**section.domains, "attention": left or attentions}
        sections.append(dataclasses.replace(section, domains=domains))
    return dataclasses.replace(space, methods=tuple(sections))


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """What a rule may ask beyond the TrainConfig. None: not known, the rule lets pass."""

    effective_batch_size: int
    num_layers: int | None = None
    compute_capability: tuple[int, int] | None = None
    precisions: tuple[str, ...] = ()
    """What the space offers to this method."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A combination that is never tried, and why."""

    name: str
    reason: str
    breaks: Callable[[TrainConfig, Context], bool]


def _lacks_ampere(context: Context) -> bool:
    capability = context.compute_capability
    return capability is not None and capability < _AMPERE


RULES: tuple[Rule, ...] = (
    Rule(
        name="micro-batch-divides",
        reason="micro-batch x accumulation must equal the effective batch size",
        breaks=lambda c, context: c.effective_batch_size != context.effective_batch_size,
    ),
    Rule(
        name="adapter-needs-rank",
        reason="an adapter has a rank and target modules",
        breaks=lambda c, _: c.method in _ADAPTERS and not (c.lora_rank and c.lora_targets),
    ),
    Rule(
        name="full-has-no-adapter",
        reason="full fine-tuning trains the weights themselves: rank and targets have no meaning",
        breaks=lambda c, _: c.method == "full" and bool(c.lora_rank or c.lora_targets),
    ),
    Rule(
        name="quantization-needs-qlora",
        reason="quantised weights cannot be trained: they need an adapter, which is method qlora",
        breaks=lambda c, _: c.method != "qlora" and c.quantization != "none",
    ),
    Rule(
        name="qlora-needs-quantization",
        reason="qlora without quantised weights is lora",
        breaks=lambda c, _: c.method == "qlora" and c.quantization == "none",
    ),
    Rule(
        name="offloading-needs-checkpointing",
        reason="what is parked in host memory is the input of a checkpointed layer",
        breaks=lambda c, _: c.activation_offloading and not c.activation_checkpointing,
    ),
    Rule(
        name="checkpoint-interval-within-layers",
        reason="the model has fewer layers than the checkpointing interval",
        breaks=lambda c, context: (
            context.num_layers is not None and c.activation_checkpointing > context.num_layers
        ),
    ),
    Rule(
        name="bf16-needs-ampere",
        reason="bfloat16 matrix products need compute capability 8.0",
        breaks=lambda c, context: (
            PRECISIONS[c.precision].compute_dtype == "bfloat16" and _lacks_ampere(context)
        ),
    ),
    Rule(
        name="tf32-needs-ampere",
        reason="TF32 matrix products need compute capability 8.0",
        breaks=lambda c, context: PRECISIONS[c.precision].tf32 and _lacks_ampere(context),
    ),
    Rule(
        name="flash-attention-computes-in-16-bits",
        reason="FlashAttention has kernels for float16 and bfloat16 only",
        breaks=lambda c, _: (
            c.attention in _FLASH and PRECISIONS[c.precision].compute_dtype == "float32"
        ),
    ),
    Rule(
        # Dao-AILab/flash-attention, README: Ampere, Ada, Hopper.
        name="flash-attention-needs-ampere",
        reason="FlashAttention 2 needs compute capability 8.0",
        breaks=lambda c, context: c.attention == "flash_attention_2" and _lacks_ampere(context),
    ),
    Rule(
        # The same, FlashAttention-3: H100 and H800.
        name="flash-attention-3-needs-hopper",
        reason="FlashAttention 3 is written for compute capability 9.0 alone",
        breaks=lambda c, context: (
            c.attention == "flash_attention_3" and context.compute_capability not in (None, (9, 0))
        ),
    ),
    Rule(
        name="flex-attention-is-compiled",
        reason="flex_attention's kernels are made by torch.compile: what they keep is not predicted",
        breaks=lambda c, _: c.attention == "flex_attention",
    ),
    Rule(
        # Triton's README, supported hardware.
        name="liger-needs-ampere",
        reason="Liger's kernels are Triton's, which needs compute capability 8.0",
        breaks=lambda c, context: c.liger and _lacks_ampere(context),
    ),
    Rule(
        name="fp16-weights-cannot-train",
        reason="gradients in float16 cannot be unscaled: only a frozen base may be float16",
        breaks=lambda c, _: c.precision == "fp16-autocast" and c.method == "full",
    ),
    Rule(
        name="bf16-replaces-fp16",
        reason="the space offers bf16 autocast too, as fast on this card and without loss scaling",
        breaks=lambda c, context: (
            c.precision in ("fp16-mixed", "fp16-autocast")
            and ("bf16-mixed" in context.precisions or "bf16-autocast" in context.precisions)
            and not _lacks_ampere(context)
        ),
    ),
)


def broken_rules(config: TrainConfig, context: Context) -> list[Rule]:
    """Return every rule that the configuration breaks."""
    return [rule for rule in RULES if rule.breaks(config, context)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Enumeration:
    """Every valid point of a space, and what became of the others."""

    configs: list[TrainConfig]
    num_enumerated: int
    invalid: dict[str, int]
    """Points dropped, by the name of the first rule that they break."""


def enumerate_configs(
    space: SearchSpace,
    workload: Workload,
    *,
    num_layers: int | None = None,
    compute_capability: tuple[int, int] | None = None,
) -> Enumeration:
    """Return the valid points for the workload's methods, in the order of the file.

    A micro-batch that does not divide the effective batch size is counted as an invalid point.
    """
    configs: list[TrainConfig] = []
    invalid: Counter[str] = Counter()
    num_enumerated = 0
    for section in space.methods:
        if section.method not in workload.methods:
            continue
        context = Context(
            effective_batch_size=workload.effective_batch_size,
            num_layers=num_layers,
            compute_capability=compute_capability,
            precisions=section.domains["precision"],
        )
        for config in _points(section, workload):
            num_enumerated += 1
            for rule in RULES:
                if rule.breaks(config, context):
                    invalid[rule.name] += 1
                    break
            else:
                configs.append(config)
    return Enumeration(configs=configs, num_enumerated=num_enumerated, invalid=dict(invalid))


def _points(section: MethodSpace, workload: Workload) -> Iterator[TrainConfig]:
    domains = dict(section.domains)
    sizes = domains.pop("micro_batch_size")
    accumulations = [max(1, workload.effective_batch_size // size) for size in sizes]
    for values in itertools.product(*domains.values()):
        rest = dict(zip(domains, values, strict=True))
        for size, accumulation in zip(sizes, accumulations, strict=True):
            yield TrainConfig(
                method=section.method,
                micro_batch_size=size,
                gradient_accumulation_steps=accumulation,
                sequence_length=workload.sequence_length,
                **rest,
            )


_LEVEL = {name: level for level, name in enumerate(TRADEOFF_CLASSES)}
_COSTLY_SETTINGS = (
    *((name, _LEVEL["recipe"]) for name in ("method", "sequence_length", "effective_batch_size")),
    *((knob.name, _LEVEL[knob.tradeoff]) for knob in KNOBS.values() if _LEVEL.get(knob.tradeoff)),
)
"""With the trade-off level of a change of each (DESIGN section 5). The optimizer's depends on what
it is changed for."""


def tradeoff_class(config: TrainConfig, base: TrainConfig) -> str:
    """Return what `config` gives up against `base`: the highest class among their differences."""
    level = _optimizer_level(config.optimizer, base.optimizer)
    for name, cost in _COSTLY_SETTINGS:
        if cost > level and getattr(config, name) != getattr(base, name):
            level = cost
    return TRADEOFF_CLASSES[level]


def filter_allowed(
    configs: Iterable[TrainConfig], base: TrainConfig, allow: str
) -> list[TrainConfig]:
    """Return the configurations that give up at most `allow`, one of TRADEOFF_CLASSES."""
    limit = _LEVEL[allow]
    return [config for config in configs if _LEVEL[tradeoff_class(config, base)] <= limit]


@functools.cache
def _optimizer_level(name: str, base_name: str) -> int:
    optimizer, base = OPTIMIZERS[name], OPTIMIZERS[base_name]
    if optimizer.family != base.family:
        return _LEVEL["recipe"]
    return _LEVEL["exact" if optimizer.state_format == base.state_format else "numerics"]
