"""Estimates of cases. Nothing is traced while a probe runs: its host would have less of the machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from autotune.catalogue.gpus import Gpu
from autotune.common.units import MIB
from autotune.errors import AutotuneError
from autotune.predict.estimator import Estimator
from autotune.predict.tracing import trace_all
from autotune.records.estimate import Estimate, TraceSpec
from autotune.space.config import TrainConfig
from autotune.worker.client.forkserver import ForkServer
from tools.gpu_check import cases as gpu_cases
from tools.gpu_check.cases import Case
from tools.gpu_check.check import say, shown

Group = tuple[str, int]
"""Model and length: their traces are asked for together."""


class Predictions:
    """Estimates of cases; a context manager.

    All cases of a model and length are traced when the first of them is asked for.
    """

    def __init__(self, card: Gpu, cases: Iterable[Case], budget_bytes: int) -> None:
        self._card = card
        self._budget_bytes = budget_bytes
        self._estimators: dict[Group, Estimator | None] = {}
        self._specs: dict[Group, set[TraceSpec]] = defaultdict(set)
        for case in cases:
            self._specs[case.model, case.config.sequence_length].add(TraceSpec.of(case.config))
        self._server = ForkServer()

    def __enter__(self) -> Predictions:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    def of(self, model: str, config: TrainConfig) -> Estimate | None:
        """None, and a line that says why, where it cannot be predicted."""
        group = (model, config.sequence_length)
        if group not in self._estimators:
            self._estimators[group] = self._make(group)
        estimator = self._estimators[group]
        if estimator is None or not estimator.supports(config):
            say(f"left out, cannot be traced: {model} {shown(config)}")
            return None
        return estimator.estimate(config)

    def within_least(self, model: str, config: TrainConfig) -> tuple[Estimate, int] | None:
        """The prediction under the least budget that is predicted to do, to a MiB, and that budget.

        Where segments grow, how much is reserved hangs on the budget.
        """
        alone = self.of(model, config)
        if alone is None:
            return None
        if not config.expandable_segments:
            return alone, alone.peak_device_bytes
        estimator = self._estimators[model, config.sequence_length]
        assert estimator is not None
        too_small, enough = alone.peak_allocated_bytes, 2 * alone.peak_device_bytes
        while enough - too_small > MIB:
            budget_bytes = (too_small + enough) // 2
            estimate = estimator.with_budget(budget_bytes).estimate(config)
            if estimate.peak_device_bytes <= budget_bytes:
                enough = budget_bytes
            else:
                too_small = budget_bytes
        return estimator.with_budget(enough).estimate(config), enough

    def _make(self, group: Group) -> Estimator | None:
        model, length = group
        source = gpu_cases.source(model)
        try:
            traces = trace_all(
                source,
                gpu_cases.TASK,
                length,
                self._card,
                self._specs[group],
                server=self._server,
            )
        except AutotuneError as error:
            say(f"{model} at {length} tokens: {error}")
            return None
        return Estimator(traces, self._card, memory_budget_bytes=self._budget_bytes)
