"""The choice among candidates: the class that the answer may be of, the answer, its base, its plan B."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from autotune.errors import HardwareError
from autotune.predict.estimator import Estimator
from autotune.records.answer import FAR_FASTER
from autotune.records.estimate import Estimate
from autotune.search.candidates import Candidates, goes_on_from
from autotune.space.config import TrainConfig, Workload
from autotune.space.parallelisms import PARALLELISMS
from autotune.space.trainers import TRAINERS


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The rule by which one of the candidates is the answer."""

    allow: str | None
    """Highest trade-off class of the answer. None: numerics, and recipe where nothing of that fits, or where
    it works from host memory and the other is far faster."""
    has_base: bool
    """Whether the user trains already, and so has chosen a recipe that works from host memory."""

    def of(self, candidates: Candidates) -> tuple[str, Estimate | None]:
        """Return the class that the answer may be of; the answer, if anything fits."""
        chosen = self.allow or "numerics"
        best = candidates.best(candidates.at_most(chosen))
        is_kept = best is not None and (self.has_base or not _works_from_host(best))
        if self.allow is not None or is_kept:
            return chosen, best
        other = candidates.best(candidates.at_most("recipe"))
        if best is None or (other is not None and _is_far_faster(other, best)):
            return "recipe", other
        return chosen, best

    def so_far(
        self,
        estimator: Estimator,
        configs: Iterable[TrainConfig],
        baselines: Sequence[TrainConfig],
        reference: TrainConfig,
    ) -> Estimate | None:
        """Return the answer as far as steps are traced; None where nothing fits yet, or no speed is known."""
        baseline = first_that_fits(estimator, baselines)
        base = reference if baseline is None else baseline.config
        try:
            candidates = Candidates(estimator, filter(estimator.supports, configs), base)
        except HardwareError:
            return None
        _, best = self.of(candidates)
        return best

    def plan_b(self, candidates: Candidates, workload: Workload) -> Callable[[TrainConfig], bool]:
        """Whether a configuration may stand in the plan B of the best of these."""
        _, best = self.of(candidates)
        if best is None or not has_plan_b(best.config, workload):
            return lambda _: False
        return goes_on_from(best.config)


def _works_from_host(best: Estimate) -> bool:
    """Whether a step waits for copies most of its time, or what it shares out lies in host memory."""
    return best.bound == "transfer" or PARALLELISMS[best.config.parallelism].offload


def _is_far_faster(other: Estimate, best: Estimate) -> bool:
    return (other.tokens_per_second or 0.0) >= FAR_FASTER * (best.tokens_per_second or math.inf)


def has_plan_b(config: TrainConfig, workload: Workload) -> bool:
    """Whether the program that trains a configuration goes on with another where memory runs out."""
    return not TRAINERS[config.trainer].task and workload.pictures is None


def first_that_fits(estimator: Estimator, configs: Sequence[TrainConfig]) -> Estimate | None:
    """Return the first of the configurations that is predicted to fit; None where none is."""
    for config in configs:
        if estimator.supports(config) and estimator.may_fit(config):
            estimate = estimator.fitting(config)
            if estimate is not None:
                return estimate
    return None


def lacks_on_host(estimator: Estimator, config: TrainConfig) -> int:
    """Return the bytes of host memory that a configuration lacks; 0 where the card lacks room for it."""
    if estimator.host_memory_bytes is None or not estimator.supports(config):
        return 0
    if estimator.reserving(config, estimator.room_for(config)) is None:
        return 0
    estimate = estimator.estimate(config)
    has_room = estimate.resident_bytes <= estimator.room_for(config)
    return estimate.lacks_on_host(estimator.host_memory_bytes) if has_room else 0
