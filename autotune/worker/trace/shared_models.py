"""Models that several traces share, and which traces may."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from autotune.records.estimate import TraceSpec
from autotune.space.checkpoint_plans import INTERVAL, plan_offloads
from autotune.space.precisions import PRECISIONS
from autotune.worker.trace import flex
from autotune.worker.trace.encode import Weights
from autotune.worker.trace.meta_step import SetUp

Group = list[dict[str, Any]]
"""Requests for traces that share a model."""

_SET_UP = 2
"""Work that a group may have beyond a process's share, so that its model is not set up twice. [judgement]"""


@dataclass(slots=True, kw_only=True)
class SharedModel:
    """A model for traces whose specs differ in `single`, in checkpointing and in a loss in parts alone."""

    model: nn.Module
    layers: dict[str, dict[str, Any]]
    """Layers that were built, as autotune.memory.traces.Stacks reads them."""
    ready: SetUp | None = None
    """The model as the first of them has set it up."""
    weights: Weights | None = None
    """Facts about its weights, from the first of them."""
    has_checkpointed: bool = False
    """Whether it can checkpoint no layer any more: what makes inputs need a gradient stays."""


_SHARED = ("single", "activation_checkpointing", "activation_offloading", "chunked_loss")
"""Fields of a TraceSpec in which traces that share a model may differ."""

SharedModels = dict[int, SharedModel]
"""Models by what the period of traced layers is a multiple of; 0: every layer is traced."""


def groups_of(wanted: Sequence[dict[str, Any]]) -> list[Group]:
    """Put those together whose model may be the same, those without checkpointing first; largest first."""
    groups: dict[str, Group] = {}
    for each in wanted:
        spec = each["spec"]
        if not each.get("operations") and _is_left_as_it_was(TraceSpec(**spec)):
            # NEFTune's hook comes behind that of checkpointing.
            names = ("single",) if spec["neftune_noise_alpha"] else _SHARED
            plan = spec["checkpoint_plan"]
            # Plans have more layers built, and more again where one fetches what another has made.
            of_plan = plan if plan == INTERVAL else plan_offloads(plan)
            spec = {**spec, **dict.fromkeys(names), "checkpoint_plan": of_plan}
        groups.setdefault(json.dumps({**each, "id": None, "spec": spec}), []).append(each)
    for group in groups.values():
        group.sort(key=lambda each: each["spec"]["activation_checkpointing"])
    return sorted(groups.values(), key=_work, reverse=True)


def parted(groups: list[Group], num_processes: int) -> list[Group]:
    """Halve the largest groups until there is one for each process, none with far more than its share."""
    groups = list(groups)
    most = sum(map(_work, groups)) / num_processes + _SET_UP
    while (
        groups and len(groups[0]) > 1 and (len(groups) < num_processes or _work(groups[0]) > most)
    ):
        largest = groups.pop(0)
        middle = len(largest) // 2
        groups = sorted([*groups, largest[:middle], largest[middle:]], key=_work, reverse=True)
    return groups


def _work(group: Group) -> int:
    """Return about how long a group takes: a plan of checkpointing has twice as many layers traced."""
    return sum(1 if each["spec"]["checkpoint_plan"] == INTERVAL else 2 for each in group)


def _is_left_as_it_was(spec: TraceSpec) -> bool:
    """Whether a step leaves the model as it was before, but for gradients.

    LLM.int8 moves its codes in the first step, fp8 keeps scales; Liger, FlexAttention and TRL's trainers but
    for SFTTrainer are put in for the length of one trace. Dynamo may keep what it likes.
    """
    return (
        spec.quantization != "int8"
        and not PRECISIONS[spec.precision].fp8
        and not spec.liger
        and spec.trainer in ("transformers", "trl-sft")
        and spec.attention != flex.FLEX
        and not spec.is_compiled
    )
