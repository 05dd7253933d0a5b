"""A prediction: the answer, and what it takes to measure it, to draw it, and to go on from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autotune.predict.estimator import Estimator
from autotune.probe import compiled
from autotune.records.answer import Answer, Change
from autotune.records.charts import Details
from autotune.records.estimate import Estimate, TraceSpec
from autotune.search import beside, waterfall
from autotune.search.candidates import Candidates
from autotune.search.choice import has_plan_b
from autotune.space.config import TrainConfig
from autotune.space.rules import Context


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
        if not has_plan_b(answer.best.config, answer.workload):
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
