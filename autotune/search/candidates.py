"""Priced configurations of a search, fastest first; what could win is replayed.

The answer equals that of a full replay of every one: a configuration is passed over only when live
tensors alone exceed the budget, or when its speed, which paging can only lower, is below what already
fits.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from autotune.errors import HardwareError
from autotune.predict.estimator import Estimator
from autotune.records.answer import Sureness
from autotune.records.estimate import Estimate
from autotune.records.measurement import NOISE
from autotune.space.config import TrainConfig
from autotune.space.knobs import CHECKPOINTING, KNOBS
from autotune.space.lengths import vary
from autotune.space.tradeoffs import LEVEL, Form, form, gives_up, tradeoff_class
from autotune.speed.sureness import TimedWork, odds_of

_SAVES_MEMORY = ("expandable_segments", "activation_offloading")
"""Settings that are switched on for memory alone, and with which PyTorch's allocator may reserve more
(studies/no-card/README.md)."""


_CHANGES_ON_THE_WAY = (
    "micro_batch_size", *CHECKPOINTING, "activation_offloading", "attention", "liger",
    "loss_mini_batches", "torch_empty_cache_steps", "expandable_segments", "torch_compile",
    "torch_compile_backend",
)  # fmt: skip
"""Settings that may change between a checkpoint and what goes on from it: neither what is trained nor the
optimizer's state depends on them, and none is of the class recipe."""
_KEPT_ON_THE_WAY = (
    *("method", "sequence_length", "num_gpus"),
    *(name for name in KNOBS if name not in _CHANGES_ON_THE_WAY),
)

_kept_on_the_way = operator.attrgetter(*_KEPT_ON_THE_WAY)

_MOST_RIVALS = 100
"""Configurations that an answer's odds are taken against, the fastest first."""
_LIKELY = 0.05
"""Odds from which a rival is named."""

MOST_TIED = 10
"""Most that are named as tied with a winner."""

FALLBACKS = 3
FALLBACK_SHARE = 0.1
"""Share of the peak that each fallback gives back at least. [judgement] Several times what predictions are
off by."""

SCARCE_SHARE = 0.1
"""Share of the budget that memory is scarce below. [judgement]"""

_Ranked = list[tuple[float, TrainConfig]]
"""Tokens per second at most, with the configuration; fastest first."""


class Candidates:
    """Configurations by falling speed; a full replay is made when one is asked for, once."""

    def __init__(
        self, estimator: Estimator, configs: Iterable[TrainConfig], base: TrainConfig
    ) -> None:
        self._estimator = estimator
        self._base = base
        self._estimates: dict[TrainConfig, Estimate] = {}
        self._rejected: set[TrainConfig] = set()
        """Configurations that a replay shows not to fit, their own up to there or another's."""
        self._classes: dict[TrainConfig, str] = {}
        self._rank(configs, [])

    def _rank(self, configs: Iterable[TrainConfig], ranked: _Ranked) -> None:
        """Rank configurations among others that are ranked."""
        estimator, base = self._estimator, self._base
        ranked = list(ranked)
        for config in configs:
            if not estimator.may_fit(config):
                continue
            speed = estimator.tokens_per_second(config)
            if speed is None:
                raise HardwareError(
                    f"The speed of {estimator.gpu.name} is not known",
                    why=f"a peak rate or the bandwidth is missing ({estimator.gpu.source})",
                    remedy="Name a card like it with --gpu (autotune gpus lists what is known)",
                )
            ranked.append((speed, config))
        # The order among equals must not depend on the order of the space's file.
        ranked.sort(key=operator.itemgetter(0), reverse=True)
        self._ranked: _Ranked = [
            pair
            for _, equals in itertools.groupby(ranked, operator.itemgetter(0))
            for pair in _by_name(list(equals))
        ]
        by_form: dict[Form, _Ranked] = {}
        for pair in self._ranked:
            by_form.setdefault(form(pair[1], base), []).append(pair)
        self._by_form = sorted(by_form.items())

    def with_more(self, configs: Iterable[TrainConfig]) -> Candidates:
        """Return these and more, with what has been replayed of these."""
        other = copy.copy(self)
        other.__dict__.pop("_speeds", None)  # It is of these alone.
        other._rank(configs, self._ranked)
        return other

    @property
    def num_possible(self) -> int:
        """Configurations whose live tensors alone fit."""
        return len(self._ranked)

    def priced(self) -> list[tuple[float, int]]:
        """(tokens per second, device bytes at least) of each, fastest first."""
        return [(speed, self._estimator.floor_bytes(config)) for speed, config in self._ranked]

    @property
    def num_replayed(self) -> int:
        """Configurations that a replay has judged, their own or another's."""
        return len(self._estimates) + len(self._rejected - self._estimates.keys())

    @property
    def num_replayed_oom(self) -> int:
        misfits = {config for config, e in self._estimates.items() if not self.fits(e)}
        return len(misfits | self._rejected)

    def class_of(self, config: TrainConfig) -> str:
        """Trade-off class against the base."""
        found = self._classes.get(config)
        if found is None:
            found = self._classes[config] = tradeoff_class(config, self._base)
        return found

    def gives_up(self, config: TrainConfig) -> tuple[object, ...]:
        """Return a key that orders configurations by what they give up against the base, least first."""
        return gives_up(config, self._base)

    def exactly(self, name: str) -> Callable[[TrainConfig], bool]:
        """Whether a configuration is of that class."""
        return lambda config: self.class_of(config) == name

    def at_most(self, allow: str) -> Callable[[TrainConfig], bool]:
        """Whether a configuration gives up no more than `allow`."""
        return lambda config: LEVEL[self.class_of(config)] <= LEVEL[allow]

    def fits(self, estimate: Estimate) -> bool:
        return self._estimator.fits(estimate)

    def estimate(self, config: TrainConfig) -> Estimate:
        found = self._estimates.get(config)
        if found is None:
            found = self._estimates[config] = self._estimator.estimate(config)
        return found

    def _fitting(self, config: TrainConfig) -> Estimate | None:
        """The configuration's estimate; None where it does not fit."""
        if config in self._rejected:
            return None
        estimate = self._estimates.get(config) or self._estimator.fitting(config)
        if estimate is None or not self.fits(estimate):
            self._rejected.add(config)
            return None
        self._estimates[config] = estimate
        return estimate

    def form_of(self, config: TrainConfig) -> Form:
        """Return the form of a configuration, the lower the better (autotune.space.tradeoffs.form)."""
        return form(config, self._base)

    def in_form_of(self, config: TrainConfig) -> Callable[[TrainConfig], bool]:
        """Whether a configuration makes no further trades than this one."""
        most = form(config, self._base)
        return lambda other: form(other, self._base) <= most

    def fastest(self, wanted: Callable[[TrainConfig], bool]) -> Estimate | None:
        """The fastest of the first form in which something wanted fits; None when nothing does."""
        return next(
            (best for _, ranked in self._by_form if (best := self._fastest(ranked, wanted))), None
        )

    def fastest_of_any_form(self) -> Estimate | None:
        """The fastest of all; None when nothing fits."""
        return self._fastest(self._ranked, lambda _: True)

    def sureness(self, best: Estimate, wanted: Callable[[TrainConfig], bool]) -> Sureness | None:
        """How sure an estimate is to be the fastest of what is wanted; None where its time is not known."""
        first = self._timed_work(best.config)
        if first is None:
            return None
        rivals, works = list[TrainConfig](), list[TimedWork]()
        for _, config in self._ranked:
            if len(rivals) == _MOST_RIVALS:
                break
            if config == best.config or config in self._rejected or not wanted(config):
                continue
            work = self._timed_work(config)
            if work is not None:
                rivals.append(config)
                works.append(work)
        odds = odds_of(first, works, tolerance=NOISE)
        likely = sorted(
            (chance, number) for number, chance in enumerate(odds.of_rivals) if chance >= _LIKELY
        )
        for chance, number in reversed(likely):
            rival = self._fitting(rivals[number])
            if rival is not None:
                return Sureness(odds=odds.of_first, rival=rival, rival_odds=float(chance))
        return Sureness(odds=odds.of_first, rival=None)

    def _timed_work(self, config: TrainConfig) -> TimedWork | None:
        parts, speed = self._estimator.parts(config), self._estimator.tokens_per_second(config)
        if parts is None or speed is None:
            return None
        seconds = sum(part.seconds for part in parts.values())
        return TimedWork(parts=parts, work=speed * seconds)

    def further(self, wanted: Callable[[TrainConfig], bool], *others: Estimate) -> Estimate | None:
        """The fastest of any form, where it is faster than these; of those tied the least is given up."""
        fastest = self._fastest(self._ranked, wanted)
        if fastest is None:
            return None
        least = speed_of(fastest) * (1 - NOISE)
        of_others = max(map(speed_of, others), default=0.0)
        if least <= of_others:
            return None
        return self._giving_up_least(self._ranked, wanted, max(least, of_others * (1 + NOISE)))

    def _fastest(self, ranked: _Ranked, wanted: Callable[[TrainConfig], bool]) -> Estimate | None:
        best: Estimate | None = None
        for speed, config in ranked:
            if best is not None and speed <= speed_of(best):
                break
            if not wanted(config):
                continue
            estimate = self._fitting(config)
            if estimate is not None and (best is None or speed_of(estimate) > speed_of(best)):
                best = estimate
        return best

    def best(self, wanted: Callable[[TrainConfig], bool]) -> Estimate | None:
        """The winner; None when nothing fits.

        The rule: docs/ARCHITECTURE.md, "What fastest means".

        Of the first form in which something fits, among configurations within NOISE of the fastest, the
        one that gives up least: the lowest class, the usual rank, the fewest changes, in this order. Then
        the most headroom where memory is scarce, else the highest speed.
        What the winner has of its own is put back to the base's, as long as the whole stays within
        NOISE of the fastest: so it is never slower than a base that is wanted and fits.
        """
        for _, ranked in self._by_form:
            fastest = self._fastest(ranked, wanted)
            if fastest is not None:
                least = speed_of(fastest) * (1 - NOISE)
                return self._giving_up_least(ranked, wanted, least)
        return None

    def _giving_up_least(
        self, ranked: _Ranked, wanted: Callable[[TrainConfig], bool], least: float
    ) -> Estimate:
        """The winner among those that are as fast as `least`, one at least of which fits."""
        groups: dict[tuple[object, ...], list[TrainConfig]] = {}
        for speed, config in ranked:
            if speed < least:
                break
            if wanted(config):
                groups.setdefault(gives_up(config, self._base), []).append(config)
        for _, configs in sorted(groups.items(), key=operator.itemgetter(0)):
            fitting = [
                estimate
                for estimate in map(self._fitting, configs)
                if estimate is not None and speed_of(estimate) >= least
            ]
            if fitting:
                winner = min(fitting, key=lambda e: (self._scarce_bytes(e), -speed_of(e)))
                winner = self._better_without(winner) or winner
                return self._with_what_pays(winner, wanted, least)
        raise AssertionError("the fastest is in one of the groups")

    def _scarce_bytes(self, estimate: Estimate) -> int:
        """Bytes by which it takes more of the budget than leaves memory plenty."""
        plenty = int(self._estimator.memory_budget_bytes * (1 - SCARCE_SHARE))
        return max(estimate.resident_bytes - plenty, 0)

    def _with_what_pays(
        self, estimate: Estimate, wanted: Callable[[TrainConfig], bool], least: float
    ) -> Estimate:
        """The same with settings as in the base, those that gain least first, down to the least speed.

        A setting stays where the base's would give up more beside the others: bfloat16 weights lose small
        updates with the base's optimizer.
        """
        form_before = self.form_of(estimate.config)
        while True:
            nearer = [
                other
                for _, config in put_back(estimate.config, self._base)
                if self._speeds.get(config, 0.0) >= least
                and wanted(config)
                and self.form_of(config) <= form_before
                and (other := self._fitting(config)) is not None
                and speed_of(other) >= least
                and self._better_without(other) is None
            ]
            if not nearer:
                return estimate
            estimate = max(nearer, key=speed_of)

    def _better_without(self, estimate: Estimate) -> Estimate | None:
        """The same configuration without a setting that costs the memory which it should save.

        None where there is no such setting, and where batches vary in length: what is predicted is full
        length, and growing segments keep those in one piece.
        """
        if vary(estimate.config.batching):
            return None
        for name in _SAVES_MEMORY:
            off: dict[str, Any] = {name: False}
            without = dataclasses.replace(estimate.config, **off)
            if without == estimate.config or without not in self._speeds:
                continue
            other = self._fitting(without)
            if (
                other is not None
                and other.peak_device_bytes < estimate.peak_device_bytes
                and speed_of(other) >= speed_of(estimate)
            ):
                return other
        return None

    @functools.cached_property
    def _speeds(self) -> dict[TrainConfig, float]:
        """Tokens per second at most, by configuration."""
        return {config: speed for speed, config in self._ranked}

    def tied(self, winner: Estimate, wanted: Callable[[TrainConfig], bool]) -> tuple[Estimate, ...]:
        """Others of the winner's class and form that fit, as fast but for the noise: the first MOST_TIED."""
        ranked = dict(self._by_form)[self.form_of(winner.config)]
        fastest = self._fastest(ranked, wanted) or winner
        least = speed_of(fastest) * (1 - NOISE)
        of_class = self.exactly(self.class_of(winner.config))
        found: list[Estimate] = []
        for speed, config in ranked:
            if speed < least or len(found) == MOST_TIED:
                break
            if config != winner.config and of_class(config):
                estimate = self._fitting(config)
                if estimate is not None and speed_of(estimate) >= least:
                    found.append(estimate)
        return tuple(sorted(found, key=lambda e: (-speed_of(e), repr(e.config))))

    def pool(
        self, wanted: Callable[[TrainConfig], bool], limit: int, *, always: TrainConfig | None
    ) -> tuple[Estimate, ...]:
        """The fastest whose live tensors fit, estimated in full, whether they fit or not.

        What is better without one of its settings is left out. `always`: is among them, however slow,
        where it is one of those that are wanted.
        """
        configs = [config for _, config in self._ranked if wanted(config)]
        late = [config for config in configs[limit:] if config == always]
        return tuple(
            estimate
            for estimate in map(self.estimate, configs[:limit] + late)
            if estimate.config == always or self._better_without(estimate) is None
        )

    def fallbacks(
        self, answer: Estimate, wanted: Callable[[TrainConfig], bool]
    ) -> tuple[Estimate, ...]:
        """Return plan B: what a run goes on with when memory runs out, each with more room than the last.

        The fastest that give back FALLBACK_SHARE of the peak before; the last is the one that takes least.
        All go on from a checkpoint of the answer, with the same samples in each optimizer step.
        """
        goes_on = goes_on_from(answer.config)
        configs = [config for _, config in self._ranked if wanted(config) and goes_on(config)]
        found: list[Estimate] = []
        for number in range(1, FALLBACKS + 1):
            before = found[-1] if found else answer
            # What is paged takes whatever is left on the device: that is no need.
            most_bytes = int(before.peak_reserved_bytes * (1 - FALLBACK_SHARE))
            most_floor_bytes = most_bytes + answer.nontorch_bytes
            left = [c for c in configs if self._estimator.floor_bytes(c) <= most_floor_bytes]
            if number == FALLBACKS:
                left = sorted(left, key=self._estimator.floor_bytes)
            found_within = (self._estimator.reserving(config, most_bytes) for config in left)
            fallback = next(filter(None, found_within), None)
            if fallback is None:
                break
            found.append(fallback)
        return tuple(found)

    def considered(self, limit: int) -> tuple[Estimate, ...]:
        """Return what has a replay of its own: what fits first, fastest first."""
        return tuple(
            sorted(
                self._estimates.values(),
                key=lambda e: (not self.fits(e), -speed_of(e), repr(e.config)),
            )[:limit]
        )


_settings_of = operator.attrgetter(*TrainConfig.names())


def _by_name(equals: _Ranked) -> _Ranked:
    """Order by the configurations' text, of which the settings in which they differ are enough."""
    if len(equals) < 2:
        return equals
    rows = [_settings_of(config) for _, config in equals]
    columns = [column for column in zip(*rows, strict=True) if column.count(column[0]) < len(rows)]
    # In the text a comma is behind each value: 16 is before 1.
    texts = zip(*([f"{value!r}," for value in column] for column in columns), strict=True)
    ordered = sorted(zip(texts, range(len(rows)), strict=False))
    return [equals[number] for _, number in ordered] if columns else equals


def goes_on_from(answer: TrainConfig) -> Callable[[TrainConfig], bool]:
    """Whether a run of another configuration can go on from a checkpoint of the answer."""
    kept = _kept_on_the_way(answer)
    return lambda config: config != answer and _kept_on_the_way(config) == kept


def put_back(config: TrainConfig, base: TrainConfig) -> Iterator[tuple[str, TrainConfig]]:
    """Yield each setting that differs from the base's, with the configuration that has the base's instead."""
    for name in KNOBS:
        value = getattr(base, name)
        if name in CHECKPOINTING and (config.has_plan or base.has_plan):
            of_base = {each: getattr(base, each) for each in CHECKPOINTING}
            changed_config = dataclasses.replace(config, **of_base)
            if name == CHECKPOINTING[0] and changed_config != config:
                yield name, changed_config
        elif value != getattr(config, name):
            changed = {name: value}
            if name == "micro_batch_size":
                samples = config.effective_batch_size // config.data_parallel_size
                changed["gradient_accumulation_steps"] = samples // value
            yield name, dataclasses.replace(config, **changed)


def speed_of(estimate: Estimate) -> float:
    assert estimate.tokens_per_second is not None
    return estimate.tokens_per_second
