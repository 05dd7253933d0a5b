"""Checkpointing solved: the plan with the fewest lean layers that lets a step fit.

Of layers that are alike, each way to keep less frees as much and costs as much, so that the fastest mix
that fits has two ways at most: those of the plans (autotune.space.checkpoint_plans). The lean layers are the
first of the model. When the backward pass comes to them the others have freed what they kept, so that in full
fine-tuning no other place needs less (tests/contracts/test_checkpoint_plan.py tries all of a small model).

A search solves the families of configurations, alike but for checkpointing, that may beat the answer which it
has without: first those that a straight line between no checkpointing and all of it promises most of.

Known limitations
- Each of the two stretches of layers has three at least, or three times the model's pattern of layers.
- Where the model has too few for that, as Gemma 3 1B with its pattern of six, every layer is traced, and
  the first and the last of each kind stay as they were, the last lean layer is one between two of its kind
  (autotune.memory.traces.unlike_layers): of its 26 layers 8, 9, 10, 14 and so on to 22 are lean. There is no
  such plan with Liger's kernels, nor where hardly two layers are alike.
- With adapters the model's first layer keeps less than the others, since its input needs no gradient: to
  leave it out of the lean ones would need a little less.
- Of an encoder and a decoder as many layers are lean, the first of each; where they have unlike numbers of
  layers there is no plan.
- Products wait in host memory only where it is said how much of that may be taken (--host-mem). Each stretch
  of such a plan has four layers at least, and layers that are too unlike for that have none.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autotune.common import log
from autotune.errors import AutotuneError
from autotune.memory.traces import BrokenTrace, Trace, with_lean_layers_later
from autotune.predict.estimator import Estimator
from autotune.predict.sharding.shared_trace import SharedTrace
from autotune.records.estimate import Estimate, TraceSpec
from autotune.records.measurement import NOISE
from autotune.search.candidates import Candidates, speed_of
from autotune.space.checkpoint_plans import CHECKPOINT_PLANS, plan_offloads
from autotune.space.config import TRADEOFF_CLASSES, TrainConfig
from autotune.space.tradeoffs import LEVEL

_log = log.logger(__name__)

Traces = dict[TraceSpec, Trace | SharedTrace]

LEAST_LAYERS = 6
"""Fewest layers of which there is a plan: three of each stretch."""
MOST_FAMILIES = 24
"""Most families of each trade-off class that ask for traces of their plans. [judgement] Most differ in what
hardly changes speed, and share traces: those that need no others come on top."""
MOST_SOLVED = 4
"""Most of them that are solved: those that promise most, as long as they may be chosen before what is known.
[judgement] On an 8B model each takes a third of a second or so."""
_LEAST_COST = {False: 0.6, True: 0.25}
"""Share of a straight line's cost that a plan may come down to, and one that may offload. [judgement] Low, so
that no family is passed over that keeping products would make the fastest."""

_LEAPS = (0.0, 0.25, 0.5, 0.75)
"""Shares of the way from the fewest lean layers whose live tensors fit to the number that was found: they are
tried, too. [judgement] A replay each."""
_SLACK = 1.01
"""How much faster than a straight line promises a plan may be. [judgement] Live bytes bend little between its
ends, and time not at all."""


def plans_for(host_memory_bytes: int | None) -> tuple[str, ...]:
    """Return the plans that are tried: those that offload where it is said what may be taken of the host."""
    return tuple(name for name in CHECKPOINT_PLANS if host_memory_bytes or not plan_offloads(name))


def plan_specs(lean: TrainConfig, host_memory_bytes: int | None = None) -> set[TraceSpec]:
    """Return the specs of the traces that price the plans of a configuration with all layers checkpointed."""
    return {
        TraceSpec.of(dataclasses.replace(lean, checkpoint_plan=plan))
        for plan in plans_for(host_memory_bytes)
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class _Promise:
    """A plan with the speed that a straight line between its ends promises."""

    plan: str
    counts: Sequence[int]
    """Numbers of lean layers that the plan may have."""
    number: int
    """Place in `counts` of the first that fits, about; it may be beyond the last."""
    layer_bytes: float
    """Bytes that a lean layer keeps less than another, about."""
    tokens_per_second: float


class PlanSolver:
    """Finds the fastest plan that fits. Traces of the plans that it tries join those it is given."""

    def __init__(self, estimator: Estimator, traces: Traces) -> None:
        self._estimator = estimator
        self._traces = traces
        self._beyond_floor: dict[bool, tuple[int, int]] = {}
        """By whether segments expand: the bytes, and the micro-batch of the step that had them."""

    def learn(self, estimate: Estimate) -> None:
        """Take from a replay how much more a step needs than its live tensors: where to look first."""
        floor_bytes = self._estimator.floor_bytes(estimate.config)
        beyond_bytes = max(estimate.peak_device_bytes - floor_bytes, 0)
        config = estimate.config
        self._beyond_floor[config.expandable_segments] = beyond_bytes, config.micro_batch_size

    def _beyond_floor_bytes(self, lean: TrainConfig) -> int:
        """Return about the least that a step needs beyond its live tensors, as far as replays have told.

        With segments of fixed size it hardly needs less than with others.
        """
        known = self._beyond_floor
        found = known.get(lean.expandable_segments) or known.get(True)
        if found is None:
            return 0
        nbytes, micro_batch = found
        return nbytes * min(lean.micro_batch_size, micro_batch) // micro_batch

    def least_checkpointed(self, lean: TrainConfig) -> TrainConfig:
        """Return the configuration without checkpointing, else the fastest plan that fits, else with all."""
        free = dataclasses.replace(lean, activation_checkpointing=0)
        if self._estimator.supports(free) and self._estimator.fitting(free) is not None:
            return free
        solved = self.solved(lean)
        return lean if solved is None else solved.config

    def promise(self, lean: TrainConfig) -> float:
        """Return about the most tokens per second that a plan of a configuration reaches; 0 without one."""
        try:
            return max((each.tokens_per_second for each in self._promises(lean)), default=0.0)
        except BrokenTrace as error:
            _log.info("a plan of checkpointing cannot be told from its trace: %s", error)
            return 0.0

    def solved(self, lean: TrainConfig, least: float = 0.0) -> Estimate | None:
        """Return the fastest plan that fits of a configuration with all layers checkpointed, if any.

        `least`: tokens per second that it must pass.
        """
        try:
            return self._solved(lean, least)
        except BrokenTrace as error:
            _log.info("a plan of checkpointing cannot be told from its trace: %s", error)
            return None

    def _solved(self, lean: TrainConfig, least: float) -> Estimate | None:
        best: Estimate | None = None
        for promise in sorted(self._promises(lean), key=lambda p: -p.tokens_per_second):
            if promise.tokens_per_second * _SLACK <= least:
                break
            if (found := self._with_fewest(lean, promise, least)) is not None:
                best, least = found, speed_of(found)
        return best

    def _promises(self, lean: TrainConfig) -> Iterator[_Promise]:
        room_bytes = self._estimator.room_for(lean)
        beyond_bytes = self._beyond_floor_bytes(lean)
        for plan in plans_for(self._estimator.host_memory_bytes):
            of_any = TraceSpec.of(dataclasses.replace(lean, checkpoint_plan=plan))
            counts = self._estimator.lean_layers(of_any)
            if not counts:
                continue
            ends = [self.config(lean, plan, counts[at]) for at in (0, -1)]
            most_bytes, least_bytes = map(self._estimator.floor_bytes, ends)
            fast, slow = map(self._estimator.tokens_per_second, ends)
            if least_bytes > room_bytes or fast is None or slow is None:
                continue
            excess_bytes = max(most_bytes + beyond_bytes - room_bytes, 0)
            span_bytes = max(most_bytes - least_bytes, 1)
            share = min(excess_bytes / span_bytes, 1.0)
            layer_bytes = span_bytes / max(len(counts) - 1, 1)
            yield _Promise(
                plan=plan,
                counts=counts,
                number=math.ceil(excess_bytes / layer_bytes),
                layer_bytes=layer_bytes,
                tokens_per_second=1 / ((1 - share) / fast + share / slow),
            )

    def _with_fewest(self, lean: TrainConfig, promise: _Promise, least: float) -> Estimate | None:
        """Return a plan with few lean layers that fits and is faster than `least`; None where none is found.

        It has the fewest where more of them never reserve more. How blocks lie may let fewer fit where more
        do not: some of those are tried as well.
        """
        room_bytes = self._estimator.room_for(lean)
        # The place of the most lean layers known not to fit, and of the fewest known to, or too slow.
        below, above = -1, self._num_faster(lean, promise, least)
        found: Estimate | None = None
        guess, stride = promise.number, 1
        misfits = set[int]()
        while above - below > 1:
            guess = min(max(guess, below + 1), above - 1)
            estimate = self._fitting(lean, promise, guess)
            if estimate is None:
                misfits.add(guess)
                below, guess, stride = guess, guess + stride, 2 * stride
            else:
                above, found = guess, estimate
                self.learn(estimate)
                spare_bytes = room_bytes - estimate.peak_device_bytes
                guess -= max(1, int(spare_bytes / promise.layer_bytes))
        leapt = self._leapt(lean, promise, above, misfits, found)
        return found if leapt is None else leapt

    def _leapt(
        self,
        lean: TrainConfig,
        promise: _Promise,
        above: int,
        misfits: Collection[int],
        found: Estimate | None,
    ) -> Estimate | None:
        """Return a plan that fits at a leap below the place `above`, faster than the one found, if any."""

        def may_fit(count: int) -> bool:
            return self._estimator.may_fit(self.config(lean, promise.plan, count))

        first = bisect.bisect_left(promise.counts, True, hi=above, key=may_fit)
        least = 0.0 if found is None else speed_of(found) * (1 + NOISE)
        for guess in dict.fromkeys(int(first + share * (above - first)) for share in _LEAPS):
            if guess in misfits or guess >= above:
                continue
            config = self.config(lean, promise.plan, promise.counts[guess])
            if (self._estimator.tokens_per_second(config) or 0.0) <= least:
                break
            if (estimate := self._fitting(lean, promise, guess)) is not None:
                return estimate
        return None

    def _fitting(self, lean: TrainConfig, promise: _Promise, number: int) -> Estimate | None:
        """Return the estimate of a plan by its place in a promise; None where it does not fit."""
        config = self.config(lean, promise.plan, promise.counts[number])
        return self._estimator.fitting(config) if self._estimator.may_fit(config) else None

    def _num_faster(self, lean: TrainConfig, promise: _Promise, least: float) -> int:
        """Return how many of the numbers of lean layers make a step faster than `least`: the first ones."""

        def is_slower(count: int) -> bool:
            speed = self._estimator.tokens_per_second(self.config(lean, promise.plan, count))
            return speed is None or speed <= least

        return bisect.bisect_left(promise.counts, True, key=is_slower)

    def config(self, lean: TrainConfig, plan: str, count: int) -> TrainConfig:
        """Return the configuration with a plan, of which there is a trace then."""
        any_number = dataclasses.replace(lean, checkpoint_plan=plan)
        config = dataclasses.replace(any_number, checkpoint_layers=count)
        spec = TraceSpec.of(config)
        if spec not in self._traces:
            of_any = self._traces[TraceSpec.of(any_number)]
            assert isinstance(of_any, Trace)
            self._traces[spec] = with_lean_layers_later(of_any, count)
        return config


@dataclass(frozen=True, kw_only=True, slots=True)
class _Family:
    """Configurations alike but for checkpointing: the one with all layers checkpointed, and a promise."""

    lean: TrainConfig
    most_tokens_per_second: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Families:
    """The families of a class that may beat its best, the best promise first."""

    best: Estimate
    """The best of the class without them."""
    answer: Estimate | None = None
    """The answer without them, of this class or another; None where this one may not be chosen."""
    leans: tuple[TrainConfig, ...]
    """Each family's configuration with all layers checkpointed."""
    host_memory_bytes: int | None = None
    """Host memory that may be taken; None where that is not said."""

    def specs(self) -> set[TraceSpec]:
        """Return the specs of the traces that price the plans of all of them."""
        return {spec for lean in self.leans for spec in plan_specs(lean, self.host_memory_bytes)}


def families_of(
    candidates: Candidates,
    configs: Iterable[TrainConfig],
    estimator: Estimator,
    *,
    methods: frozenset[str],
    allow: str | None,
) -> list[Families]:
    """Return the families of each class whose plans may beat what `candidates` has found.

    `configs`: those of the search. `methods`: those whose checkpointing is to be solved. `allow`: the highest
    class that may be the answer, None for any.
    """
    leans = [
        config
        for config in configs
        if config.method in methods
        and config.activation_checkpointing == 1
        and config.parallelism == "none"
        and not (config.activation_offloading or config.is_compiled or config.has_plan)
    ]
    found = []
    chosen = allow or "numerics"
    for name in TRADEOFF_CLASSES if leans else ():
        if allow is not None and LEVEL[name] > LEVEL[allow]:
            continue
        best = candidates.best(candidates.exactly(name))
        if best is not None:
            may_be_chosen = LEVEL[name] <= LEVEL[chosen]
            answer = candidates.best(candidates.at_most(chosen)) if may_be_chosen else None
            families = _families(candidates, leans, estimator, name, best, answer)
            if of_class := _sharing_traces(families, estimator.host_memory_bytes):
                of_one = Families(
                    best=best,
                    answer=answer,
                    leans=of_class,
                    host_memory_bytes=estimator.host_memory_bytes,
                )
                found.append(of_one)
    return found


def solved_configs(
    candidates: Candidates,
    by_class: Iterable[Families],
    solver: PlanSolver,
    trace: Callable[[set[TraceSpec]], None],
) -> list[TrainConfig]:
    """Solve the families of each class; return the plans that fit. `trace` makes the traces of specs."""
    by_class = list(by_class)
    if not by_class:
        return []
    try:
        trace(set().union(*(families.specs() for families in by_class)))
    except AutotuneError as error:
        _log.info("no plan of checkpointing can be traced: %s", error)
        return []
    found = []
    rivals = [families.best for families in by_class if families.answer is not None]
    for families in by_class:
        solver.learn(families.best)
        known = [families.best]
        leans: Sequence[TrainConfig] = families.leans
        for _ in range(MOST_SOLVED):
            answer = families.answer
            if answer is not None:
                _, answer = _winner(candidates, [answer, *rivals])
            least = {lean: _least_to_win(candidates, lean, known, answer) for lean in leans}
            promises = {
                lean: promise for lean in leans if (promise := solver.promise(lean)) > least[lean]
            }
            if not promises:
                break
            lean = _first_to_solve(candidates, promises)
            leans = [other for other in promises if other != lean]
            if (solved := solver.solved(lean, least[lean])) is not None:
                known.append(solved)
                if answer is not None:
                    rivals.append(solved)
                found.append(solved.config)
    return found


def _first_to_solve(candidates: Candidates, promises: Mapping[TrainConfig, float]) -> TrainConfig:
    """Return the configuration that would be chosen if each kept its promise.

    Of two that differ in how segments grow alone it is the one whose segments expand: more fits then, and
    what it finds bounds the search of the other.
    """
    least = max(promises.values()) * (1 - NOISE)

    def order(lean: TrainConfig) -> tuple[object, ...]:
        growing = dataclasses.replace(lean, expandable_segments=True)
        return candidates.gives_up(growing), not lean.expandable_segments, -promises[lean]

    return min((lean for lean, promise in promises.items() if promise >= least), key=order)


def _winner(candidates: Candidates, known: Sequence[Estimate]) -> tuple[float, Estimate]:
    """Return the most tokens per second of what is known, and what is chosen of it.

    Among those within the noise of the fastest, the one that gives up least is chosen.
    """
    most = max(map(speed_of, known))
    as_fast = (each for each in known if speed_of(each) >= most * (1 - NOISE))
    return most, min(as_fast, key=lambda e: (candidates.gives_up(e.config), -speed_of(e)))


def _least_to_win(
    candidates: Candidates,
    lean: TrainConfig,
    known: Sequence[Estimate],
    answer: Estimate | None,
) -> float:
    """Return the tokens per second above which a plan of a configuration changes what is chosen.

    Either it is chosen before the others of its class, which are `known`, or the answer is no longer within
    the noise of it: what is then chosen in its place is faster, though it may be another.
    """
    most, best = _winner(candidates, known)
    plan = dataclasses.replace(lean, checkpoint_plan="recompute", checkpoint_layers=LEAST_LAYERS)
    gives_up, of_best = map(candidates.gives_up, (plan, best.config))
    if gives_up == of_best:
        least = speed_of(best)
    else:
        least = most * (1 - NOISE if gives_up < of_best else 1 + NOISE)
    if answer is None or candidates.form_of(lean) != candidates.form_of(answer.config):
        return least
    return min(least, speed_of(answer) / (1 - NOISE))


def _sharing_traces(
    families: Iterator[_Family], host_memory_bytes: int | None
) -> tuple[TrainConfig, ...]:
    """Return the first MOST_FAMILIES, and of the others those that are priced by the same traces.

    One that changes less than all of the first may be as fast.
    """
    first = tuple(each.lean for each in itertools.islice(families, MOST_FAMILIES))
    traced = {spec for lean in first for spec in plan_specs(lean, host_memory_bytes)}
    return first + tuple(
        each.lean for each in families if plan_specs(each.lean, host_memory_bytes) <= traced
    )


def _families(
    candidates: Candidates,
    leans: Iterable[TrainConfig],
    estimator: Estimator,
    name: str,
    anchor: Estimate,
    answer: Estimate | None,
) -> Iterator[_Family]:
    """Yield the families of a class that may win against its best, the best promise first."""
    is_in_form = candidates.in_form_of(anchor.config)
    found = [
        family
        for lean in leans
        if candidates.class_of(lean) == name
        and is_in_form(lean)
        and (family := _promise(lean, estimator)) is not None
        and family.most_tokens_per_second > _least_to_win(candidates, lean, [anchor], answer)
    ]
    for family in sorted(found, key=lambda f: (-f.most_tokens_per_second, repr(f.lean))):
        free = dataclasses.replace(family.lean, activation_checkpointing=0)
        if not estimator.may_fit(free) or estimator.fitting(free) is None:
            yield family


def _promise(lean: TrainConfig, estimator: Estimator) -> _Family | None:
    """Return the family with the most that a plan may reach; None where checkpointing does not help."""
    free = dataclasses.replace(lean, activation_checkpointing=0)
    if not estimator.supports(free) or not estimator.may_fit(lean):
        return None
    lean_speed, free_speed = map(estimator.tokens_per_second, (lean, free))
    if lean_speed is None or free_speed is None or lean_speed >= free_speed:
        return None
    room_bytes = estimator.room_for(lean)
    free_bytes, lean_bytes = map(estimator.floor_bytes, (free, lean))
    share = 0.0
    if free_bytes > room_bytes:
        share = (free_bytes - room_bytes) / (free_bytes - lean_bytes)
    least_cost = _LEAST_COST[bool(estimator.host_memory_bytes)]
    seconds = 1 / free_speed + least_cost * share * (1 / lean_speed - 1 / free_speed)
    return _Family(lean=lean, most_tokens_per_second=1 / seconds)
