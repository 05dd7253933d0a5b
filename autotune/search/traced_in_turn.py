"""Traces in turn: what only saves memory is traced where memory keeps everything faster from fitting.

With a setting of SAVERS a step does the same work and more: the configuration without it bounds its speed,
whether it fits or not. What is clearly slower by this bound than something of its kind that fits cannot be an
answer, and is not traced. Of a model with room to spare, one trace in three is left.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from autotune.errors import ConfigError
from autotune.predict.estimator import Estimator
from autotune.records.estimate import TraceSpec
from autotune.search.candidates import Candidates, speed_of
from autotune.space.config import TRADEOFF_CLASSES, TrainConfig
from autotune.space.tradeoffs import loses_small_updates

MARGIN = 1.1
"""How much faster something that fits must be than the bound. [judgement] So slow a rival hardly
counts among an answer's odds."""

SAVERS: Mapping[str, Callable[[Any], Any]] = {
    # Every layer is 1, every second 2, none 0.
    "activation_checkpointing": lambda every: 0 if every else None,
    "activation_offloading": lambda offloads: False if offloads else None,
    "loss_mini_batches": lambda number: 1 if number > 1 else None,
    "quantization": lambda name: "nf4" if name == "nf4-double" else None,
}
"""Settings that save memory alone, and cost time: the value that saves less, for each that saves some."""

_UNLIMITED_BYTES = 1 << 60


class TracesInTurn:
    """The traces of a search's configurations, made as far as they may matter."""

    def __init__(
        self,
        configs: Sequence[TrainConfig],
        base: TrainConfig,
        estimator: Estimator,
        trace: Callable[[set[TraceSpec]], None],
        *,
        is_all: bool,
    ) -> None:
        """Remember what there is; nothing is traced.

        `configs`: those of the search. `trace` makes traces of specs, which the estimator reads; it raises
        ConfigError where the model supports none of them. `is_all`: everything is traced at first.
        """
        self._estimator = estimator
        self._trace = trace
        self._by_spec: dict[TraceSpec, list[TrainConfig]] = {}
        for config in configs:
            self._by_spec.setdefault(TraceSpec.of(config), []).append(config)
        self._faster = {
            spec: [] if is_all else [each for each in _faster(spec, base) if each in self._by_spec]
            for spec in self._by_spec
        }
        self._waiting = {spec for spec, faster in self._faster.items() if faster}
        self._passed_over: set[TraceSpec] = set()
        self._hopeless: set[TraceSpec] = set()

    @property
    def num_passed_over(self) -> int:
        """How many configurations are not traced, since they are slower than others that fit."""
        return sum(len(self._by_spec[spec]) for spec in self._passed_over)

    def first(
        self, *others: TraceSpec, is_crowded: Callable[[TrainConfig], bool]
    ) -> list[TrainConfig]:
        """Trace what nothing bounds, and others besides; return the configurations that can be priced.

        `is_crowded`: whether most of the memory is taken before a step begins, so that checkpointing will be
        asked for: it is traced without waiting then.
        """
        self._waiting -= {*others}
        self._waiting -= {
            spec
            for spec in self._waiting
            if self._waiting.isdisjoint(self._faster[spec]) and is_crowded(self._by_spec[spec][0])
        }
        specs = {*self._by_spec, *others} - self._waiting
        self._trace(specs)
        return self._priced(specs | self._come_along())

    def leave_out(self, is_possible: Callable[[TrainConfig], bool]) -> None:
        """Go on with the configurations that are possible; trace nothing for the others."""
        for spec, configs in self._by_spec.items():
            if possible := list(filter(is_possible, configs)):
                self._by_spec[spec] = possible
            else:
                self._hopeless.add(spec)
        self._waiting -= self._hopeless

    def rest(
        self, candidates: Candidates, besides: Callable[[Candidates], set[TraceSpec]]
    ) -> Candidates:
        """Trace what may be faster than these candidates; return them with what has been traced.

        `besides` says what is likely to be asked for next, given the candidates of a turn: it is traced with
        the turn, since a request costs time by itself.
        """
        bounds = _Bounds(self._estimator, self._by_spec, self._faster)
        while self._waiting:
            turn = {spec for spec in self._waiting if self._waiting.isdisjoint(self._faster[spec])}
            self._waiting -= turn
            # A step that a model cannot do is none that it can do with less memory.
            turn = {spec for spec in turn if not any(map(self._is_refused, self._faster[spec]))}
            bests = _Bests(candidates)
            self._passed_over |= {
                spec
                for spec in turn
                if not any(itertools.starmap(bests.may_be_beaten, bounds.of(spec)))
            }
            if specs := turn - self._passed_over:
                candidates = self._with(candidates, specs | besides(candidates))
        return candidates

    def where(self, candidates: Candidates, wanted: Callable[[TrainConfig], bool]) -> Candidates:
        """Trace what was passed over of the configurations that are wanted."""
        specs = self.passed_over_of(wanted)
        self._passed_over -= specs
        return self._with(candidates, specs)

    def passed_over_of(self, wanted: Callable[[TrainConfig], bool]) -> set[TraceSpec]:
        """Return the specs so far passed over of the configurations that are wanted."""
        return {spec for spec in self._passed_over if any(map(wanted, self._by_spec[spec]))}

    def left(self) -> list[TraceSpec]:
        """Return the specs that are passed over, of each method in turn.

        Of a method the highest bound is first, which less memory asks for first, and of the same bound what
        saves least. In turn, since a search wants the fastest of each form, however slow.
        """
        bounds = _Bounds(self._estimator, self._by_spec, self._faster)
        most = {
            spec: max((bound for _, bound in bounds.of(spec)), default=0.0)
            for spec in self._passed_over
        }
        return of_each_method(
            sorted(most, key=lambda spec: (-most[spec], self._num_savers(spec), repr(spec)))
        )

    def _num_savers(self, spec: TraceSpec) -> int:
        """Return how many settings apart a step is from one that nothing bounds."""
        return max((1 + self._num_savers(each) for each in self._faster[spec]), default=0)

    def _with(self, candidates: Candidates, specs: set[TraceSpec]) -> Candidates:
        if not specs:
            return candidates
        try:
            self._trace(specs)
        except ConfigError:  # The model supports none of them.
            return candidates
        return candidates.with_more(self._priced(specs | self._come_along()))

    def _is_refused(self, spec: TraceSpec) -> bool:
        """Whether a spec was asked for, or would have been, and the model does not support it."""
        others = self._waiting | self._passed_over | self._hopeless
        return spec not in others and not self._estimator.supports(self._by_spec[spec][0])

    def _come_along(self) -> set[TraceSpec]:
        """Take specs that were traced beside others from those that are not traced.

        With a dataset, one sample at a time is traced with several.
        """
        traced = {
            spec
            for spec in self._waiting | self._passed_over
            if self._estimator.supports(self._by_spec[spec][0])
        }
        self._waiting -= traced
        self._passed_over -= traced
        return traced

    def _priced(self, specs: set[TraceSpec]) -> list[TrainConfig]:
        return [
            config
            for spec, configs in self._by_spec.items()
            if spec in specs
            for config in configs
            if self._estimator.supports(config)
        ]


def of_each_method(specs: Iterable[TraceSpec]) -> list[TraceSpec]:
    """Return the first spec of each method, then the second of each, and so on."""
    by_method: dict[str, list[TraceSpec]] = {}
    for spec in specs:
        by_method.setdefault(spec.method, []).append(spec)
    turns = itertools.zip_longest(*by_method.values())
    return [spec for turn in turns for spec in turn if spec is not None]


def _faster(spec: TraceSpec, base: TrainConfig) -> Iterator[TraceSpec]:
    """Yield the specs of steps that do less work, a setting apart; the base's settings are asked for."""
    for name, faster in SAVERS.items():
        value = getattr(spec, name)
        if value != getattr(base, name) and (other := faster(value)) is not None:
            changed: dict[str, Any] = {name: other}
            yield dataclasses.replace(spec, **changed)


class _Bounds:
    """Speeds that configurations cannot pass, from the traces of steps that do less work."""

    def __init__(
        self,
        estimator: Estimator,
        by_spec: Mapping[TraceSpec, Sequence[TrainConfig]],
        faster: Mapping[TraceSpec, Sequence[TraceSpec]],
    ) -> None:
        # Where memory is never short, nothing is paged.
        self._estimator = estimator.with_budget(_UNLIMITED_BYTES)
        self._by_spec = by_spec
        self._faster = faster
        self._distinct = functools.cache(self._find_distinct)
        self._speed = functools.cache(self._find_speed)

    def of(self, spec: TraceSpec) -> Iterator[tuple[TrainConfig, float]]:
        """Yield configurations that stand for all of a spec, and the most tokens per second of each."""
        for settings, config in self._distinct(spec).items():
            yield config, self._bound(spec, settings)

    def _bound(self, spec: TraceSpec, settings: _Settings) -> float:
        return min(self._speed(faster, settings) for faster in self._faster[spec])

    def _find_speed(self, spec: TraceSpec, settings: _Settings) -> float:
        """Return the speed of a spec's configuration, or its bound where it is not traced."""
        config = self._distinct(spec).get(settings)
        if config is None:
            return math.inf
        if self._estimator.supports(config):
            speed = self._estimator.tokens_per_second(config)
            return math.inf if speed is None else speed
        # Passed over, or the model does not support it.
        return self._bound(spec, settings) if self._faster[spec] else math.inf

    def _find_distinct(self, spec: TraceSpec) -> dict[_Settings, TrainConfig]:
        return {_settings_of(config): config for config in self._by_spec[spec]}


_Settings = tuple[object, ...]
_settings_of = operator.attrgetter(
    *(name for name in TrainConfig.names() if name not in (*SAVERS, "expandable_segments"))
)
"""Settings in which a configuration agrees with the one that bounds it: how segments grow takes no time."""


class _Bests:
    """The fastest that fit, of each kind of which a search wants the fastest."""

    def __init__(self, candidates: Candidates) -> None:
        self._candidates = candidates
        self._kinds = [candidates.exactly(name) for name in TRADEOFF_CLASSES]
        self._kinds.append(
            lambda config: config.method == "full" and not loses_small_updates(config)
        )
        self._bests = [candidates.fastest(kind) for kind in self._kinds]
        self._fastest = candidates.fastest_of_any_form()

    def may_be_beaten(self, config: TrainConfig, tokens_per_second: float) -> bool:
        """Whether a configuration of at most this speed may be the fastest of anything that is wanted."""
        form = self._candidates.form_of(config)
        for kind, best in zip(self._kinds, self._bests, strict=True):
            if not kind(config):
                continue
            if best is None or form < (of_best := self._candidates.form_of(best.config)):
                return True
            if form == of_best and tokens_per_second * MARGIN > speed_of(best):
                return True
        return self._fastest is None or tokens_per_second * MARGIN > speed_of(self._fastest)
