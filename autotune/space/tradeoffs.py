"""The trade-off class of a configuration against another: docs/ARCHITECTURE.md, "What fastest means"."""

from __future__ import annotations

import functools

from autotune.space.config import TRADEOFF_CLASSES, TrainConfig
from autotune.space.knobs import KNOBS
from autotune.space.optimizers import OPTIMIZERS

LEVEL = {name: level for level, name in enumerate(TRADEOFF_CLASSES)}

_COSTLY_SETTINGS = (
    *((name, LEVEL["recipe"]) for name in ("method", "sequence_length", "effective_batch_size")),
    *((knob.name, LEVEL[knob.tradeoff]) for knob in KNOBS.values() if LEVEL.get(knob.tradeoff)),
)
"""Pairs of a setting and the level of a change of it. The optimizer's depends on what it is changed for."""
_FREE_SETTINGS = tuple(knob.name for knob in KNOBS.values() if LEVEL.get(knob.tradeoff) == 0)
"""Settings that leave the mathematics as they are."""


def tradeoff_class(config: TrainConfig, base: TrainConfig) -> str:
    """Return what `config` gives up against `base`: the highest class among their differences."""
    level = _optimizer_level(config.optimizer, base.optimizer)
    for name, cost in _COSTLY_SETTINGS:
        if cost > level and getattr(config, name) != getattr(base, name):
            level = cost
    return TRADEOFF_CLASSES[level]


def gives_up(config: TrainConfig, base: TrainConfig) -> tuple[object, ...]:
    """Return a key that orders configurations by what they give up, least first; headroom aside."""
    family = OPTIMIZERS[config.optimizer].family
    return (
        LEVEL[tradeoff_class(config, base)],
        family != OPTIMIZERS[base.optimizer].family,
        config.quantization != "none",
        -(config.lora_rank or 0),
        *_num_changes(config, base),
    )


def _num_changes(config: TrainConfig, base: TrainConfig) -> list[int]:
    """Count the changed settings of each class, highest first: 8-bit state besides LoRA is one more."""
    costs = [
        cost for name, cost in _COSTLY_SETTINGS if getattr(config, name) != getattr(base, name)
    ]
    if config.optimizer != base.optimizer:
        costs.append(_optimizer_level(config.optimizer, base.optimizer))
    free = sum(getattr(config, name) != getattr(base, name) for name in _FREE_SETTINGS)
    return [costs.count(LEVEL["recipe"]), costs.count(LEVEL["numerics"]), costs.count(0) + free]


@functools.cache
def _optimizer_level(name: str, base_name: str) -> int:
    optimizer, base = OPTIMIZERS[name], OPTIMIZERS[base_name]
    if optimizer.family != base.family:
        return LEVEL["recipe"]
    return LEVEL["exact" if optimizer.state_format == base.state_format else "numerics"]
