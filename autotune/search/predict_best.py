"""The funnel: a workload, a space and a card -> the fastest configuration predicted to fit.

Enumerate, trace once per structure, price every point, replay what could win.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autotune.catalogue.gpus import Gpu
from autotune.catalogue.installed import is_installed
from autotune.catalogue.models import ModelSource
from autotune.common import log
from autotune.errors import ConfigError, HardwareError
from autotune.memory.traces import Trace
from autotune.predict.estimator import Estimator
from autotune.predict.sharding.shared_trace import SharedTrace
from autotune.predict.trace_servers import trace_server
from autotune.predict.traces_ahead import traces_ahead
from autotune.predict.tracing import asked_of_all, share_known, trace_all
from autotune.probe import compiled
from autotune.records.answer import (
    FAR_FASTER,
    TRAINER_DEFAULTS,
    USERS_BASE,
    Answer,
    Change,
    Counts,
)
from autotune.records.charts import Details
from autotune.records.estimate import Estimate, TraceSpec, and_several
from autotune.search import beside, compiled_candidates, room, tried_on_best, waterfall
from autotune.search.candidates import Candidates, goes_on_from
from autotune.search.first_answers import FirstAnswers
from autotune.search.nothing_fits import none_of_class, nothing_fits, why_none_is_valid
from autotune.search.solved_checkpointing import LEAST_LAYERS, families_of
from autotune.search.tips import best_tip
from autotune.search.traced_in_turn import TracesInTurn
from autotune.space.config import TRADEOFF_CLASSES, TrainConfig, Workload
from autotune.space.defaults import default_base, larger_micro_batches
from autotune.space.enumeration import enumerate_configs
from autotune.space.headroom import VARIED_SHARE
from autotune.space.knobs import METHOD_WORDS
from autotune.space.requirements import LeftOut, Reason, predictable
from autotune.space.rules import Context, broken_rules
from autotune.space.search_space import (
    MethodSpace,
    SearchSpace,
    for_gpus,
    with_attentions,
    with_batchings,
    with_checkpoint,
    with_parts,
    with_precision_of,
    with_trainers,
    without_intervals,
    without_parts,
    without_solve,
)
from autotune.space.space_changes import Changing, SpaceChange
from autotune.space.tradeoffs import LEVEL
from autotune.space.trainers import BY_TASK, TRAINERS
from autotune.store.trace_cache import TraceCache
from autotune.worker.client.forkserver import ForkServer

_log = log.logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How much a search may cost."""

    num_recorded: int
    """Configurations that the study keeps, best first."""
    max_probes: int
    """Most probes, if any are made."""


EFFORTS = {
    "quick": Effort(num_recorded=20, max_probes=6),
    "normal": Effort(num_recorded=60, max_probes=20),
    "thorough": Effort(num_recorded=300, max_probes=60),
}

POOL_SIZE = 80
"""Candidates for probes. [judgement] A prediction is seldom so wrong that the fastest is further down."""


class Prediction:
    """A predicted answer, and what a measurement of it is made from: candidates and the way to price them."""

    def __init__(
        self,
        answer: Answer,
        candidates: Candidates,
        estimator: Estimator,
        *,
        smallest_base: TrainConfig,
        ways_to_compile: Mapping[str, Sequence[tuple[str, str]]],
        num_considered: int,
        context: Context,
    ) -> None:
        self.answer = answer
        self.considered = candidates.considered(num_considered)
        """Estimates that a study should keep, best first."""
        self._candidates = candidates
        self._estimator = estimator
        self._smallest_base = smallest_base
        self._ways_to_compile = ways_to_compile
        self._context = context

    def narrowest_layer(self) -> int:
        """The fewest inputs or outputs of a layer in which the answer has a rank; 0 where none has."""
        return self._estimator.narrowest_layer(self.answer.best.config)

    def goes_on(self) -> bool:
        """Whether the answer's steps go on within the budget where the lengths of samples vary."""
        most_bytes = self._estimator.most_for_lengths(self.answer.best.config)
        return most_bytes is None or self._goes_on(most_bytes)

    def goes_on_with(self, share: float) -> bool:
        """Whether they go on where that share of what is reserved at full length may be reserved besides."""
        return self._goes_on(round((1 + share) * self.answer.best.peak_reserved_bytes))

    def _goes_on(self, most_bytes: int) -> bool:
        lengths = self.answer.workload.lengths
        percentiles = () if lengths is None else lengths.percentiles
        found = self._estimator.goes_on(self.answer.best.config, percentiles, most_bytes)
        self._estimator.keep_prices()
        return found

    def pool(self) -> Sequence[Estimate]:
        """The candidates for probes, fastest first, the base at the end if not before; a replay each."""
        baseline = self.answer.baseline
        candidates = self._candidates
        is_allowed = candidates.at_most(self.answer.allow)
        is_in_form = candidates.in_form_of(self.answer.best.config)
        return candidates.pool(
            lambda config: is_in_form(config) and is_allowed(config) and not config.is_compiled,
            POOL_SIZE,
            always=None if baseline is None else baseline.config,
        )

    def variants(self, estimate: Estimate) -> Sequence[Estimate]:
        """The candidate compiled, in every way that the space and --allow have."""
        is_allowed = self._candidates.at_most(self.answer.allow)
        configs = filter(is_allowed, compiled.configs_of(estimate.config, self._ways_to_compile))
        return [
            self._candidates.estimate(config)
            if TraceSpec.of(config).is_compiled and self._estimator.supports(config)
            else compiled.bound_of(estimate, config)
            for config in configs
        ]

    def useful_share(self, config: TrainConfig) -> float:
        """Estimator.useful_share, for what is measured."""
        return self._estimator.useful_share(config)

    def fallbacks(self, answer: Answer) -> tuple[Estimate, ...]:
        """Return the plan B of this answer, or of the measured one."""
        is_allowed = self._candidates.at_most(answer.allow)
        if not _has_plan_b(answer.best.config, answer.workload):
            return ()
        return self._candidates.fallbacks(answer.best, is_allowed)

    def put_back(self, answer: Answer) -> tuple[Change, ...]:
        """Return the answer with each setting that differs from the base's put back, one at a time.

        The micro-batch is one of them. What is not valid so, or was not traced, is left out.
        """
        base = answer.base
        return tuple(beside.put_back_one(self._estimator, answer.best.config, base, self._context))

    def details(self, answer: Answer) -> Details:
        """Return what a report draws of this answer, or of the measured one: ten replays or so.

        The way there begins at the base that fits, else at its smallest micro-batch.
        """
        baseline = self._smallest_base if answer.baseline is None else answer.baseline.config
        base = baseline if self._estimator.supports(baseline) else None
        priced = self._candidates.priced()
        found = waterfall.details(self._estimator, base, answer.best.config, self._context, priced)
        self._estimator.keep_prices()
        return found


Progress = Callable[[str, int, int], None]
"""(what, done, of how many)."""


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

    `allow` None: numerics, raised to recipe where nothing else fits, or only by waiting for host memory.
    `base` None: default_base.
    What `has` needs is taken for installed. `so_far` hears of the best so far while others are traced;
    `meanwhile` is called once, while the first worker starts.
    `changes` is what has become of the space before. `traces_all`: also what is slower by its bound than what
    fits, for who doubts predictions.
    `varied_share`: of what is reserved, that stays free for the pieces that varied lengths leave.
    Raises NothingFitsError with the smallest estimate, ConfigError for a space without valid points,
    HardwareError for a card whose speed is unknown.
    """
    started = time.monotonic()
    progress = log.stages(_log, progress)
    ways_to_compile = compiled.settings_of(space)
    ways_predicted = compiled_candidates.predicted_ways(ways_to_compile, gpu.backend)
    reference = base or default_base(workload, gpu, model)
    changing = Changing(space, tuple(changes))
    changing.to(with_trainers(space, workload.task, reference), "what trains the task")
    space, solving = without_solve(changing.space)
    changing.space, parting = without_parts(space)
    compiles = any(ways_predicted.values())
    num_layers = LEAST_LAYERS if model.num_layers is None else model.num_layers
    if workload.num_gpus == 1 and not compiles and num_layers >= LEAST_LAYERS:
        changing.to(without_intervals(changing.space, solving), "checkpointing is solved")
    space = changing.space
    asked_for = tuple(each for each in space.methods if each.method in workload.methods)
    changing.to(dataclasses.replace(space, methods=asked_for), "the methods that were asked for")
    if base is None and model.is_float32:
        # What the checkpoint is: no answer is slower than leaving it so.
        changing.to(with_precision_of(reference, changing.space), "the checkpoint is in float32")
    changing.to(
        with_checkpoint(changing.space, model.checkpoint), "the checkpoint is quantised already"
    )
    changing.to(with_batchings(changing.space, workload, base), "what batches the dataset allows")
    changing.to(
        with_attentions(changing.space, model.attentions, gpu.compute_capability),
        "what attention the model and the card have",
    )
    eager_space = compiled_candidates.without_predicted(changing.space, ways_predicted)
    space, left_out = predictable(eager_space, workload.methods, has=has)
    changing.to(space, "what is installed and predicted")
    changing.to(for_gpus(changing.space, workload.num_gpus), "the number of GPUs")
    for change in changing.changes:
        _log.info("space: %s", change)
    points = enumerate_configs(
        changing.space,
        workload,
        num_layers=model.num_layers,
        compute_capability=gpu.compute_capability,
        max_sequence_length=model.max_sequence_length,
        head_size=model.head_size,
        checkpoint=model.checkpoint,
        served=room.served_by_vllm(model, gpu),
    )
    if not points.configs:
        trainer = BY_TASK.get(workload.task)
        if trainer is not None and not is_installed(trainer.library):
            raise ConfigError(
                f"{trainer.class_name}, which trains {workload.task}, is not installed here",
                remedy=f"pip install {trainer.library}",
            )
        # Where no rule is broken by all, those that the base breaks say most.
        broken = broken_rules(reference, _context(workload, gpu, model))
        reasons = points.reasons or tuple(rule.reason for rule in broken)
        raise ConfigError(
            f"The space {space.name} has no valid configuration for this workload",
            why=why_none_is_valid(reasons, points.invalid, workload.methods),
            remedy=_whole_groups(reference, changing.space)
            or "Change the methods, the effective batch size or the space"
            + (", or leave --num-gpus out" if workload.num_gpus > 1 else ""),
        )
    progress("space", len(points.configs), points.num_enumerated)
    if reference.method == "peft" and reference.peft is None:
        reference = dataclasses.replace(reference, peft=points.configs[0].peft)
    baselines = [base] if base is not None else larger_micro_batches(reference)
    possible = room.possible(points.configs, model, workload)
    is_hopeless = room.is_hopeless(points.configs, model, workload)
    if is_hopeless:  # Only what is lacking is to be said.
        possible = room.smallest(possible, model, base=reference, allow=allow)
    traces: dict[TraceSpec, Trace | SharedTrace] = {}
    refused: dict[TraceSpec, str] = {}
    varied = workload.lengths is not None
    estimator = Estimator(
        traces,
        gpu,
        memory_budget_bytes=workload.memory_budget_bytes,
        headroom=workload.headroom,
        host_memory_bytes=workload.host_memory_bytes,
        filling=workload.filling if varied else None,
        replays=None if cache is None else cache.replays(),
        prices=None if cache is None else cache.prices(),
        varied_share=varied_share,
    )
    choose = functools.partial(_chosen, allow=allow, has_base=base is not None)
    first_answers = None
    if so_far is not None:
        look = functools.partial(_best_so_far, estimator, possible, baselines, reference, choose)
        first_answers = FirstAnswers(look, so_far)

    def on_trace(done: int, total: int) -> None:
        progress("trace", done, total)
        if first_answers is not None and done < total:
            first_answers.look()

    def trace(specs: set[TraceSpec]) -> None:
        if varied:
            specs = specs.union(*map(and_several, specs))
        specs = specs - traces.keys()
        if not specs and traces:
            return
        ahead.stop()
        trace_all(
            model,
            workload.task,
            workload.sequence_length,
            gpu,
            specs,
            num_gpus=workload.num_gpus,
            pictures=workload.pictures,
            teacher=workload.teacher,
            on_trace=on_trace,
            server=server,
            cache=cache,
            found=traces,
            refused=refused,
            meanwhile=None if traces else meanwhile,
        )

    specs = {TraceSpec.of(config) for config in [*possible, *baselines]}
    # Compiled, a step that saves memory may be faster than any that is not compiled.
    is_all = traces_all or compiles
    in_turn = TracesInTurn(possible, reference, estimator, trace, is_all=is_all)
    # More is traced once the first are priced: what imports once does for all.
    server: ForkServer | None
    server = serving = trace_server(specs)
    length, shown, taught_by = workload.sequence_length, workload.pictures, workload.teacher
    asked = asked_of_all(model, workload.task, length, gpu, shown, taught_by)
    is_crowded = functools.partial(room.is_crowded, model=model, workload=workload)
    with traces_ahead(serving, asked, cache) as ahead:
        try:
            others = [] if is_hopeless else map(TraceSpec.of, baselines)
            supported = in_turn.first(*others, is_crowded=is_crowded)
        except ConfigError:
            if not is_hopeless:
                raise
            possible = points.configs  # The smallest cannot be traced: others may be.
            in_turn = TracesInTurn(possible, reference, estimator, trace, is_all=is_all)
            supported = in_turn.first(is_crowded=is_crowded)
        if room.num_said(model, workload.task) is None:
            is_possible = room.is_possible(model, workload, room.num_traced(traces))
            with_room = list(filter(is_possible, possible))
            if any(map(estimator.supports, with_room)):
                in_turn.leave_out(is_possible)
                possible = with_room
        baseline = _baseline(estimator, baselines)
        if baseline is not None:
            reference = baseline.config
        is_offered = changing.space.offers(reference)
        # The base's micro-batch may be larger than those of the space.
        adds_base = (
            baseline is not None
            and reference not in supported
            and is_offered
            and room.is_possible(model, workload)(reference)
        )
        candidates = Candidates(estimator, [*supported, *([reference] * adds_base)], reference)

        plan_b = functools.partial(_plan_b_of, workload=workload, choose=choose)
        to_try = tried_on_best.Tried(
            solving=frozenset() if is_hopeless else solving,
            parting=frozenset() if is_hopeless else parting,
            allow=allow,
            context=_context(workload, gpu, model),
            trace=trace,
        )

        def likely_next(candidates: Candidates) -> set[TraceSpec]:
            configs = list(filter(estimator.supports, possible))
            families = families_of(candidates, configs, estimator, methods=solving, allow=allow)
            # What may not be chosen anyway waits until the answer's own best is known.
            plans = (each.specs() for each in families if each.answer is not None)
            _, best = choose(candidates)
            in_parts = list[TraceSpec]()
            if best is not None and tried_on_best.parts_may_pay(best, configs, estimator):
                in_parts = tried_on_best.specs_in_parts(best, to_try)
            return in_turn.passed_over_of(plan_b(candidates)).union(in_parts, *plans)

        def likely_later() -> list[TraceSpec]:
            return [*tried_on_best.specs_in_parts(best, to_try), *in_turn.left()]

        candidates = in_turn.rest(candidates, besides=likely_next)
        _, best = choose(candidates)
        ahead.go_on(likely_later)
        candidates, added = tried_on_best.tried(
            candidates,
            list(filter(estimator.supports, possible)),
            estimator,
            traces,
            to_try,
        )
        chosen, best = choose(candidates)
        candidates = in_turn.where(candidates, plan_b(candidates))
        ahead.go_on(likely_later)
    server = None
    estimator.keep_prices()
    supported = [*filter(estimator.supports, possible), *added]
    num_added = len(added)
    of_compiled: list[TrainConfig] = []
    if compiles:
        of_compiled, not_compiled = compiled_candidates.compiled_configs(
            candidates,
            [*supported, *([reference] * adds_base)],
            ways_predicted,
            allow=allow,
            trace=trace,
            traces=traces,
        )
        left_out = (*left_out, *not_compiled)
        supported += of_compiled
        num_added += len(of_compiled)
        candidates = Candidates(estimator, [*supported, *([reference] * adds_base)], reference)
        chosen, best = choose(candidates)
    left_out = (*left_out, *_refused_kinds(asked_for, supported, refused))
    num_possible = candidates.num_possible - adds_base
    progress("priced", num_possible, len(points.configs if is_hopeless else supported))

    best_by_class = {}
    for name in TRADEOFF_CLASSES:
        of_class = candidates.best(candidates.exactly(name))
        if of_class is not None:
            best_by_class[name] = of_class
    widened = allow is None and chosen == "recipe"
    if best is None:
        allowed = list(filter(candidates.at_most(chosen), supported))
        if not allowed:
            wanted = list(filter(candidates.at_most(chosen), points.configs))
            raise none_of_class(chosen, wanted, reference, model, workload, best_by_class, refused)
        raise nothing_fits(
            estimator,
            allowed,
            model,
            workload,
            best_by_class,
            left_out,
            context=_context(workload, gpu, model),
            share=lambda spec: share_known(model, spec, gpu, traces, num_gpus=workload.num_gpus),
            is_hopeless=is_hopeless,
        )
    is_in_form = candidates.in_form_of(best.config)
    context = _context(workload, gpu, model)
    progress("replayed", candidates.num_replayed, num_possible)
    answer = Answer(
        workload=workload,
        gpu=gpu.name,
        gpu_reason=gpu_reason,
        space=space.name,
        allow=chosen,
        widened=widened,
        best=best,
        best_class=candidates.class_of(best.config),
        base=reference,
        baseline=baseline,
        best_by_class=best_by_class,
        further=candidates.further(lambda _: True, best, *best_by_class.values()),
        tied=candidates.tied(best, candidates.at_most(chosen)),
        changes=beside.changes(estimator, best, reference, context),
        safer=beside.safer(estimator, candidates, supported, best.config, backend=gpu.backend),
        more_memory=beside.more_memory(
            estimator,
            supported,
            reference,
            best,
            candidates.at_most(chosen),
            fastest_now=candidates.fastest(candidates.at_most(chosen)),
        ),
        fewer_gpus=beside.fewer_gpus(estimator, best),
        reaches_experts=beside.reaches_experts(best, model),
        tip=best_tip(
            best,
            model,
            with_parts(changing.space, parting),
            context,
            chosen,
            gpu=gpu,
            memory_budget_bytes=workload.memory_budget_bytes,
            of_classes=[e for name, e in best_by_class.items() if LEVEL[name] <= LEVEL[chosen]],
        ),
        counts=Counts(
            enumerated=points.num_enumerated + num_added,
            invalid=points.num_enumerated - len(points.configs),
            unsupported=len(possible) + num_added - len(supported) - in_turn.num_passed_over,
            passed_over=in_turn.num_passed_over,
            predicted_oom=len(points.configs)
            - len(possible)
            + len(supported)
            - num_possible
            + candidates.num_replayed_oom,
            feasible=num_possible - candidates.num_replayed_oom,
            replayed=candidates.num_replayed,
        ),
        invalid_by_rule=points.invalid,
        classes_outside=tuple(
            name
            for name in TRADEOFF_CLASSES
            if not any(map(candidates.exactly(name), points.configs))
        ),
        left_out=left_out,
        elapsed_seconds=time.monotonic() - started,
        base_name=TRAINER_DEFAULTS if base is None else USERS_BASE,
        is_base_offered=is_offered,
        base_refused="" if baseline else refused.get(TraceSpec.of(baselines[-1]), ""),
        base_lacks_on_host_bytes=0 if baseline else _lacks_on_host(estimator, baselines[-1]),
        sureness=candidates.sureness(
            best, lambda c: is_in_form(c) and candidates.at_most(chosen)(c)
        ),
        space_changes=tuple(map(str, changing.changes)),
        compilation=compiled_candidates.compilation(
            candidates, lambda c: is_in_form(c) and candidates.at_most(chosen)(c)
        )
        if of_compiled
        else None,
    )
    return Prediction(
        answer,
        candidates,
        estimator,
        smallest_base=baselines[-1],
        ways_to_compile=ways_to_compile,
        num_considered=EFFORTS[effort].num_recorded,
        context=context,
    )


def _refused_kinds(
    asked_for: Sequence[MethodSpace],
    supported: Sequence[TrainConfig],
    refused: Mapping[TraceSpec, str],
) -> Iterator[LeftOut]:
    """Yield the methods, their targets, and the ways to share, of which nothing could be traced, and why.

    Of a way to share the reasons are its own: not such as are given for a way that is supported.
    """
    of_supported = {config.method for config in supported}
    told: set[str] = set()
    for name in dict.fromkeys(section.method for section in asked_for):
        reasons = sorted({why for spec, why in refused.items() if spec.method == name})
        if reasons and name not in of_supported:
            told.update(reasons)
            yield LeftOut(METHOD_WORDS[name], Reason.NOT_TRACED, "; ".join(reasons))
    ways = {config.parallelism for config in supported}
    told |= {why for spec, why in refused.items() if spec.parallelism in ways}
    for name in sorted({spec.parallelism for spec in refused} - ways):
        reasons = sorted({why for spec, why in refused.items() if spec.parallelism == name} - told)
        if reasons:
            yield LeftOut(name, Reason.NOT_TRACED, "; ".join(reasons))
    yield from _refused_targets(supported, refused)


def _refused_targets(
    supported: Sequence[TrainConfig], refused: Mapping[TraceSpec, str]
) -> Iterator[LeftOut]:
    """Yield the targets of adapters of which nothing could be traced in a way to share, and why.

    Methods and ways of which nothing could be traced at all are told elsewhere.
    """

    def kind(each: TraceSpec | TrainConfig) -> tuple[str, str | None, str]:
        return each.method, each.lora_targets, each.parallelism

    methods, ways = ({getattr(c, n) for c in supported} for n in ("method", "parallelism"))
    kept = {kind(config) for config in supported}
    kinds: dict[str, set[str]] = {}
    for spec, why in refused.items():
        method, targets, way = kind(spec)
        if targets and method in methods and way in ways and kind(spec) not in kept:
            shared = "" if way == "none" else f" with {way}"
            kinds.setdefault(why, set()).add(f"{METHOD_WORDS[method]} on {targets}{shared}")
    for why, words in kinds.items():
        yield LeftOut(", ".join(sorted(words)), Reason.NOT_TRACED, why)


_Choice = Callable[[Candidates], tuple[str, Estimate | None]]


def _chosen(
    candidates: Candidates, *, allow: str | None, has_base: bool
) -> tuple[str, Estimate | None]:
    """Return the class that the answer may be of; the answer, if anything fits.

    `has_base`: the user trains already, and so has chosen a recipe that waits for host memory.
    """
    chosen = allow or "numerics"
    best = candidates.best(candidates.at_most(chosen))
    if allow is not None or (best is not None and (has_base or best.bound != "transfer")):
        return chosen, best
    other = candidates.best(candidates.at_most("recipe"))
    if best is None or (other is not None and _is_far_faster(other, best)):
        return "recipe", other
    return chosen, best


def _is_far_faster(other: Estimate, best: Estimate) -> bool:
    return (other.tokens_per_second or 0.0) >= FAR_FASTER * (best.tokens_per_second or math.inf)


def _whole_groups(reference: TrainConfig, space: SearchSpace) -> str:
    """Say which effective batches hold whole groups of completions; empty where this one does.

    Where the space has no number of completions it is the reference's.
    """
    usual = (reference.num_generations,)
    named = (section.domains.get("num_generations", usual) for section in space.methods)
    groups = sorted(group for group in set(itertools.chain(*named)) if group)
    if not groups or any(reference.effective_batch_size % group == 0 for group in groups):
        return ""
    group = groups[0]
    return f"--effective-batch {group} or a multiple of it: a prompt has {group} completions"


def _context(workload: Workload, gpu: Gpu, model: ModelSource) -> Context:
    return Context(
        effective_batch_size=workload.effective_batch_size,
        compute_capability=gpu.compute_capability,
        weight_decay=workload.decays,
        task=workload.task,
        checkpoint=model.checkpoint,
        served=room.served_by_vllm(model, gpu),
    )


def _best_so_far(
    estimator: Estimator,
    configs: Sequence[TrainConfig],
    baselines: Sequence[TrainConfig],
    reference: TrainConfig,
    choose: _Choice,
) -> Estimate | None:
    """Return the answer as far as steps are traced; None where nothing fits yet, or no speed is known."""
    baseline = _baseline(estimator, baselines)
    base = reference if baseline is None else baseline.config
    try:
        candidates = Candidates(estimator, filter(estimator.supports, configs), base)
    except HardwareError:
        return None
    _, best = choose(candidates)
    return best


def _plan_b_of(
    candidates: Candidates, *, workload: Workload, choose: _Choice
) -> Callable[[TrainConfig], bool]:
    """Whether a configuration may stand in the plan B of the best of these."""
    _, best = choose(candidates)
    if best is None or not _has_plan_b(best.config, workload):
        return lambda _: False
    return goes_on_from(best.config)


def _has_plan_b(config: TrainConfig, workload: Workload) -> bool:
    """Whether the program that trains a configuration goes on with another where memory runs out."""
    return not TRAINERS[config.trainer].task and workload.pictures is None


def _lacks_on_host(estimator: Estimator, config: TrainConfig) -> int:
    """Bytes of host memory that a configuration lacks; 0 where the card lacks room for it."""
    if estimator.host_memory_bytes is None or not estimator.supports(config):
        return 0
    if estimator.reserving(config, estimator.room_for(config)) is None:
        return 0
    estimate = estimator.estimate(config)
    has_room = estimate.resident_bytes <= estimator.room_for(config)
    return estimate.lacks_on_host(estimator.host_memory_bytes) if has_room else 0


def _baseline(estimator: Estimator, configs: Sequence[TrainConfig]) -> Estimate | None:
    """The first of them that fits."""
    for config in configs:
        if estimator.supports(config) and estimator.may_fit(config):
            estimate = estimator.fitting(config)
            if estimate is not None:
                return estimate
    return None
