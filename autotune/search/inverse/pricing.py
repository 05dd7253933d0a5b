"""Prices the Cases of an inverse question: what fits, what needs least, what is fastest.

Settings that the user left open are free: a case fits when any configuration of the space does. Which
one needs least is known before it is traced (`thrift`), so that few traces decide; the others are
made where the fastest is looked for. Every trace is made once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.catalogue.gpus import Gpu
from autotune.catalogue.models import ModelSource
from autotune.errors import ConfigError, HardwareError
from autotune.memory.traces import Trace
from autotune.predict.estimator import Estimator, narrowest_layer
from autotune.predict.floors import least_bytes
from autotune.predict.least_budget import smallest
from autotune.predict.sharding.shared_trace import SharedTrace
from autotune.predict.tracing import of_card, trace_all
from autotune.records.estimate import Estimate, TraceSpec, specs_for
from autotune.records.question import Question
from autotune.search import room
from autotune.search.budget import ChosenCard
from autotune.search.candidates import Candidates
from autotune.search.listener import Progress
from autotune.search.nothing_fits import why_none_is_valid
from autotune.space.config import TrainConfig, Workload
from autotune.space.dataset import Dataset
from autotune.space.defaults import default_base
from autotune.space.enumeration import enumerate_configs
from autotune.space.headroom import Headroom
from autotune.space.lengths import Lengths
from autotune.space.rules import Context, broken_rules
from autotune.space.search_space import (
    SearchSpace,
    by_data_parallel_size,
    with_attentions,
    with_batchings,
    with_checkpoint,
    with_trainers,
)
from autotune.store.trace_cache import TraceCache
from autotune.worker.client.forkserver import ForkServer

_Points = tuple[list[TrainConfig], dict[str, int], list[str]]
_FAR = 10**9
"""Sorts behind every checkpointing interval."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One value of a question, and all that it is asked of."""

    value: int | str
    source: ModelSource
    gpu: Gpu
    budget_bytes: int
    sequence_length: int
    fixed: Mapping[str, Any] = field(hash=False)
    """Settings by their name in TrainConfig; the others are free."""
    bounds_rank: bool = False
    """Whether adapters are left out whose rank is more than their narrowest layer is wide."""

    def of(self, config: TrainConfig) -> TrainConfig:
        """The same configuration with this case's length and settings."""
        return dataclasses.replace(config, sequence_length=self.sequence_length, **self.fixed)


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitProblem:
    """A question for a limit, looked up. The value that it asks for is not read."""

    question: Question
    source: ModelSource | None
    """The model; None where it is what is asked for."""
    card: ChosenCard | None
    """The card and the budget; None where it is what is asked for."""
    headroom: Headroom
    """The room that a predicted peak leaves in the budget."""
    host_memory_bytes: int | None = None
    """Bytes of host memory that may be taken; None: any."""
    sequence_length: int
    methods: tuple[str, ...]
    space: SearchSpace
    multiple_of: int = 64
    """Step in which sequence lengths are tried."""
    num_gpus: int = 1
    """GPUs that share the run, each with the budget."""
    dataset: Dataset | None = None
    lengths: Lengths | None = None
    """The samples of the dataset; None: every one is as long as the sequence."""


class Pricer:
    """Prices Cases of one question."""

    def __init__(self, asked: LimitProblem, server: ForkServer, progress: Progress) -> None:
        self._asked = asked
        self._server = server
        self._cache = TraceCache()
        self._progress = progress
        self._traces: dict[tuple[object, ...], dict[TraceSpec, Trace | SharedTrace]] = {}
        """Traces by what else changes them."""
        self._refused: dict[tuple[object, ...], set[TraceSpec]] = {}
        self._estimators: dict[tuple[object, ...], Estimator] = {}
        self._refusals: dict[tuple[object, ...], ConfigError] = {}
        self._points: dict[tuple[object, ...], _Points] = {}
        """Valid configurations by all that they depend on: cards of one compute capability share them."""
        self._narrowest = functools.cache(narrowest_layer)
        self._num_tried = 0

    @property
    def host_memory_bytes(self) -> int | None:
        """Bytes of host memory that may be taken; None: any."""
        return self._asked.host_memory_bytes

    @property
    def num_traces(self) -> int:
        return sum(map(len, self._traces.values()))

    def task(self, case: Case) -> str:
        return self._asked.question.task or case.source.task

    def is_possible(self, case: Case) -> bool:
        """Whether any configuration is valid there."""
        return bool(self._enumerate(case)[0])

    def fitting(self, case: Case) -> Estimate | None:
        """One that fits, by the thriftiest settings; None when nothing does."""
        ladders = self._ladders(case, prune=True)
        # What mostly needs least comes first: where it fits, the others need no trace.
        self._num_tried += 1
        for some in filter(None, _likely_least(ladders)):
            estimator, configs = self._thriftiest(case, some)
            self._progress("tried", self._num_tried, self.num_traces)
            # How much room is left differs: what needs less may not fit where what needs more does.
            # Of longer sequences more fit where less is kept on the device and between blocks.
            for config in sorted(
                filter(estimator.may_fit, configs),
                key=lambda c: (not c.activation_offloading, not c.expandable_segments),
            ):
                if (estimate := estimator.fitting(config)) is not None:
                    return estimate
        return None

    def refusal(self, case: Case) -> ConfigError | None:
        """Why the model cannot be traced there at all; None where it can, or was not asked to be."""
        key = self._key(case)
        return None if self._traces.get(key) else self._refusals.get(key)

    def smallest(self, case: Case) -> tuple[Estimate, int]:
        """Return the estimate that needs the least budget by a full replay, and that budget, room included.

        Raises ConfigError where there is nothing to price.
        """
        ladders = self._ladders(case, prune=False)
        # Of the others only those are traced that could need less.
        estimator, configs = self._thriftiest(case, _likely_least(ladders)[0])
        least = smallest(estimator, estimator.least_of_host(configs))
        if least is not None:
            needed = dataclasses.replace(case, budget_bytes=least[1])
            ladders = [
                ladder
                for ladder in ladders
                if not all(self._is_hopeless(needed, config) for config in ladder[0].configs)
            ]
        estimator, configs = self._thriftiest(case, ladders)
        least = smallest(estimator, estimator.least_of_host(configs))
        if least is None:
            raise self.refusal(case) or self._no_configuration(case)
        return least

    def room_for(self, case: Case, config: TrainConfig) -> int:
        """Bytes of the case's budget that the configuration's peak may take."""
        return self._estimator(case, []).room_for(case.of(config))

    def peak_bytes(self, case: Case, config: TrainConfig) -> int:
        """Return the peak of this configuration at this case's value.

        Where a larger share of the host's memory is taken than of the card's: that share of the card's.
        """
        config = case.of(config)
        self._num_tried += 1
        estimator = self._estimator(case, [config])
        self._progress("tried", self._num_tried, self.num_traces)
        estimate, limit_bytes = estimator.estimate(config), self.host_memory_bytes
        if limit_bytes is None or not estimate.all_host_bytes:
            return estimate.peak_device_bytes
        # As with a limit of 1 byte where none may be taken: it is beyond any.
        share = estimate.all_host_bytes / max(limit_bytes, 1)
        return max(estimate.peak_device_bytes, math.ceil(share * estimator.room_for(config)))

    def best(self, case: Case) -> tuple[Estimate, Estimate | None]:
        """The fastest that fits, of any form, then the same with a second micro-batch per step.

        The second is None where it cannot be. Where the card's rates are unknown: the one that needs least.
        """
        best = self._fastest(case) or self.smallest(case)[0]
        accumulation = max(2, best.config.gradient_accumulation_steps)
        config = dataclasses.replace(best.config, gradient_accumulation_steps=accumulation)
        context = Context(
            effective_batch_size=config.effective_batch_size,
            compute_capability=case.gpu.compute_capability,
        )
        if broken_rules(config, context):
            return best, None
        return best, self._estimator(case, []).estimate(config)

    def _fastest(self, case: Case) -> Estimate | None:
        """The fastest that fits; None where none does, or where the card's rates are unknown."""
        base = default_base(self.workload(case), case.gpu, case.source)
        for parts in (False, True):  # the loss in parts takes time: for what fits with it alone
            estimator, configs = self._possible(case, parts=parts)
            try:
                best = Candidates(estimator, configs, base).further(lambda _: True)
            except HardwareError:
                return None
            if best is not None:
                return best
        return None

    def widest(self, case: Case) -> int:
        """Width of the narrowest layer that is adapted, where the settings leave it widest.

        A layer's width is the lesser of its inputs and outputs: a higher rank adds nothing to it. Raises
        ConfigError where nothing can be traced.
        """
        ladders = self._ladders(case, prune=False, parts=False)
        ladders = ladders or self._ladders(case, prune=False, parts=True)
        _, configs = self._thriftiest(case, ladders)
        if not configs:
            raise self.refusal(case) or self._no_configuration(case)
        traces = self._traces[self._key(case)]
        return max(self._narrowest(traces[TraceSpec.of(config)]) for config in configs)

    def holds_weights(self, case: Case) -> bool:
        """Whether the budget holds the weights of any valid configuration, and its gradients."""
        return not all(self._is_hopeless(case, config) for config in self._enumerate(case)[0])

    def _supported(
        self, case: Case, estimator: Estimator, configs: Iterable[TrainConfig]
    ) -> list[TrainConfig]:
        """List what the model could be traced with, and whose rank adds something to every layer."""
        supported = list(filter(estimator.supports, configs))
        if not case.bounds_rank:
            return supported
        traces = self._traces[self._key(case)]
        return [
            config
            for config in supported
            if (config.lora_rank or 0) <= self._narrowest(traces[TraceSpec.of(config)])
        ]

    def _thriftiest(
        self, case: Case, ladders: list[_Ladder]
    ) -> tuple[Estimator, list[TrainConfig]]:
        """The thriftiest settings that the model supports, of each structure; least memory first."""
        thriftiest: list[TrainConfig] = []
        while ladders:
            estimator = self._estimator(case, _first_rungs(ladders))
            left = []
            for rung, *later in ladders:
                supported = self._supported(case, estimator, rung.configs)
                thriftiest += supported
                if later and not supported:
                    left.append(later)
            ladders = left
        estimator = self._estimator(case, [])
        return estimator, sorted(thriftiest, key=lambda c: (estimator.floor_bytes(c), repr(c)))

    def _possible(self, case: Case, *, parts: bool) -> tuple[Estimator, list[TrainConfig]]:
        """Return the configurations whose live tensors fit; what needs more than a misfit is not traced.

        Whether one fits is asked only where a misfit would spare a trace.
        """
        ladders = self._ladders(case, prune=True, parts=parts)
        possible: list[TrainConfig] = []
        while ladders:
            estimator = self._estimator(case, _first_rungs(ladders))
            left = []
            for rung, *later in ladders:
                supported = self._supported(case, estimator, rung.configs)
                possible += filter(estimator.may_fit, supported)
                other = [more for more in later if not more.covers(rung)]
                if supported and self._spares_traces(case, later, other):
                    least = min(supported, key=estimator.floor_bytes)
                    if not estimator.may_fit(least) or estimator.fitting(least) is None:
                        later = other
                if later:
                    left.append(later)
            ladders = left
        return self._estimator(case, []), possible

    def _spares_traces(self, case: Case, ladder: _Ladder, part: _Ladder) -> bool:
        """Whether the part of a ladder needs fewer further traces than the whole."""
        spared = _specs(ladder) - _specs(part)
        return bool(spared - self._traces[self._key(case)].keys() - self._refused[self._key(case)])

    def _ladders(self, case: Case, *, prune: bool, parts: bool | None = None) -> list[_Ladder]:
        """The configurations of each structure by thrift.

        `prune`: without the hopeless ones. `parts`: with the loss in parts alone, or without; None: both.
        """
        groups: dict[tuple[object, ...], dict[tuple[int, ...], list[TrainConfig]]] = {}
        for config in self._enumerate(case)[0]:
            is_wanted = parts is None or config.chunked_loss is parts
            if is_wanted and not (prune and self._is_hopeless(case, config)):
                rungs = groups.setdefault(_structure(config), {})
                rungs.setdefault(thrift(config), []).append(config)
        by_weights = sorted(groups.values(), key=lambda rungs: least_bytes(_any_of(rungs), 10**9))
        varied = self._asked.lengths is not None
        return [
            [
                _Rung(
                    needs=needs,
                    configs=configs,
                    specs=frozenset[TraceSpec]().union(
                        *(specs_for(each, varied=varied) for each in configs)
                    ),
                )
                for needs, configs in sorted(rungs.items())
            ]
            for rungs in by_weights
        ]

    def _no_configuration(self, case: Case) -> ConfigError:
        _, broken, reasons = self._enumerate(case)
        return ConfigError(
            f"The space {self._asked.space.name} has no valid configuration for these settings",
            why=why_none_is_valid(reasons, broken, self._asked.methods),
            remedy="Fix fewer of them, or name another --space",
        )

    def _enumerate(self, case: Case) -> _Points:
        """Valid configurations; how many others break which rule; the reasons that all of them have."""
        key = (
            case.source.name,
            case.sequence_length,
            case.gpu.compute_capability,
            *case.fixed.items(),
        )
        found = self._points.get(key)
        if found is None:
            found = self._points[key] = self._find_points(case)
        return found

    def _find_points(self, case: Case) -> _Points:
        space = with_checkpoint(self._asked.space, case.source.checkpoint)
        usual = default_base(self.workload(case), case.gpu, case.source)
        space = with_trainers(space, self.task(case), usual)
        space = with_batchings(space, self.workload(case))
        space = with_attentions(space, case.source.attentions, case.gpu.compute_capability)
        space = narrowed(space, {**self._asked.question.settings, **case.fixed})
        configs: list[TrainConfig] = []
        invalid: dict[str, int] = {}
        reasons: list[tuple[str, ...]] = []
        for size in sorted(
            {n for section in space.methods for n in section.domains["micro_batch_size"]}
        ):
            of_size = narrowed(space, {"micro_batch_size": size}, only_where_offered=True)
            for num_parallel, alike in by_data_parallel_size(of_size, self._asked.num_gpus):
                points = enumerate_configs(
                    alike,
                    self.workload(case, size * num_parallel),
                    num_layers=case.source.num_layers,
                    compute_capability=case.gpu.compute_capability,
                    head_size=case.source.head_size,
                    checkpoint=case.source.checkpoint,
                )
                configs += points.configs
                reasons.append(points.reasons)
                for name, count in points.invalid.items():
                    invalid[name] = invalid.get(name, 0) + count
        in_all = [
            each for of in reasons[:1] for each in of if all(each in said for said in reasons)
        ]
        return configs, invalid, in_all

    def workload(self, case: Case, micro_batch: int | None = None) -> Workload:
        """The case as a workload with so many samples in all GPUs' micro-batches together; None: one each."""
        lengths = self._asked.lengths
        return Workload(
            model=case.source.name,
            task=self.task(case),
            sequence_length=case.sequence_length,
            effective_batch_size=(micro_batch or self._asked.num_gpus)
            * (self._asked.question.accumulation or 1),
            num_gpus=self._asked.num_gpus,
            methods=self._asked.methods,
            memory_budget_bytes=case.budget_bytes,
            dataset=self._asked.dataset,
            lengths=None if lengths is None else lengths.cut(case.sequence_length),
        )

    def _is_hopeless(self, case: Case, config: TrainConfig) -> bool:
        """Weights, gradients and logits alone pass the budget, which needs no trace."""
        count = room.num_said(case.source, self.task(case))
        vocab_size = room.vocab_size_of(case.source, self.task(case))
        return count is not None and least_bytes(config, count, vocab_size) > case.budget_bytes

    def _key(self, case: Case) -> tuple[object, ...]:
        return case.source.name, case.sequence_length, *of_card(case.gpu).values()

    def _estimator(self, case: Case, configs: Iterable[TrainConfig]) -> Estimator:
        """Prices these configurations, as far as the model supports them, and those before."""
        key = self._key(case)
        traces = self._traces.setdefault(key, {})
        refused = self._refused.setdefault(key, set())
        workload = self.workload(case)
        varied = workload.lengths is not None
        wanted = set[TraceSpec]().union(*(specs_for(config, varied=varied) for config in configs))
        missing = wanted - traces.keys() - refused
        if missing:
            try:
                traces |= trace_all(
                    case.source,
                    self.task(case),
                    case.sequence_length,
                    case.gpu,
                    missing,
                    num_gpus=self._asked.num_gpus,
                    server=self._server,
                    cache=self._cache,
                    on_trace=functools.partial(self._progress, "trace"),
                )
            except ConfigError as error:
                self._refusals[key] = error
            refused |= missing - traces.keys()
        # What an estimator has priced stays priced when traces are added.
        estimator = self._estimators.get((*key, case.gpu.name))
        if estimator is None:
            estimator = Estimator(
                traces,
                case.gpu,
                memory_budget_bytes=case.budget_bytes,
                headroom=self._asked.headroom,
                host_memory_bytes=self.host_memory_bytes,
                filling=workload.filling if varied else None,
                replays=self._cache.replays(),
            )
            self._estimators[*key, case.gpu.name] = estimator
        return estimator


def narrowed(
    space: SearchSpace, fixed: Mapping[str, Any], *, only_where_offered: bool = False
) -> SearchSpace:
    """The space with these settings fixed. `only_where_offered`: sections without the value go."""
    sections = []
    for section in space.methods:
        offered = section.domains
        if only_where_offered and any(fixed[name] not in offered[name] for name in fixed):
            continue
        values = {name: (value,) for name, value in fixed.items()}
        sections.append(dataclasses.replace(section, domains={**offered, **values}))
    return dataclasses.replace(space, methods=tuple(sections))


_THRIFTY = ("single", "activation_checkpointing", "activation_offloading")
_unlike = operator.attrgetter(
    *(each.name for each in dataclasses.fields(TraceSpec) if each.name not in _THRIFTY)
)


def _structure(config: TrainConfig) -> tuple[object, ...]:
    """Settings in which traces differ, beside thrift."""
    found: tuple[object, ...] = _unlike(TraceSpec.of(config))
    return found


def thrift(config: TrainConfig) -> tuple[int, ...]:
    """Configurations of one structure need no less memory than those that are lower in all of these."""
    interval = config.activation_checkpointing or _FAR
    return config.micro_batch_size, interval, config.lora_rank or 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rung:
    """Configurations of one structure that need alike."""

    needs: tuple[int, ...]
    """Their `thrift`."""
    configs: list[TrainConfig]
    specs: frozenset[TraceSpec]
    """The traces that price them."""

    def covers(self, other: _Rung) -> bool:
        """Whether these need no less than those of the other rung."""
        return all(a >= b for a, b in zip(self.needs, other.needs, strict=True))


_Ladder = list[_Rung]
"""Configurations of one structure, by thrift."""


def _likely_least(ladders: list[_Ladder]) -> tuple[list[_Ladder], list[_Ladder]]:
    """The ladders of the least weights, with the loss in parts where it can be, and the others."""

    def key(rungs: _Ladder) -> tuple[object, ...]:
        config = rungs[0].configs[0]
        return not config.chunked_loss, least_bytes(config, 10**9)

    keys = list(map(key, ladders))
    least: list[_Ladder] = []
    others: list[_Ladder] = []
    for found, rungs in zip(keys, ladders, strict=True):
        (least if found == min(keys) else others).append(rungs)
    return least, others


def _any_of(rungs: Mapping[tuple[int, ...], list[TrainConfig]]) -> TrainConfig:
    return next(iter(rungs.values()))[0]


def _first_rungs(ladders: Iterable[_Ladder]) -> list[TrainConfig]:
    return [config for ladder in ladders for config in ladder[0].configs]


def _specs(ladder: _Ladder) -> frozenset[TraceSpec]:
    return frozenset[TraceSpec]().union(*(rung.specs for rung in ladder))
