"""Finds the layers that stand for all in whatever order they come, and leaves the others out.

Layers of one kind are alike, whatever is beside them, but for the first two: what comes before may need no
gradient. Nor is one like others that is the first that attends as it does, which is the last to need the
positions that these share; or one of the last two of these: where many take the keys
and values of one (Gemma 3n), the gradient of these begins there. The one that has them is the only one of its
kind, and what it was given stays as long, so the layer before it is like no other either.

Where every second layer is checkpointed, those that are and those that are not are kinds of their own.
"""

from __future__ import annotations

import itertools
from collections import ChainMap, Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from autotune.worker.build.layers import ATTENDS, Kind
from autotune.worker.build.model import UnsupportedModel

NUM_OWN = 2
"""Layers at either end that only stand for themselves."""


class NoStandIn(UnsupportedModel):
    """Layers that hand on more than one tensor, or are run out of sight, cannot be left out."""


class StandIn(GradientCheckpointingLayer):
    """Hands on what it is given, in the place of a layer that is left out: the others keep their numbers.

    It counts among the layers that may be checkpointed, but never is. A model may ask it how it attends
    (ModernBERT's `attention_type`), so that it has the plain values of the layer that it stands for.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        below = itertools.takewhile(lambda each: each is not nn.Module, type(layer).__mro__)
        classes = (vars(each) for each in below)
        for name, value in ChainMap(vars(layer), *map(dict, classes)).items():
            if isinstance(value, (str, int)) and not hasattr(self, name):
                setattr(self, name, value)

    def train(self, mode: bool = True) -> StandIn:
        return super().train(False)

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states


def share_weights(stack: nn.ModuleList) -> bool:
    """Whether a weight is of several layers."""
    weights = [id(each) for _, each in stack.named_parameters(remove_duplicate=False)]
    return len({*weights}) < len(weights)


def leave_out(stack: nn.ModuleList, kept: Sequence[int]) -> None:
    """Put stand-ins in the place of all but these layers; the first is one of them.

    Running the model then raises NoStandIn where its layers hand on more than one tensor.
    """
    stack[0].register_forward_hook(_check_is_one_tensor)
    for number in {*range(len(stack))} - {*kept}:
        stack[number] = StandIn(stack[number])


def built(stack: nn.ModuleList) -> list[nn.Module]:
    """The layers that are no stand-ins."""
    return [layer for layer in stack if not isinstance(layer, StandIn)]


def _check_is_one_tensor(_: nn.Module, __: Any, output: Any) -> None:
    if not isinstance(output, torch.Tensor):
        raise NoStandIn("its layers hand on more than one tensor")


def copies_of(
    kinds: Sequence[Kind], every: int = 1, cut: int | None = None
) -> dict[str, list[int]]:
    """Return what autotune.memory.traces.layers.Alike is made of: the first layers that are as no other.

    `every`: of how many layers one is checkpointed. Their neighbours are then treated as in the whole model.
    `cut`: the layer from which on they are checkpointed in another way.
    """
    numbers = range(len(kinds))
    only = {number for number in numbers if kinds.count(kinds[number]) == 1}
    before_only = [number if number + 1 in only else -1 for number in numbers]
    turns = [number % every if cut is None else _side_of(number - cut) for number in numbers]
    seen = [*zip(kinds, turns, _ends(kinds), before_only, strict=True)]
    own: list[int] = []
    for number, each in enumerate(seen):
        if each not in seen[:number]:
            after = own[-1] + 1 if own else 0
            own += [*range(after, after + (number - after) % every), number]
    number_of = {seen[layer]: number for number, layer in reversed([*enumerate(own)])}
    return {"own": own, "sources": [number_of[each] for each in seen]}


def _side_of(steps: int) -> tuple[bool, int]:
    """On which side of the cut a layer is, so many steps on, and whether it is beside it."""
    return steps < 0, steps if steps in (-1, 0) else 1


def _ends(kinds: Sequence[Kind]) -> list[tuple[int, bool, int]]:
    """How near each layer is to the first one, and to the first and last that attend as it does."""
    attends = [dict(kind).get(ATTENDS, kind) for kind in kinds]
    later: Counter[Any] = Counter()
    ends = []
    for number in reversed(range(len(kinds))):
        each = attends[number]
        ends.append((min(number, NUM_OWN), each in attends[:number], min(later[each], NUM_OWN)))
        later[each] += 1
    return ends[::-1]
