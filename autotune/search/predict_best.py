"""The funnel: a workload, a space and a card -> the fastest configuration predicted to fit.

Enumerate, trace once per structure, price every point, replay what could win.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from autotune.catalogue.gpus import Gpu
from autotune.catalogue.models import ModelSource
from autotune.common import log
from autotune.common.units import format_bytes
from autotune.errors import ConfigError, HardwareError, NothingFitsError
from autotune.memory.traces import Trace
from autotune.predict.estimator import Estimator, least_bytes
from autotune.predict.sharding.rank_trace import RankTrace
from autotune.predict.tracing import trace_all
from autotune.probe import compiled
from autotune.records.answer import (
    MORE_MEMORY,
    MORE_MEMORY_BYTES,
    TRAINER_DEFAULTS,
    USERS_BASE,
    Answer,
    Change,
    Counts,
    Measured,
)
from autotune.records.charts import Details
from autotune.records.estimate import Estimate, TraceSpec
from autotune.records.measurement import NOISE
from autotune.search import waterfall
from autotune.search.candidates import Candidates, put_back, speed_of
from autotune.search.first_answers import FirstAnswers
from autotune.search.tips import best_tip
from autotune.space.config import TRADEOFF_CLASSES, TrainConfig, Workload
from autotune.space.defaults import default_base, larger_micro_batches
from autotune.space.knobs import describe
from autotune.space.requirements import LeftOut, Reason, predictable
from autotune.space.rules import Context, broken_rules
from autotune.space.search_space import (
    SearchSpace,
    enumerate_configs,
    for_gpus,
    with_attentions,
    with_batchings,
    with_checkpoint,
    with_precision_of,
)
from autotune.space.space_changes import Changing, SpaceChange
from autotune.space.tradeoffs import loses_small_updates, tradeoff_class
from autotune.store.trace_cache import TraceCache

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

    def pool(self) -> Sequence[Estimate]:
        """The candidates for probes, fastest first, the base at the end if not before; a replay each."""
        baseline = self.answer.baseline
        candidates = self._candidates
        is_allowed = candidates.at_most(self.answer.allow)
        is_in_form = candidates.in_form_of(self.answer.best.config)
        return candidates.pool(
            lambda config: is_in_form(config) and is_allowed(config),
            POOL_SIZE,
            always=None if baseline is None else baseline.config,
        )

    def variants(self, estimate: Estimate) -> Sequence[Estimate]:
        """The candidate compiled, in every way that the space and --allow have."""
        is_allowed = self._candidates.at_most(self.answer.allow)
        found = compiled.variants(estimate, self._ways_to_compile)
        return [variant for variant in found if is_allowed(variant.config)]

    def fallbacks(self, answer: Answer) -> tuple[Estimate, ...]:
        """Return the plan B of this answer, or of the measured one."""
        is_allowed = self._candidates.at_most(answer.allow)
        return self._candidates.fallbacks(answer.best, is_allowed)

    def details(self, answer: Answer) -> Details:
        """Return what a report draws of this answer, or of the measured one: ten replays or so.

        The way there begins at the base that fits, else at its smallest micro-batch.
        """
        baseline = self._smallest_base if answer.baseline is None else answer.baseline.config
        base = baseline if self._estimator.supports(baseline) else None
        priced = self._candidates.priced()
        return waterfall.details(self._estimator, base, answer.best.config, self._context, priced)


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
    cache: TraceCache | None = None,
    changes: Sequence[SpaceChange] = (),
) -> Prediction:
    """Answer a workload by prediction.

    `allow` None: numerics, raised to recipe where nothing else fits. `base` None: default_base.
    What `has` needs is taken for installed. `so_far` hears of the best so far while others are traced.
    `changes` is what has become of the space before.
    Raises NothingFitsError with the smallest estimate, ConfigError for a space without valid points,
    HardwareError for a card whose speed is unknown.
    """
    started = time.monotonic()
    progress = log.stages(_log, progress)
    ways_to_compile = compiled.settings_of(space)
    reference = base or default_base(workload, gpu, model)
    changing = Changing(space, tuple(changes))
    asked_for = tuple(each for each in space.methods if each.method in workload.methods)
    changing.to(dataclasses.replace(space, methods=asked_for), "the methods that were asked for")
    if base is None and model.is_float32:
        # What the checkpoint is: no answer is slower than leaving it so.
        changing.to(with_precision_of(reference, space), "the checkpoint is in float32")
    changing.to(
        with_checkpoint(changing.space, model.checkpoint), "the checkpoint is quantised already"
    )
    changing.to(with_attentions(changing.space, model.attentions), "what attention the model has")
    space, left_out = predictable(changing.space, workload.methods, has=has)
    changing.to(space, "what is installed and predicted")
    changing.to(with_batchings(changing.space, workload, base), "what batches the dataset allows")
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
    )
    if not points.configs:
        raise ConfigError(
            f"The space {space.name} has no valid configuration for this workload",
            why=", ".join(f"{count} break {name}" for name, count in points.invalid.items())
            or f"it has no section for {' or '.join(workload.methods)}",
            remedy="Change the methods, the effective batch size or the space",
        )
    progress("space", len(points.configs), points.num_enumerated)
    if reference.method == "peft" and reference.peft is None:
        reference = dataclasses.replace(reference, peft=points.configs[0].peft)
    baselines = [base] if base is not None else larger_micro_batches(reference)
    possible = _possible(points.configs, model, workload)
    traces: dict[TraceSpec, Trace | RankTrace] = {}
    estimator = Estimator(
        traces,
        gpu,
        memory_budget_bytes=workload.memory_budget_bytes,
        headroom=workload.headroom,
        useful_share=workload.useful_share,
    )
    first_answers = None
    if so_far is not None:
        look = functools.partial(_best_so_far, estimator, possible, baselines, reference, allow)
        first_answers = FirstAnswers(look, so_far)

    def on_trace(done: int, total: int) -> None:
        progress("trace", done, total)
        if first_answers is not None and done < total:
            first_answers.look()

    trace_all(
        model,
        workload.task,
        workload.sequence_length,
        gpu,
        {TraceSpec.of(config) for config in [*possible, *baselines]},
        num_gpus=workload.num_gpus,
        on_trace=on_trace,
        cache=cache,
        found=traces,
    )
    supported = [config for config in possible if estimator.supports(config)]
    baseline = _baseline(estimator, baselines)
    if baseline is not None:
        reference = baseline.config
    is_offered = changing.space.offers(reference) and _is_possible(reference, model, workload)
    # The base's micro-batch may be larger than those of the space.
    adds_base = baseline is not None and reference not in supported and is_offered
    candidates = Candidates(estimator, [*supported, *([reference] * adds_base)], reference)
    num_possible = candidates.num_possible - adds_base
    progress("priced", num_possible, len(supported))

    best_by_class = {}
    for name in TRADEOFF_CLASSES:
        of_class = candidates.best(candidates.exactly(name))
        if of_class is not None:
            best_by_class[name] = of_class[0]
    chosen = allow or "numerics"
    ranked = candidates.best(candidates.at_most(chosen))
    if ranked is None and allow is None:
        chosen = "recipe"
        ranked = candidates.best(candidates.at_most(chosen))
    widened = allow is None and chosen == "recipe"
    if ranked is None:
        allowed = list(filter(candidates.at_most(chosen), supported))
        if not allowed:
            wanted = list(filter(candidates.at_most(chosen), points.configs))
            raise _none_of_class(chosen, wanted, reference, model, workload, best_by_class)
        raise _nothing_fits(estimator, allowed, workload, best_by_class)
    best, *tied = ranked
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
        tied=tuple(tied),
        changes=_changes(estimator, best, reference, context),
        safer=_safer(estimator, candidates, supported, best.config),
        more_memory=_more_memory(estimator, supported, reference, best, candidates.at_most(chosen)),
        reaches_experts=_reaches_experts(best, model),
        tip=best_tip(best, model, changing.space, context, chosen),
        counts=Counts(
            enumerated=points.num_enumerated,
            invalid=points.num_enumerated - len(points.configs),
            unsupported=len(possible) - len(supported),
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
        space_changes=tuple(map(str, changing.changes)),
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


def _context(workload: Workload, gpu: Gpu, model: ModelSource) -> Context:
    return Context(
        effective_batch_size=workload.effective_batch_size,
        compute_capability=gpu.compute_capability,
        weight_decay=workload.decays,
        task=workload.task,
        checkpoint=model.checkpoint,
    )


def _possible(
    configs: list[TrainConfig], model: ModelSource, workload: Workload
) -> list[TrainConfig]:
    """Return the configurations whose weights and gradients leave room, where their number is known.

    A little more memory counts too, since the answer says what it would bring. All of them where
    there is no such configuration, so that what is lacking can be said.
    """
    return [config for config in configs if _is_possible(config, model, workload)] or configs


def _is_possible(config: TrainConfig, model: ModelSource, workload: Workload) -> bool:
    count = model.num_parameters_known
    if count is None or workload.task != model.task or workload.num_gpus > 1:
        return True
    return least_bytes(config, count) <= workload.memory_budget_bytes + MORE_MEMORY_BYTES


def steps_per_epoch(answer: Answer) -> int | None:
    """Optimizer steps in which the answer sees all of the dataset once; None without a dataset."""
    lengths, config = answer.workload.lengths, answer.best.config
    if lengths is None:
        return None
    useful_tokens = answer.best.useful_share * config.tokens_per_step
    return math.ceil(lengths.tokens_per_epoch(config.batching) / useful_tokens)


def with_measured(answer: Answer, measured: Measured, *, not_compiled: str = "") -> Answer:
    """The answer that probes gave: the prediction of the measured winner, and what was measured.

    `not_compiled`: why nothing could be compiled here, where it was to be.
    """
    best = measured.predicted
    return dataclasses.replace(
        answer,
        best=best,
        best_class=tradeoff_class(best.config, answer.base),
        tied=(),
        changes=(),
        more_memory=None,
        reaches_experts=answer.reaches_experts
        if best.config.lora_targets == answer.best.config.lora_targets
        else None,
        tip=answer.tip if best.config == answer.best.config else None,
        # What is not predicted was measured.
        left_out=tuple(
            LeftOut(each.words, Reason.NOT_COMPILED, not_compiled)
            if not_compiled and each.reason is Reason.NOT_PREDICTED
            else each
            for each in answer.left_out
            if not (measured.num_compiled and each.reason is Reason.NOT_PREDICTED)
        ),
        measured=measured,
    )


def _best_so_far(
    estimator: Estimator,
    configs: Sequence[TrainConfig],
    baselines: Sequence[TrainConfig],
    reference: TrainConfig,
    allow: str | None,
) -> Estimate | None:
    """Return the answer as far as steps are traced; None where nothing fits yet, or no speed is known."""
    baseline = _baseline(estimator, baselines)
    base = reference if baseline is None else baseline.config
    try:
        candidates = Candidates(estimator, filter(estimator.supports, configs), base)
    except HardwareError:
        return None
    for name in (allow,) if allow else ("numerics", "recipe"):
        best = candidates.best(candidates.at_most(name))
        if best is not None:
            return best[0]
    return None


def _baseline(estimator: Estimator, configs: Sequence[TrainConfig]) -> Estimate | None:
    """The first of them that fits."""
    for config in configs:
        if estimator.supports(config) and estimator.may_fit(config):
            estimate = estimator.fitting(config)
            if estimate is not None:
                return estimate
    return None


def _changes(
    estimator: Estimator, best: Estimate, base: TrainConfig, context: Context
) -> tuple[Change, ...]:
    """The answer with one setting put back to the base's, where that is valid and was traced.

    Of another method nothing can be put back: there it is the base itself.
    """
    changes = []
    if best.config.method != base.method and estimator.supports(base):
        estimate = estimator.estimate(base)
        fits = estimator.fits(estimate)
        changes.append(Change(setting="method", value=base.method, estimate=estimate, fits=fits))
    for setting, config in put_back(best.config, base):
        if setting == "micro_batch_size":
            continue
        if broken_rules(config, context) or not estimator.supports(config):
            continue
        estimate = estimator.estimate(config)
        fits = estimator.fits(estimate)
        value = getattr(base, setting)
        changes.append(Change(setting=setting, value=value, estimate=estimate, fits=fits))
    return tuple(changes)


def _reaches_experts(best: Estimate, model: ModelSource) -> bool | None:
    """Whether the adapters are so many that a mixture's experts must have some.

    An expert has two matrices at least, and an adapter of each as many weights as rank x hidden size.
    PEFT 0.21 (utils/transformers_weight_conversion.py) reaches the experts of some families only.
    """
    inputs, rank = model.expert_inputs, best.config.lora_rank
    if inputs is None or rank is None or best.config.lora_targets != "all-linear":
        return None
    return best.parameters.trainable >= 2 * rank * inputs


def _safer(
    estimator: Estimator,
    candidates: Candidates,
    supported: Iterable[TrainConfig],
    config: TrainConfig,
) -> Change | None:
    """The best, of any class, that keeps the small updates which the answer loses.

    None where none are lost, or nothing that keeps them was traced.
    """
    if not loses_small_updates(config):
        return None

    def keeps_updates(other: TrainConfig) -> bool:
        return other.method == config.method and not loses_small_updates(other)

    best = candidates.best(keeps_updates)
    if best is None:
        smallest = min(filter(keeps_updates, supported), key=estimator.floor_bytes, default=None)
        if smallest is None:
            return None
        best = (estimator.estimate(smallest),)
    return Change(
        setting="precision",
        value=best[0].config.precision,
        estimate=best[0],
        fits=estimator.fits(best[0]),
    )


def _more_memory(
    estimator: Estimator,
    configs: Iterable[TrainConfig],
    base: TrainConfig,
    best: Estimate,
    wanted: Callable[[TrainConfig], bool],
) -> Change | None:
    """The fastest under a larger budget, where that is faster by more than the noise."""
    budget = estimator.memory_budget_bytes + MORE_MEMORY_BYTES
    roomier = Candidates(estimator.with_budget(budget), configs, base)
    fastest = roomier.fastest(wanted)
    if fastest is None or speed_of(fastest) < speed_of(best) * (1 + NOISE):
        return None
    return Change(setting=MORE_MEMORY, value=budget, estimate=fastest, fits=True)


def _none_of_class(
    allow: str,
    wanted: Sequence[TrainConfig],
    base: TrainConfig,
    model: ModelSource,
    workload: Workload,
    best_by_class: dict[str, Estimate],
) -> NothingFitsError:
    """Return the error where none could be priced: none in the space, none that fits, none that runs."""
    if not wanted:
        return NothingFitsError(
            f"No configuration of the class {allow} is in the space",
            why=f"The base is {describe(base)}",
            remedy="Raise --allow, or name a --space with the base's settings (autotune spaces)",
        )
    budget = format_bytes(workload.memory_budget_bytes)
    why, count = "The model cannot be trained so", model.num_parameters_known
    if count is not None:
        smallest = min(wanted, key=lambda config: least_bytes(config, count))
        if (least := least_bytes(smallest, count)) > workload.memory_budget_bytes:
            parts = "weights and gradients" if smallest.method == "full" else "weights"
            why = f"The {parts} alone of {describe(smallest)} take {format_bytes(least)}"
    return NothingFitsError(
        f"Nothing of the class {allow} fits into {budget}",
        why=why,
        remedy=_higher_class(best_by_class) or "Raise --allow",
    )


def _higher_class(best_by_class: dict[str, Estimate]) -> str:
    """Say what would fit if more were given up; empty where nothing would."""
    for name, other in best_by_class.items():
        return (
            f"--allow {name}: {describe(other.config)} is predicted to need "
            f"{format_bytes(other.peak_device_bytes)}"
        )
    return ""


def _nothing_fits(
    estimator: Estimator,
    allowed: Sequence[TrainConfig],
    workload: Workload,
    best_by_class: dict[str, Estimate],
) -> NothingFitsError:
    """The smallest configuration, and the one change that lowers it most."""
    budget = format_bytes(estimator.memory_budget_bytes)
    smallest = estimator.estimate(min(allowed, key=estimator.floor_bytes))
    why = (
        f"The smallest, {describe(smallest.config)}, is predicted to need "
        f"{format_bytes(smallest.peak_device_bytes)}"
    )
    if best_by_class:
        remedy = _higher_class(best_by_class)
    elif "qlora" not in workload.methods:
        remedy = "--method qlora lowers it most: the weights take 4 bits instead of 16 or 32"
    else:
        remedy = _lower_most(smallest, workload)
    return NothingFitsError(f"Nothing fits into {budget}", why=why, remedy=remedy)


def _lower_most(smallest: Estimate, workload: Workload) -> str:
    """Say which part of the peak to go for."""
    parts = smallest.breakdown
    grows_with_length = parts.activations_bytes + parts.logits_bytes + parts.temporaries_bytes
    if grows_with_length > parts.parameters_bytes:
        half = workload.sequence_length // 2
        return (
            f"--seq-len {half} lowers it most: {format_bytes(grows_with_length)} of the peak grow "
            "with the length"
        )
    return (
        "A smaller model lowers it most: the weights alone take "
        f"{format_bytes(parts.parameters_bytes)}. {smallest.unquantized_note}"
    )
