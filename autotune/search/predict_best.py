"""The funnel: a workload, a space and a card -> the fastest configuration predicted to fit.

Enumerate, trace once per structure, price every point, replay what could win.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

from autotune.catalogue.gpus import Gpu
from autotune.catalogue.models import ModelSource
from autotune.common import log
from autotune.errors import ConfigError, NothingFitsError, WorkerError
from autotune.memory.traces import Trace
from autotune.predict.estimator import Estimator
from autotune.predict.sharding.shared_trace import SharedTrace
from autotune.predict.trace_servers import trace_server
from autotune.predict.traces_ahead import TracesAhead, traces_ahead
from autotune.predict.tracing import asked_of_all, share_known, trace_all
from autotune.records.answer import TRAINER_DEFAULTS, USERS_BASE, Answer, Counts
from autotune.records.estimate import Estimate, TraceSpec, and_several
from autotune.search import beside, compiled_candidates, room, tried_on_best
from autotune.search.candidates import Candidates
from autotune.search.choice import Choice, first_that_fits, lacks_on_host
from autotune.search.first_answers import FirstAnswers
from autotune.search.listener import Progress
from autotune.search.nothing_fits import none_of_class, nothing_fits
from autotune.search.prediction import EFFORTS, Prediction
from autotune.search.refused import refused_kinds
from autotune.search.searched_space import SearchedSpace, context_of, points_of, searched_space
from autotune.search.solved_checkpointing import families_of
from autotune.search.tips import best_tip
from autotune.search.traced_in_turn import TracesInTurn
from autotune.space.config import TRADEOFF_CLASSES, TrainConfig, Workload
from autotune.space.defaults import default_base, larger_micro_batches
from autotune.space.enumeration import Enumeration
from autotune.space.headroom import VARIED_SHARE
from autotune.space.requirements import LeftOut
from autotune.space.rules import broken_rules
from autotune.space.search_space import SearchSpace, with_parts
from autotune.space.space_changes import SpaceChange
from autotune.space.tradeoffs import LEVEL
from autotune.store.trace_cache import TraceCache
from autotune.worker.client.forkserver import ForkServer

_log = log.logger(__name__)


def find(
    model: ModelSource,
    workload: Workload,
    space: SearchSpace,
    gpu: Gpu,
    *,
    gpu_reason: str = "",
    allow: str | None = None,
    base: TrainConfig | None = None,
    has: TrainConfig | None = None,
    effort: str = "normal",
    progress: Progress = lambda *_: None,
    so_far: Callable[[Estimate], None] | None = None,
    meanwhile: Callable[[], None] | None = None,
    cache: TraceCache | None = None,
    changes: Sequence[SpaceChange] = (),
    traces_all: bool = False,
    varied_share: float = VARIED_SHARE,
) -> Prediction:
    """Answer a workload by prediction.

    `allow` None: numerics, raised to recipe where nothing else fits, or what does works from host memory.
    `base` None: default_base. What `has` needs is taken for installed. `so_far` hears of the best so far
    while others are traced; `meanwhile` is called once, while the first worker starts.
    `changes` is what has become of the space before. `traces_all`: also what is slower by its bound than what
    fits, for who doubts predictions.
    `varied_share`: of what is reserved, that stays free for the pieces that varied lengths leave.
    Raises NothingFitsError with the smallest estimate, ConfigError for a space without valid points,
    HardwareError for a card whose speed is unknown.
    """
    started = time.monotonic()
    progress = log.stages(_log, progress)
    reference = base or default_base(workload, gpu, model)
    searched = searched_space(
        space, workload, gpu, model, reference=reference, base=base, has=has, changes=changes
    )
    points = points_of(searched.space, workload, gpu, model, reference)
    progress("space", len(points.configs), points.num_enumerated)
    if reference.method == "peft" and reference.peft is None:
        reference = dataclasses.replace(reference, peft=points.configs[0].peft)
    search = _Search(
        model,
        workload,
        gpu,
        searched,
        points,
        reference,
        choice=Choice(allow=allow, has_base=base is not None),
        baselines=larger_micro_batches(reference) if base is None else [base],
        cache=cache,
        progress=progress,
        meanwhile=meanwhile,
        # Compiled, a step that saves memory may be faster than any that is not compiled.
        traces_all=traces_all or searched.compiles,
        varied_share=varied_share,
    )
    candidates = search.traced(so_far)
    if searched.compiles:
        candidates = search.with_compiled(candidates)
    return Prediction(
        search.answer(candidates, space=space.name, gpu_reason=gpu_reason, started=started),
        candidates,
        search.estimator,
        smallest_base=search.baselines[-1],
        ways_to_compile=searched.ways_to_compile,
        num_considered=EFFORTS[effort].num_recorded,
        context=search.context,
    )


class _Search:
    """A search under way: what of its configurations is traced, and what they are priced with."""

    def __init__(
        self,
        model: ModelSource,
        workload: Workload,
        gpu: Gpu,
        searched: SearchedSpace,
        points: Enumeration,
        reference: TrainConfig,
        *,
        choice: Choice,
        baselines: Sequence[TrainConfig],
        cache: TraceCache | None,
        progress: Progress,
        meanwhile: Callable[[], None] | None,
        traces_all: bool,
        varied_share: float,
    ) -> None:
        """Remember what is asked; nothing is traced. `reference`: what classes are measured against."""
        self.baselines = baselines
        self.context = context_of(workload, gpu, model)
        self._model, self._workload, self._gpu = model, workload, gpu
        self._searched, self._points = searched, points
        self._reference, self._choice = reference, choice
        self._cache, self._progress, self._meanwhile = cache, progress, meanwhile
        self._traces_all = traces_all
        self._is_varied = workload.lengths is not None
        self._traces: dict[TraceSpec, Trace | SharedTrace] = {}
        self._refused: dict[TraceSpec, str] = {}
        self._server: ForkServer | None = None
        self._ahead: TracesAhead | None = None
        self._first_answers: FirstAnswers | None = None
        self.estimator = Estimator(
            self._traces,
            gpu,
            memory_budget_bytes=workload.memory_budget_bytes,
            headroom=workload.headroom,
            host_memory_bytes=workload.host_memory_bytes,
            filling=workload.filling if self._is_varied else None,
            replays=None if cache is None else cache.replays(),
            prices=None if cache is None else cache.prices(),
            varied_share=varied_share,
        )
        self._possible = room.possible(points.configs, model, workload)
        self._is_hopeless = room.is_hopeless(points.configs, model, workload)
        if self._is_hopeless:  # Only what is lacking is to be said.
            self._possible = room.smallest(
                self._possible, model, base=reference, allow=choice.allow
            )
        self._in_turn = self._new_turns()
        self._baseline: Estimate | None = None
        self._base_beside: list[TrainConfig] = []
        """The base, where it is a candidate and no point: its micro-batch may be larger than the space's."""
        self._added: list[TrainConfig] = []
        """Configurations that are no points: plans of checkpointing, the loss in parts."""
        self._compiled: list[TrainConfig] = []
        self._not_compiled: Sequence[LeftOut] = ()
        self._chosen = TRADEOFF_CLASSES[-1]
        self._best: Estimate | None = None

    def _new_turns(self) -> TracesInTurn:
        return TracesInTurn(
            self._possible, self._reference, self.estimator, self._trace, is_all=self._traces_all
        )

    def traced(self, so_far: Callable[[Estimate], None] | None) -> Candidates:
        """Trace what may be the answer, and what is tried on the best alone; return the candidates.

        `so_far` hears of the best so far. Raises ConfigError where the model supports none of them.
        """
        if so_far is not None:
            look = functools.partial(
                self._choice.so_far,
                self.estimator,
                self._possible,
                self.baselines,
                self._reference,
            )
            self._first_answers = FirstAnswers(look, so_far)
        specs = {TraceSpec.of(config) for config in [*self._possible, *self.baselines]}
        # More is traced once the first are priced: what imports once does for all.
        self._server = trace_server(specs)
        with traces_ahead(self._server, self._asked_of_all(), self._cache) as self._ahead:
            candidates = self._candidates(self._first())
            candidates = self._in_turn.rest(candidates, besides=self._likely_next)
            self._choose(candidates)
            candidates, self._added = tried_on_best.tried(
                candidates, self._priced_points(), self.estimator, self._traces, self._to_try
            )
            self._choose(candidates)
            plan_b = self._choice.plan_b(candidates, self._workload)
            candidates = self._in_turn.where(candidates, plan_b)
            self._trace_as_base_shares()
            self._trace_ahead(candidates)
        self._server = None
        self.estimator.keep_prices()
        return candidates

    def with_compiled(self, candidates: Candidates) -> Candidates:
        """Return these candidates and the best of them compiled, which is traced."""
        supported = [*self._priced_points(), *self._added]
        self._compiled, self._not_compiled = compiled_candidates.compiled_configs(
            candidates,
            [*supported, *self._base_beside],
            self._searched.ways_predicted,
            allow=self._choice.allow,
            trace=self._trace,
            traces=self._traces,
        )
        candidates = Candidates(
            self.estimator, [*supported, *self._compiled, *self._base_beside], self._reference
        )
        self._choose(candidates)
        return candidates

    def _choose(self, candidates: Candidates) -> None:
        self._chosen, self._best = self._choice.of(candidates)

    def _priced_points(self) -> list[TrainConfig]:
        """Return the points of which steps are traced."""
        return list(filter(self.estimator.supports, self._possible))

    def _asked_of_all(self) -> dict[str, Any]:
        """Return what a request says of all traces of the search."""
        workload = self._workload
        return asked_of_all(
            self._model,
            workload.task,
            workload.sequence_length,
            self._gpu,
            workload.pictures,
            workload.teacher,
        )

    def _trace(self, specs: set[TraceSpec]) -> None:
        """Make the traces that are not there. Raises ConfigError where the model supports none of them."""
        if self._is_varied:
            specs = specs.union(*map(and_several, specs))
        specs = specs - self._traces.keys()
        if not specs and self._traces:
            return
        if self._ahead is not None:
            self._ahead.stop()
        workload = self._workload
        trace_all(
            self._model,
            workload.task,
            workload.sequence_length,
            self._gpu,
            specs,
            num_gpus=workload.num_gpus,
            pictures=workload.pictures,
            teacher=workload.teacher,
            on_trace=self._on_trace,
            server=self._server,
            cache=self._cache,
            found=self._traces,
            refused=self._refused,
            meanwhile=None if self._traces else self._meanwhile,
        )

    def _on_trace(self, done: int, total: int) -> None:
        self._progress("trace", done, total)
        if self._first_answers is not None and done < total:
            self._first_answers.look()

    def _first(self) -> list[TrainConfig]:
        """Trace what nothing bounds, and the base; return the configurations that can be priced."""
        model, workload = self._model, self._workload
        is_crowded = functools.partial(room.is_crowded, model=model, workload=workload)
        try:
            others = [] if self._is_hopeless else map(TraceSpec.of, self.baselines)
            supported = self._in_turn.first(*others, is_crowded=is_crowded)
        except ConfigError:
            if not self._is_hopeless:
                raise
            self._possible = self._points.configs  # The smallest cannot be traced: others may be.
            self._in_turn = self._new_turns()
            supported = self._in_turn.first(is_crowded=is_crowded)
        if room.num_said(model, workload.task) is None:
            is_possible = room.is_possible(model, workload, room.num_traced(self._traces))
            with_room = list(filter(is_possible, self._possible))
            if any(map(self.estimator.supports, with_room)):
                self._in_turn.leave_out(is_possible)
                self._possible = with_room
        return supported

    def _candidates(self, supported: Sequence[TrainConfig]) -> Candidates:
        """Return the candidates of what is traced so far, and the base that they are measured against."""
        self._baseline = first_that_fits(self.estimator, self.baselines)
        if self._baseline is not None:
            base = self._reference = self._baseline.config
            if (
                base not in supported
                and self._searched.space.offers(base)
                and room.is_possible(self._model, self._workload)(base)
            ):
                self._base_beside = [base]
        return Candidates(self.estimator, [*supported, *self._base_beside], self._reference)

    @property
    def _to_try(self) -> tried_on_best.Tried:
        """The settings that are tried on the best alone."""
        searched = self._searched
        return tried_on_best.Tried(
            solving=frozenset() if self._is_hopeless else searched.solving,
            parting=frozenset() if self._is_hopeless else searched.parting,
            allow=self._choice.allow,
            context=self.context,
            trace=self._trace,
            on_all_traced=self._trace_ahead,
        )

    def _trace_ahead(self, candidates: Candidates) -> None:
        """Trace what a later question may ask for while nothing else is."""
        if self._ahead is not None:
            self._ahead.go_on(functools.partial(self._likely_later, candidates))

    def _likely_next(self, candidates: Candidates) -> set[TraceSpec]:
        """Return the specs that are likely to be asked for once these candidates are priced."""
        configs = self._priced_points()
        families = families_of(
            candidates,
            configs,
            self.estimator,
            methods=self._searched.solving,
            allow=self._choice.allow,
        )
        # What may not be chosen anyway waits until the answer's own best is known.
        plans = (each.specs() for each in families if each.answer is not None)
        _, best = self._choice.of(candidates)
        in_parts = list[TraceSpec]()
        if best is not None and tried_on_best.parts_may_pay(best, configs, self.estimator):
            in_parts = tried_on_best.specs_in_parts(best, self._to_try)
        plan_b = self._choice.plan_b(candidates, self._workload)
        return self._in_turn.passed_over_of(plan_b).union(in_parts, *plans)

    def _likely_later(self, candidates: Candidates) -> list[TraceSpec]:
        """Return the specs that a later question may ask for, the likeliest first."""
        _, best = self._choice.of(candidates)
        return [
            *tried_on_best.likely_later(candidates, best, self._to_try),
            *self._in_turn.left(),
        ]

    def _nothing_fits(
        self,
        best_by_class: dict[str, Estimate],
        left_out: Sequence[LeftOut],
        is_allowed: Callable[[TrainConfig], bool],
    ) -> NothingFitsError:
        """Return the error where no configuration of the class that is chosen fits."""
        model, workload = self._model, self._workload
        allowed = list(filter(is_allowed, [*self._priced_points(), *self._added, *self._compiled]))
        if not allowed:
            wanted = list(filter(is_allowed, self._points.configs))
            return none_of_class(
                self._chosen,
                wanted,
                self._reference,
                model,
                workload,
                best_by_class,
                self._refused,
            )
        return nothing_fits(
            self.estimator,
            allowed,
            model,
            workload,
            best_by_class,
            left_out,
            context=self.context,
            share=self._share,
            is_hopeless=self._is_hopeless,
        )

    def _trace_as_base_shares(self) -> None:
        """Trace the best as the base shares it out, which may be too large: what it lacks is said."""
        if self._best is None or self._workload.num_gpus == 1:
            return
        shared = dataclasses.replace(self._best.config, parallelism=self._reference.parallelism)
        if broken_rules(shared, self.context):
            return
        spec = TraceSpec.of(shared)
        self._share(spec)
        if spec not in self._traces:
            with contextlib.suppress(ConfigError, WorkerError):  # The answer does without it.
                self._trace({spec})

    def _share(self, spec: TraceSpec) -> None:
        """Make the trace of a shared run, where it follows from one that is there."""
        if spec not in self._traces:
            num_gpus = self._workload.num_gpus
            share_known(self._model, spec, self._gpu, self._traces, num_gpus=num_gpus)

    def answer(
        self, candidates: Candidates, *, space: str, gpu_reason: str, started: float
    ) -> Answer:
        """Return the answer. Raises NothingFitsError.

        `space`: its name; `started`: when the search began, by time.monotonic.
        """
        workload, searched = self._workload, self._searched
        estimator, reference = self.estimator, self._reference
        chosen, best = self._chosen, self._best
        is_allowed = candidates.at_most(chosen)
        supported = [*self._priced_points(), *self._added, *self._compiled]
        left_out = (
            *searched.left_out,
            *self._not_compiled,
            *refused_kinds(searched.methods, supported, self._refused),
        )
        num_possible = candidates.num_possible - len(self._base_beside)
        num_looked_at = len(self._points.configs if self._is_hopeless else supported)
        self._progress("priced", num_possible, num_looked_at)
        of_classes = {name: candidates.best(candidates.exactly(name)) for name in TRADEOFF_CLASSES}
        best_by_class = {name: each for name, each in of_classes.items() if each is not None}
        if best is None:
            raise self._nothing_fits(best_by_class, left_out, is_allowed)
        is_in_form = candidates.in_form_of(best.config)

        def is_like_it(config: TrainConfig) -> bool:
            return is_in_form(config) and is_allowed(config)

        self._progress("replayed", candidates.num_replayed, num_possible)
        return Answer(
            workload=workload,
            gpu=self._gpu.name,
            gpu_reason=gpu_reason,
            space=space,
            allow=chosen,
            widened=self._choice.allow is None and chosen == "recipe",
            best=best,
            best_class=candidates.class_of(best.config),
            base=reference,
            baseline=self._baseline,
            best_by_class=best_by_class,
            further=candidates.further(lambda _: True, best, *best_by_class.values()),
            tied=candidates.tied(best, is_allowed),
            changes=beside.changes(estimator, best, reference, self.context),
            safer=beside.safer(
                estimator, candidates, supported, best.config, backend=self._gpu.backend
            ),
            more_memory=beside.more_memory(
                estimator,
                supported,
                reference,
                best,
                is_allowed,
                fastest_now=candidates.fastest(is_allowed),
            ),
            fewer_gpus=beside.fewer_gpus(estimator, best),
            reaches_experts=beside.reaches_experts(best, self._model),
            tip=best_tip(
                best,
                self._model,
                with_parts(searched.space, searched.parting),
                self.context,
                chosen,
                gpu=self._gpu,
                memory_budget_bytes=workload.memory_budget_bytes,
                of_classes=[e for name, e in best_by_class.items() if LEVEL[name] <= LEVEL[chosen]],
            ),
            counts=self._counts(candidates, num_possible, len(supported)),
            invalid_by_rule=self._points.invalid,
            classes_outside=tuple(
                name
                for name in TRADEOFF_CLASSES
                if not any(map(candidates.exactly(name), self._points.configs))
            ),
            left_out=left_out,
            elapsed_seconds=time.monotonic() - started,
            base_name=USERS_BASE if self._choice.has_base else TRAINER_DEFAULTS,
            is_base_offered=searched.space.offers(reference),
            base_refused=""
            if self._baseline
            else self._refused.get(TraceSpec.of(self.baselines[-1]), ""),
            base_lacks_on_host_bytes=0
            if self._baseline
            else lacks_on_host(estimator, self.baselines[-1]),
            sureness=candidates.sureness(best, is_like_it),
            space_changes=tuple(map(str, searched.changes)),
            compilation=compiled_candidates.compilation(candidates, is_like_it)
            if self._compiled
            else None,
        )

    def _counts(self, candidates: Candidates, num_possible: int, num_supported: int) -> Counts:
        points, num_passed_over = self._points, self._in_turn.num_passed_over
        num_added = len(self._added) + len(self._compiled)
        num_known = len(self._possible) + num_added
        return Counts(
            enumerated=points.num_enumerated + num_added,
            invalid=points.num_enumerated - len(points.configs),
            unsupported=num_known - num_supported - num_passed_over,
            passed_over=num_passed_over,
            predicted_oom=len(points.configs)
            - len(self._possible)
            + num_supported
            - num_possible
            + candidates.num_replayed_oom,
            feasible=num_possible - candidates.num_replayed_oom,
            replayed=candidates.num_replayed,
        )
