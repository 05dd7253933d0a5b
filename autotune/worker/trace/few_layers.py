"""Models for traces: with every layer, or with just those that stand for all."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from autotune.catalogue.tasks import PICTURES
from autotune.memory.traces import Stacks, unlike_layers
from autotune.records.estimate import TraceSpec
from autotune.space.checkpoint_plans import plan_offloads
from autotune.worker.build import alike_layers, layers, towers
from autotune.worker.build import model as models
from autotune.worker.build.model import UnsupportedModel
from autotune.worker.trace import attention
from autotune.worker.trace.shared_models import SharedModel, SharedModels
from autotune.worker.trace.stand_ins import without_values


def base_of(
    shared: SharedModels, config: PretrainedConfig, task: str, spec: TraceSpec, *, whole: bool
) -> SharedModel:
    """The model that others have left, or a new one."""

    def left(step: int) -> SharedModel | None:
        found = shared.get(step)
        is_fit = found is not None and (spec.activation_checkpointing or not found.has_checkpointed)
        return found if is_fit else None

    step = 0 if whole else max(spec.activation_checkpointing, 1)
    found = left(step)
    if found is None:
        with attention.without_library(spec.attention), without_values():
            model, said = (_whole if whole else _few)(config, task, spec)
        has_all = Stacks.of_answer(said).are_whole
        found = (left(0) if has_all else None) or SharedModel(model=model, layers=said)
        shared[step] = found
        if has_all:
            shared[0] = found
    return found


def _whole(
    config: PretrainedConfig, task: str, spec: TraceSpec
) -> tuple[nn.Module, dict[str, dict[str, Any]]]:
    num = layers.num_layers(config)
    every = [*range(num)]
    plan = _plan_of(config, task, spec)
    of_text = (
        {"own": every, "sources": every, **plan}
        if plan
        else {"traced": num, "full": num, "first": 0, "period": 1}
    )
    said: dict[str, Any] = {"layers": of_text}
    model = models.build_base(config, task, spec)
    tower = layers.tower_layers(model) if task == PICTURES else None
    if tower is not None:
        every = [*range(len(tower))]
        said["tower"] = {"own": every, "sources": every}
    return model, said


def _plan_of(config: PretrainedConfig, task: str, spec: TraceSpec) -> dict[str, Any]:
    """Return where a trace for plans of any number of lean layers treats unlike layers otherwise."""
    if not spec.has_plan or spec.checkpoint_layers or _num_periods(config, spec) > 3:
        return {}
    kinds = layers.letters_of(kinds_of_whole(config, task, spec)[0])
    cut = unlike_layers.place_to_cut(kinds)
    return {} if cut is None else {"cut": cut, "kinds": kinds}


def _few(
    config: PretrainedConfig, task: str, spec: TraceSpec
) -> tuple[nn.Module, dict[str, dict[str, Any]]]:
    """Build a model with just the layers that stand for all; the whole one where there are none such."""
    kinds, of_tower = kinds_of_whole(config, task, spec)
    num_periods = _num_periods(config, spec)
    pattern = layers.find_pattern(
        kinds, step=max(spec.activation_checkpointing, 1), num_periods=num_periods
    )
    num = len(kinds) if pattern is None else pattern.num_traced(len(kinds), num_periods)
    if pattern is not None and num == layers.num_decoder_layers(config) != len(kinds):
        # Of as many layers it would be taken for the encoder's other half.
        num = min(num + pattern.period, len(kinds))
    cut: dict[str, int] = {}
    if spec.has_plan and pattern is not None:
        cut["cut"] = pattern.first + num_periods * pattern.period
        num = min(num + num_periods * pattern.period, len(kinds))
    # A pattern tells of more numbers of lean layers, so it is taken however many that are.
    is_free = not spec.has_plan or num == len(kinds)
    if is_free and (found := _fewest(config, task, spec, fewer_than=num)) is not None:
        return found
    if pattern is None or num == len(kinds):
        return _whole(config, task, spec)
    small, kept = _with_few_that_see(layers.with_layers(config, num), of_tower)
    try:
        model = models.build_base(small, task, spec)
    except UnsupportedModel:  # Something in the configuration counts the layers.
        return _fewest(config, task, spec) or _whole(config, task, spec)
    if _kinds_of(model, small, task) != (kinds[:num], [of_tower[number] for number in kept]):
        # What is special about the last layers comes too early.
        return _fewest(config, task, spec) or _whole(config, task, spec)
    of_text = {"traced": num, "full": len(kinds), **dataclasses.asdict(pattern), **cut}
    return model, _said(of_text, of_tower, kept)


def _fewest(
    config: PretrainedConfig, task: str, spec: TraceSpec, *, fewer_than: int | None = None
) -> tuple[nn.Module, dict[str, dict[str, Any]]] | None:
    """Leave out of the whole model the layers that are as others are, in whatever order these come.

    None where that is not so few. Nor where every second is checkpointed beside a tower, whose layers count,
    too; nor where a kernel or a gradient is of two layers (_num_periods), or a weight of many.
    """
    kinds, of_tower = kinds_of_whole(config, task, spec)
    plan = _plan_of(config, task, spec)
    every = max(spec.activation_checkpointing, 1)
    if (spec.has_plan and not plan) or (every > 1 and of_tower) or _num_periods(config, spec) > 3:
        return None
    copies = alike_layers.copies_of(kinds, every, plan.get("cut"))
    if len(copies["own"]) >= (len(kinds) if fewer_than is None else fewer_than):
        return None
    small, kept = _with_few_that_see(config, of_tower)
    model = models.build_base(small, task, spec)
    (stack,) = layers.layer_stacks(model)
    if alike_layers.share_weights(stack):
        return None
    alike_layers.leave_out(stack, copies["own"])
    return model, _said({**copies, **plan}, of_tower, kept)


def _with_few_that_see(
    config: PretrainedConfig, of_tower: list[layers.Kind]
) -> tuple[PretrainedConfig, list[int]]:
    """Return the configuration with the tower's layers that stand for all, and their numbers."""
    kept = towers.fewest(of_tower)
    return towers.with_tower_layers(config, kept) if kept else config, kept


def _said(
    of_text: dict[str, Any], of_tower: list[layers.Kind], kept: list[int]
) -> dict[str, dict[str, Any]]:
    """Return what autotune.memory.traces.Stacks reads."""
    return {
        "layers": of_text,
        **({"tower": towers.copies_of(of_tower, kept)} if kept else {}),
    }


_Kinds = tuple[list[layers.Kind], list[layers.Kind]]
"""Kinds of layers: of the text, and of a tower that sees."""
_KINDS: dict[tuple[str, str, str], _Kinds] = {}
"""Kinds of each configuration's layers: a process traces one model in many ways."""


def kinds_of_whole(config: PretrainedConfig, task: str, spec: TraceSpec) -> _Kinds:
    """Return the kinds of every layer: the whole model is built where they are not known yet."""
    key = config.to_json_string(use_diff=False), task, spec.attention
    if key not in _KINDS:
        _KINDS[key] = _kinds_of(models.build_base(config, task, spec), config, task)
    return _KINDS[key]


def _kinds_of(model: nn.Module, config: PretrainedConfig, task: str) -> _Kinds:
    sees = task == PICTURES
    of_tower = towers.kinds_of_tower(model, config) if sees else []
    return layers.kinds_of(model, config, sees=sees), of_tower


def _num_periods(config: PretrainedConfig, spec: TraceSpec) -> int:
    """Number of periods of layers that are traced: a first, a repeating and a last one.

    One more where the copies of the second take what they refer to from the third, which must not
    be the last: where the first layers make what the others share (T5's position bias), and where a
    layer's gradient arrives when the one below has begun (that of Liger's first norm), or a kernel
    is of two layers (compiled), or a layer fetches from the host what the one below has made.
    """
    fetches = plan_offloads(spec.checkpoint_plan)
    return 4 if config.is_encoder_decoder or spec.liger or spec.is_compiled or fetches else 3
