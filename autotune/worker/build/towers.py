"""Finds the layers of a tower that sees, and the fewest of them that stand for all.

Layers are alike that are of one kind and have neighbours of one kind. The first two are like no other: what
comes before them may need no gradient. Nor are the first and the last of a kind: what all of a kind share is
made and freed in these. Towers have no pattern that one number tells: window and full
attention alternate in Qwen2.5-VL, the text is given what some layers have seen in Qwen3-VL and LLaVA.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from autotune.worker.build.layers import (
    TOWER_NUMBERS,
    Kind,
    drop_numbers_of_layers,
    facts_of_layers,
    tower_layers,
)

_UNLIKE = "fullatt_block_indexes"
"""Name of the setting that lists layers of another attention."""
_TAKEN = "deepstack_visual_indexes"
"""Name of the setting that lists layers behind each of which the text is given something of its own."""
_TAKEN_OUTPUTS = "vision_feature_layer"
"""Name of the model's setting that says behind which layers the text takes what is seen: from 1, or from the
end."""


def kinds_of_tower(model: nn.Module, config: Any) -> list[Kind]:
    """The kind of each layer of the tower; empty where it has none. `config`: the whole model's."""
    layers = tower_layers(model)
    if layers is None:
        return []
    facts = facts_of_layers([(layer,) for layer in layers])
    drop_numbers_of_layers(facts)
    unlike, taken = _listed(config.vision_config, _UNLIKE), _listed(config.vision_config, _TAKEN)
    outputs = {number - 1 if number > 0 else len(layers) + number for number in _outputs(config)}
    for number, fact in enumerate(facts):
        fact["unlike"] = number in unlike
        fact["taken"] = taken.index(number) if number in taken else -1
        fact["output"] = number in outputs
    return [frozenset(fact.items()) for fact in facts]


def fewest(kinds: Sequence[Kind]) -> list[int]:
    """Numbers of few layers that, in a row, have every layer's kind and neighbours; else of all."""
    numbers: dict[Kind, int] = {}
    row = [numbers.setdefault(kind, len(numbers)) for kind in kinds]
    asked = _seen_from(row)
    all_asked = {*asked}
    for length in range(len(kinds) - 1, 0, -1):
        start = 0
        while start + length <= len(row):
            fewer = row[:start] + row[start + length :]
            if {*_seen_from(fewer)} == all_asked:
                row = fewer
            else:
                start += 1
    kept: list[int] = []
    for seen in _seen_from(row):
        later = range(kept[-1] + 1 if kept else 0, len(kinds))
        found = next((number for number in later if asked[number] == seen), None)
        if found is None:
            return [*range(len(kinds))]
        kept.append(found)
    return kept


def copies_of(kinds: Sequence[Kind], kept: Sequence[int]) -> dict[str, list[int]]:
    """Return what autotune.memory.traces.layers.Alike is made of."""
    sources = {seen: number for number, seen in enumerate(_seen_from([kinds[n] for n in kept]))}
    copied = [sources[seen] for seen in _seen_from(kinds)]
    for number, layer in enumerate(kept):
        copied[layer] = number
    return {"own": [*kept], "sources": copied}


def with_tower_layers(config: PretrainedConfig, kept: Sequence[int]) -> PretrainedConfig:
    """The same configuration with just these layers of the tower."""
    small: Any = copy.deepcopy(config)
    vision = small.vision_config
    for name in TOWER_NUMBERS:
        if hasattr(vision, name):
            setattr(vision, name, len(kept))
    for name in (_UNLIKE, _TAKEN):
        if listed := _listed(vision, name):
            setattr(vision, name, [kept.index(number) for number in listed if number in kept])
    if outputs := _outputs(small):
        moved = [number if number < 0 else kept.index(number - 1) + 1 for number in outputs]
        is_list = isinstance(getattr(small, _TAKEN_OUTPUTS), list | tuple)
        setattr(small, _TAKEN_OUTPUTS, moved if is_list else moved[0])
    return small


def _seen_from(kinds: Sequence[Any]) -> list[tuple[Any, ...]]:
    """How near the beginning each layer is, whether the first or last of its kind, and what is beside it."""
    around = [None, *kinds, None]
    last = {kind: number for number, kind in enumerate(kinds)}
    first = {kind: number for number, kind in reversed([*enumerate(kinds)])}
    return [
        (
            min(number, 2),
            first[kind] == number,
            last[kind] == number,
            *around[number : number + 3],
        )
        for number, kind in enumerate(kinds)
    ]


def _listed(vision: Any, name: str) -> list[int]:
    return [*(getattr(vision, name, None) or ())]


def _outputs(config: Any) -> list[int]:
    said = getattr(config, _TAKEN_OUTPUTS, None)
    if said is None:
        return []
    return [*said] if isinstance(said, list | tuple) else [said]
