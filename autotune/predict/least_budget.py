"""The configuration that needs the least memory of several, and the budget that is enough for it."""

from __future__ import annotations

from collections.abc import Iterable

from autotune.memory.allocator import PAGE_BYTES
from autotune.predict.estimator import Estimator
from autotune.records.estimate import Estimate
from autotune.space.config import TrainConfig

_MOST_BUDGETS = 8
"""Most budgets under which growing segments are replayed to find one that they fit."""


def smallest(
    estimator: Estimator, configs: Iterable[TrainConfig], *, least_step: float = 0.0
) -> tuple[Estimate, int] | None:
    """The estimate of what needs the least budget by a full replay, and that budget; None of none.

    The budget leaves the headroom. Segments that grow are replayed under larger and larger budgets until
    one is enough; a smaller one between the last two might be enough, too. `least_step`: the share of a
    budget that the next one has more at least, for who needs no more than an idea of it.
    """
    least: tuple[Estimate, int] | None = None
    for config in by_need(estimator, configs):
        if least is not None and estimator.least_needed(config) >= least[1]:
            break
        if least is not None and estimator.with_budget(least[1]).fitting(config) is None:
            continue  # One replay up to where memory runs out, instead of a whole one for each budget.
        found = _as_it_fits(estimator, config, least_step)
        if least is None or found[1] < least[1]:
            least = found
    return least


def by_need(estimator: Estimator, configs: Iterable[TrainConfig]) -> list[TrainConfig]:
    """Return the configurations by the least that they may need, which takes no replay.

    Growing segments need hardly more than what is live: after them few others are left to replay.
    """
    return sorted(
        configs, key=lambda c: (estimator.least_needed(c), not c.expandable_segments, repr(c))
    )


def _as_it_fits(
    estimator: Estimator, config: TrainConfig, least_step: float
) -> tuple[Estimate, int]:
    """The estimate under a budget that it fits, where what is reserved depends on it; and the budget."""
    first = estimator
    for tries in range(_MOST_BUDGETS):
        found = estimator.estimate(config)
        over_bytes = found.over_bytes(estimator.memory_budget_bytes, estimator.headroom)
        if over_bytes <= 0 or not config.expandable_segments:
            break
        budget_bytes = estimator.memory_budget_bytes
        more_bytes = max(over_bytes, PAGE_BYTES << tries, int(least_step * budget_bytes))
        estimator = estimator.with_budget(budget_bytes + more_bytes)
    needed_bytes = found.over_bytes(0, estimator.headroom)
    if estimator is not first:
        # With less it would need more: pieces between blocks would not suffice.
        needed_bytes = max(needed_bytes, estimator.memory_budget_bytes)
    return found, needed_bytes
