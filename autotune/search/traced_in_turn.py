"""Traces in turn: what only saves memory is traced where memory keeps everything faster from fitting.

With a setting of SAVERS a step does the same work and more: the configuration without it bounds its speed,
whether it fits or not. What is clearly slower by this bound than something of its kind that fits cannot be an
answer, and is not traced. Of a model with room to spare, one trace in three is left.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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

    @property
    def num_passed_over(self) -> int:
        """How many configurations are not traced, since they are slower than others that fit."""
        return sum(len(self._by_spec[spec]) for spec in self._passed_over)

    def first(self, *others: TraceSpec) -> list[TrainConfig]:
        """Trace what nothing bounds, and others besides; return the configurations that can be priced."""
        self._waiting -= {*others}
        specs = {*self._by_spec, *others} - self._waiting
        self._trace(specs)
        return self._priced(specs)

    def rest(self, candidates: Candidates) -> Candidates:
        """Trace what may be faster than these candidates; return them with what has been traced."""
        bounds = _Bounds(self._estimator, self._faster, self._passed_over)
        while self._waiting:
            turn = {spec for spec in self._waiting if self._waiting.isdisjoint(self._faster[spec])}
            self._waiting -= turn
            bests = _Bests(candidates)
            self._passed_over |= {
                spec
                for spec in turn
                if not any(bests.may_be_beaten(c, bounds.of(c)) for c in self._by_spec[spec])
            }
            candidates = self._with(candidates, turn - self._passed_over)
        return candidates

    def where(self, candidates: Candidates, wanted: Callable[[TrainConfig], bool]) -> Candidates:
        """Trace what was passed over of the configurations that are wanted."""
        specs = {spec for spec in self._passed_over if any(map(wanted, self._by_spec[spec]))}
        self._passed_over -= specs
        return self._with(candidates, specs)

    def _with(self, candidates: Candidates, specs: set[TraceSpec]) -> Candidates:
        if not specs:
            return candidates
        try:
            self._trace(specs)
        except ConfigError:  # The model supports none of them.
            return candidates
        return candidates.with_more(self._priced(specs))

    def _priced(self, specs: set[TraceSpec]) -> list[TrainConfig]:
        return [
            config
            for spec, configs in self._by_spec.items()
            if spec in specs
            for config in configs
            if self._estimator.supports(config)
        ]


def _faster(spec: TraceSpec, base: TrainConfig) -> Iterator[TraceSpec]:
    """Yield the specs of steps that do less work, a setting apart; the base's settings are asked for."""
    for name, faster in SAVERS.items():
        value = getattr(spec, name)
        if value != getattr(base, name) and (other := faster(value)) is not None:
            changed: dict[str, Any] = {name: other}
            yield dataclasses.replace(spec, **changed)


class _Bounds:
    """Speeds that a configuration cannot pass, from the traces of steps that do less work."""

    def __init__(
        self,
        estimator: Estimator,
        faster: Mapping[TraceSpec, list[TraceSpec]],
        passed_over: set[TraceSpec],
    ) -> None:
        # Where memory is never short, nothing is paged.
        self._estimator = estimator.with_budget(_UNLIMITED_BYTES)
        self._faster = faster
        self._passed_over = passed_over

    def of(self, config: TrainConfig) -> float:
        """Return tokens per second at most."""
        spec = TraceSpec.of(config)
        least = math.inf
        for other in self._faster[spec]:
            changed = {
                n: getattr(other, n) for n in SAVERS if getattr(other, n) != getattr(spec, n)
            }
            without = dataclasses.replace(config, **changed)
            if self._estimator.supports(without):
                speed = self._estimator.tokens_per_second(without)
                least = min(least, math.inf if speed is None else speed)
            elif other in self._passed_over:
                least = min(least, self.of(without))
        return least


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
