"""The trade-off class of a configuration against another: docs/ARCHITECTURE.md, "What fastest means"."""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

from autotune.space.config import TRADEOFF_CLASSES, TrainConfig
from autotune.space.knobs import KNOBS, REQUIRED
from autotune.space.lengths import SAME_STEPS
from autotune.space.optimizers import OPTIMIZERS
from autotune.space.parallelisms import PARALLELISMS
from autotune.space.precisions import PRECISIONS

LEVEL = {name: level for level, name in enumerate(TRADEOFF_CLASSES)}

_COSTLY_SETTINGS = (
    *(
        (name, LEVEL["recipe"])
        for name in (
            "method",
            "sequence_length",
            "effective_batch_size",
            "compared_samples",
            # Its odds are rounded otherwise: GRPO weighs what it writes by how far, and drops some.
            "writes_with_vllm",
        )
    ),
    *(
        (knob.name, LEVEL[knob.tradeoff])
        for knob in KNOBS.values()
        if LEVEL.get(knob.tradeoff) and knob.name != "batching"
    ),
)
"""Pairs of a setting and the level of a change of it. Those of the optimizer, of batching and of
no_sync depend on the two values."""
_FREE_SETTINGS = tuple(knob.name for knob in KNOBS.values() if LEVEL.get(knob.tradeoff) == 0)
"""Settings that leave the mathematics as they are."""


def tradeoff_class(config: TrainConfig, base: TrainConfig) -> str:
    """Return what `config` gives up against `base`: the highest class among their differences."""
    level = _optimizer_level(config.optimizer, base.optimizer)
    if config.batching != base.batching:
        level = max(level, _batching_level(config.batching, base.batching))
    if config.no_sync != base.no_sync:
        level = max(level, _reductions_level(config))
    for name, cost in _COSTLY_SETTINGS:
        if cost > level and getattr(config, name) != getattr(base, name):
            level = cost
    return TRADEOFF_CLASSES[level]


def gives_up(config: TrainConfig, base: TrainConfig) -> tuple[object, ...]:
    """Return a key that orders configurations by what they give up, least first; headroom aside."""
    return (
        LEVEL[tradeoff_class(config, base)],
        *form(config, base),
        loses_small_updates(config),
        *_from_usual_rank(config, base),
        *_num_changes(config, base),
    )


Form = tuple[int, bool, int]


def form(config: TrainConfig, base: TrainConfig) -> Form:
    """Return the number of further trades, whether weights are quantised, and how much coarser they train.

    Against the base, each; of two configurations the one with the lower triple is chosen, however fast the
    other is.
    """
    is_quantized = config.quantization not in ("none", base.quantization)
    coarser = max(_coarseness(config) - _coarseness(base), 0)
    return len(further_trades(config, base)), is_quantized, coarser


def _coarseness(config: TrainConfig) -> int:
    """Return 0 for weights that train in 32 bits, 1 in bfloat16 with small updates kept, 2 with them lost."""
    return trains_bfloat16(config) + loses_small_updates(config)


def trains_bfloat16(config: TrainConfig) -> bool:
    """Whether the weights themselves train in bfloat16.

    DeepSpeed, and FSDP2 beside autocast, step on float32 ones (accelerate 1.15 fsdp2_prepare_model).
    """
    precision, row = PRECISIONS[config.precision], PARALLELISMS[config.parallelism]
    is_float32 = row.is_deepspeed or (row.is_fsdp and precision.autocast)
    return config.method == "full" and precision.parameter_dtype == "bfloat16" and not is_float32


def loses_small_updates(config: TrainConfig) -> bool:
    """Whether weights train in bfloat16, so that updates far smaller than a weight are rounded away."""
    return trains_bfloat16(config) and not OPTIMIZERS[config.optimizer].keeps_rounding


def further_trades(config: TrainConfig, base: TrainConfig) -> tuple[str, ...]:
    """Return the settings that give up more than another training run has to, quantisation aside.

    Another run is full fine-tuning, LoRA or QLoRA with the base's family of optimizers, the base's adapter
    settings, and KNOBS' defaults where it has none: rank 16 on all linear layers.
    """
    return _trades(_settings_of_form(config), _settings_of_form(base))


_USUAL_METHODS = ("full", "lora", "qlora")
_KNOBS_OF_FORM = tuple(
    knob
    for knob in KNOBS.values()
    if knob.tradeoff == "recipe" and knob.name not in ("batching", "quantization")
)
"""Knobs of which a change is a further trade. How samples fill a batch is none: it gives up no quality."""
_settings_of_form = operator.attrgetter(
    "method", "optimizer", *(knob.name for knob in _KNOBS_OF_FORM)
)


@functools.cache
def _trades(settings: tuple[Any, ...], base_settings: tuple[Any, ...]) -> tuple[str, ...]:
    method, optimizer, *values = settings
    base_method, base_optimizer, *base_values = base_settings
    trades = []
    if method not in (*_USUAL_METHODS, base_method):
        trades.append("method")
    if OPTIMIZERS[optimizer].family != OPTIMIZERS[base_optimizer].family:
        trades.append("optimizer")
    for knob, value, base_value in zip(_KNOBS_OF_FORM, values, base_values, strict=True):
        usual = base_value if base_method in knob.methods else knob.default_for(method)
        if method in knob.methods and usual is not REQUIRED and value != usual:
            trades.append(knob.name)
    return tuple(trades)


def _from_usual_rank(config: TrainConfig, base: TrainConfig) -> tuple[float, int]:
    """Return how often the rank is doubled or halved from the usual one; of two alike the higher is less."""
    if config.lora_rank is None:
        return 0.0, 0
    usual = base.lora_rank or KNOBS["lora_rank"].default_for(config.method)
    return abs(math.log2(config.lora_rank / usual)), -config.lora_rank


def _num_changes(config: TrainConfig, base: TrainConfig) -> list[int]:
    """Count the changed settings of each class, highest first: 8-bit state besides LoRA is one more."""
    costs = [
        cost for name, cost in _COSTLY_SETTINGS if getattr(config, name) != getattr(base, name)
    ]
    if config.optimizer != base.optimizer:
        costs.append(_optimizer_level(config.optimizer, base.optimizer))
    if config.batching != base.batching:
        costs.append(_batching_level(config.batching, base.batching))
    if config.no_sync != base.no_sync and config.accumulates_shards:
        costs.append(_reductions_level(config))
    free = sum(getattr(config, name) != getattr(base, name) for name in _FREE_SETTINGS)
    return [costs.count(LEVEL["recipe"]), costs.count(LEVEL["numerics"]), costs.count(0) + free]


def _batching_level(name: str, base_name: str) -> int:
    return LEVEL["exact" if {name, base_name} <= {*SAME_STEPS} else KNOBS["batching"].tradeoff]


def _reductions_level(config: TrainConfig) -> int:
    """Return the level of reducing gradients otherwise: whole ones add up in the dtype of the products.

    Shards of them add up in that of the weights, which may be finer.
    """
    precision = PRECISIONS[config.precision]
    has_float32 = precision.autocast or precision.parameter_dtype == "float32"
    is_coarser = config.no_sync and has_float32 and precision.compute_dtype != "float32"
    return LEVEL["numerics" if is_coarser else "exact"]


@functools.cache
def _optimizer_level(name: str, base_name: str) -> int:
    optimizer, base = OPTIMIZERS[name], OPTIMIZERS[base_name]
    if optimizer.family != base.family:
        return LEVEL["recipe"]
    return LEVEL["exact" if optimizer.state_format == base.state_format else "numerics"]
