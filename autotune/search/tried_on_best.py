"""Settings that a search tries on its best configurations alone, since each multiplies what must be traced.

The loss is made in parts where its logits take memory that would make the step faster. Then checkpointing is
solved (autotune.search.solved_checkpointing) with the loss at once and in parts: what promises most comes
first, so that it bounds the rest.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.common import log
from autotune.errors import AutotuneError
from autotune.predict.estimator import Estimator
from autotune.records.estimate import Estimate, TraceSpec
from autotune.records.measurement import NOISE
from autotune.search.candidates import Candidates, speed_of
from autotune.search.solved_checkpointing import (
    LEAST_LAYERS,
    PlanSolver,
    Traces,
    families_of,
    plan_specs,
    solved_configs,
)
from autotune.search.tips import LARGE_SHARE
from autotune.space.checkpoint_plans import INTERVAL
from autotune.space.config import METHODS, TRADEOFF_CLASSES, TrainConfig
from autotune.space.rules import Context, broken_rules
from autotune.space.tradeoffs import LEVEL

_log = log.logger(__name__)

_MAY_DIFFER = (
    "micro_batch_size",
    "gradient_accumulation_steps",
    # Where one micro-batch is the step, it is traced like the other.
    "update_in_backward",
    "activation_checkpointing",
    "checkpoint_plan",
    "checkpoint_layers",
    "expandable_segments",
    # What fits by offloading alone may fit in parts without it.
    "activation_offloading",
    # What needs least, or was the fastest, is not the fastest of what fits then: others of its trace may be.
    "optimizer",
    # One trace stands for all ranks but the largest.
    "lora_rank",
)
"""Settings in which what is tried may differ from the best."""

_PLAIN: dict[str, Any] = {
    "activation_offloading": False,
    "checkpoint_plan": INTERVAL,
    "checkpoint_layers": 0,
}
"""Settings that plans of checkpointing start from."""

_WHOLE: dict[str, Any] = _PLAIN | {"chunked_loss": False, "activation_checkpointing": 1}
"""Settings that plans with the loss at once start from."""

_common = operator.attrgetter(*(name for name in TrainConfig.names() if name not in _MAY_DIFFER))


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """The methods that something is tried for, the highest class of an answer, and how to trace it."""

    solving: frozenset[str]
    """Methods of which checkpointing is solved."""
    parting: frozenset[str]
    """Methods of which the loss is made in parts."""
    allow: str | None
    """The highest class that may be the answer; None for any."""
    context: Context
    trace: Callable[[set[TraceSpec]], None]
    """Makes the traces of specs."""
    on_all_traced: Callable[[Candidates], None]
    """Is told the candidates when nothing more will be traced, before plans of checkpointing are solved."""


def tried(
    candidates: Candidates,
    configs: Sequence[TrainConfig],
    estimator: Estimator,
    traces: Traces,
    what: Tried,
) -> tuple[Candidates, list[TrainConfig]]:
    """Return the candidates with what was tried besides, and that alone.

    `configs`: those of the search. `traces`: the estimator's, which what is tried joins.
    """
    parted = _parted(candidates, configs, estimator, what)
    candidates = candidates.with_more(parted)
    families = families_of(
        candidates, [*configs, *parted], estimator, methods=what.solving, allow=what.allow
    )

    def trace_last(specs: set[TraceSpec]) -> None:
        what.trace(specs)
        what.on_all_traced(candidates)

    plans = solved_configs(candidates, families, PlanSolver(estimator, traces), trace_last)
    return candidates.with_more(plans), [*parted, *plans]


def specs_in_parts(best: Estimate | None, what: Tried) -> list[TraceSpec]:
    """Return the specs of traces for the best with its loss in parts, which less memory asks for."""
    if best is None or best.config.method not in what.parting:
        return []
    parted = dataclasses.replace(best.config, chunked_loss=True, **_PLAIN)
    if broken_rules(parted, what.context):
        return []
    free, lean = (dataclasses.replace(parted, activation_checkpointing=n) for n in (0, 1))
    return [TraceSpec.of(lean), TraceSpec.of(free), *_specs_of_plans(lean, what)]


def likely_later(candidates: Candidates, best: Estimate | None, what: Tried) -> list[TraceSpec]:
    """Return the specs that a search with less memory is likely to try, the likeliest first.

    The answer, `best`, and the fastest of each other method are tried in parts: where memory sufficed they
    were not. Then come the plans of checkpointing for the answer, as it is and in parts.
    """
    if best is None:
        return []
    others = what.parting - {best.config.method}
    bests = [best, *(candidates.further(_is_of(name)) for name in METHODS if name in others)]
    in_parts = [
        dataclasses.replace(spec, single=single)
        for each in bests
        for spec in specs_in_parts(each, what)
        if not spec.has_plan
        for single in (spec.single, not spec.single)
    ]
    plans = list[TraceSpec]()
    if best.config.method in what.solving:
        plans = _specs_of_plans(dataclasses.replace(best.config, **_WHOLE), what)
    return [*in_parts, *plans, *specs_in_parts(best, what)]


def _specs_of_plans(lean: TrainConfig, what: Tried) -> list[TraceSpec]:
    """Return the specs that price the plans of a configuration; none where they break a rule."""
    planned = dataclasses.replace(lean, checkpoint_plan="recompute", checkpoint_layers=LEAST_LAYERS)
    return [] if broken_rules(planned, what.context) else sorted(plan_specs(lean), key=repr)


def _is_of(method: str) -> Callable[[TrainConfig], bool]:
    return lambda config: config.method == method


def _parted(
    candidates: Candidates, configs: Sequence[TrainConfig], estimator: Estimator, what: Tried
) -> list[TrainConfig]:
    """Trace the best of each class, and of all, with the loss in parts; return what can be priced."""
    found: dict[TrainConfig, None] = {}
    for name in TRADEOFF_CLASSES:
        if what.allow is not None and LEVEL[name] > LEVEL[what.allow]:
            continue
        best = candidates.best(candidates.exactly(name))
        parting = [
            config
            for config in configs
            if config.method in what.parting
            and not config.liger
            and candidates.class_of(config) == name
        ]
        alike: list[TrainConfig] = []
        whole = _best_without_liger(candidates, name)
        if best and whole and parts_may_pay(whole, parting, estimator, best):
            common = _common(whole.config)
            alike = [config for config in parting if _common(config) == common]
        unfit = [
            config
            for config in parting
            if best is None or _would_be_chosen(config, best, candidates, estimator, what.context)
        ]
        commons = set(map(_common, _nearest_to_fit(candidates, unfit, estimator)))
        alike += [config for config in unfit if _common(config) in commons]
        alike += _of_further(candidates, parting, estimator) if name == TRADEOFF_CLASSES[-1] else []
        for config in alike:
            parted = dataclasses.replace(config, chunked_loss=True)
            is_allowed = what.allow is None or candidates.at_most(what.allow)(parted)
            # What is solved lies between no layer checkpointed and all of them.
            if parted.activation_checkpointing in (0, 1) and is_allowed:
                found[parted] = None
    tried = [config for config in found if not broken_rules(config, what.context)]
    specs = {TraceSpec.of(config) for config in tried}
    if not specs:
        return []
    try:
        what.trace(specs)
    except AutotuneError as error:
        _log.info("no loss in parts can be traced: %s", error)
    return [config for config in tried if estimator.supports(config)]


def _best_without_liger(candidates: Candidates, name: str) -> Estimate | None:
    """Return the best of a class that makes logits: Liger's loss makes none, and has no parts."""
    is_of_class = candidates.exactly(name)
    best = candidates.best(is_of_class)
    if best is None or not best.config.liger:
        return best
    return candidates.best(lambda config: is_of_class(config) and not config.liger)


def _of_further(
    candidates: Candidates, parting: Sequence[TrainConfig], estimator: Estimator
) -> list[TrainConfig]:
    """Return what is like the fastest that gives up more, where a loss in parts may make that faster."""
    bests = (candidates.best(candidates.exactly(name)) for name in TRADEOFF_CLASSES)
    further = candidates.further(lambda _: True, *filter(None, bests))
    if further is None or not parts_may_pay(further, parting, estimator):
        return []
    common = _common(further.config)
    return [config for config in parting if _common(config) == common]


def _would_be_chosen(
    config: TrainConfig,
    best: Estimate,
    candidates: Candidates,
    estimator: Estimator,
    context: Context,
) -> bool:
    """Whether a configuration would be chosen if it fitted, by its form or by how GPUs share the run.

    A loss in parts may let LoRA fit where only QLoRA does, and whole weights on each GPU where only shares of
    them do.
    """
    form, of_best = candidates.form_of(config), candidates.form_of(best.config)
    if form != of_best or config.parallelism in ("none", best.config.parallelism):
        return form < of_best
    if broken_rules(dataclasses.replace(config, chunked_loss=True), context):
        return False
    return (estimator.tokens_per_second(config) or 0.0) > speed_of(best) * (1 + NOISE)


def _nearest_to_fit(
    candidates: Candidates, configs: Sequence[TrainConfig], estimator: Estimator
) -> list[TrainConfig]:
    """Return what needs least of each form, and checkpointed without offloading what needs or gives up least.

    What would not fit without any logits is left out. Where nothing at all fits, a step that is one
    micro-batch stays if one sample of it would: the error then says how large the step may be.
    """
    leans = [
        config
        for config in configs
        if config.activation_checkpointing == 1 and not config.activation_offloading
    ]
    # A step that is one micro-batch has the logits of all its samples: without them it may need least.
    ways: dict[tuple[object, ...], list[TrainConfig]] = {}
    for config in configs:
        way = config.update_in_backward, candidates.form_of(config)
        ways.setdefault(way, []).append(config)
    found = [min(way, key=estimator.floor_bytes) for way in ways.values()]
    if leans:  # Plans of checkpointing start from them, and what offloads needs less than they do.
        found += [min(leans, key=candidates.gives_up), min(leans, key=estimator.floor_bytes)]
    is_last_resort = candidates.best(lambda _: True) is None

    def may_fit(config: TrainConfig) -> bool:
        if config.update_in_backward and is_last_resort:
            one = dataclasses.replace(config, micro_batch_size=1)
            config = one if estimator.supports(one) else config
        logits_bytes = estimator.estimate(config).breakdown.logits_bytes
        return estimator.floor_bytes(config) - logits_bytes <= estimator.room_for(config)

    return list(filter(may_fit, found))


def parts_may_pay(
    best: Estimate,
    configs: Iterable[TrainConfig],
    estimator: Estimator,
    to_beat: Estimate | None = None,
) -> bool:
    """Whether a loss in parts may make something faster than the best, by the bytes of its logits.

    One of `configs` that is like the best has to be faster if memory had no limit, by itself or as its loss
    in parts goes over the logits less often. And it has to fit without its logits, or they have to be a large
    share of the memory, or to pay for layers that need not be checkpointed. `to_beat`: what is to be passed,
    where that is another, with Liger's loss.
    """
    logits_bytes = best.breakdown.logits_bytes
    if best.config.liger or best.config.chunked_loss or not logits_bytes:
        return False
    bytes_per_second = estimator.gpu.memory_bandwidth_bytes_per_second
    seconds = best.micro_step_seconds
    share_saved = 0.0
    if bytes_per_second and seconds:
        # 12 bytes of each logit are in memory at once, and its kernels move 16 to 22 bytes less in parts.
        share_saved = min(2 * logits_bytes / bytes_per_second / seconds, 0.5)
    common = _common(best.config)
    alike = (config for config in configs if _common(config) == common)
    speeds = {config: estimator.tokens_per_second(config) or 0.0 for config in alike}
    least = speed_of(to_beat or best) * (1 + NOISE) * (1 - share_saved)
    faster = [config for config, speed in speeds.items() if speed > least]
    if not faster:
        return False
    if logits_bytes >= LARGE_SHARE * best.peak_device_bytes:
        return True
    bytes_per_sample = logits_bytes / best.config.micro_batch_size
    if any(
        estimator.floor_bytes(config) - bytes_per_sample * config.micro_batch_size
        <= estimator.room_for(config)
        for config in faster
    ):
        return True
    free = dataclasses.replace(best.config, activation_checkpointing=0, **_PLAIN)
    if best.config == free or not speeds.get(free):
        return False
    lacking_bytes = estimator.floor_bytes(free) - estimator.floor_bytes(best.config)
    return (1 - speed_of(best) / speeds[free]) * logits_bytes > NOISE * lacking_bytes
