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
    estimator: Estimator, configs: Iterable[TrainConfig], *, step_bytes: int = PAGE_BYTES
) -> tuple[Estimate, int] | None:
    """The estimate of what needs the least budget by a full replay, and that budget; None of none.

    The budget leaves the headroom. Segments that grow are replayed under larger and larger budgets until
    one is enough; a smaller one between the last two might be enough, too. `step_bytes`: the least that
    the second of them has more than the first.
    """
    least: tuple[Estimate, int] | None = None
    # Growing segments need hardly more than what is live: after them few others are left to replay.
    for config in sorted(
        configs, key=lambda c: (estimator.least_needed(c), not c.expandable_segments, repr(c))
    ):
        if least is not None and estimator.least_needed(config) >= least[1]:
            break
        if least is not None and estimator.with_budget(least[1]).fitting(config) is None:
            continue  # One replay up to where memory runs out, instead of a whole one for each budget.
        found = _as_it_fits(estimator, config, step_bytes)
        if least is None or found[1] < least[1]:
            least = found
    return least


def _as_it_fits(estimator: Estimator, config: TrainConfig, step_bytes: int) -> tuple[Estimate, int]:
    """The estimate under a budget that it fits, where what is reserved depends on it; and the budget."""
    first = estimator
    for tries in range(_MOST_BUDGETS):
        found = estimator.estimate(config)
        over_bytes = found.over_bytes(estimator.memory_budget_bytes, estimator.headroom)
        if over_bytes <= 0 or not config.expandable_segments:
            break
        more_bytes = max(over_bytes, step_bytes << tries)
        estimator = estimator.with_budget(estimator.memory_budget_bytes + more_bytes)
    needed_bytes = found.over_bytes(0, estimator.headroom)
    if estimator is not first:
        # With less it would need more: pieces between blocks would not suffice.
        needed_bytes = max(needed_bytes, estimator.memory_budget_bytes)
    return found, needed_bytes
