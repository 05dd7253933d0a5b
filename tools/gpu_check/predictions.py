"""Estimates of cases, traced in the background while the card runs what is predicted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

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

    All is traced in the background, in the order of the cases, while the card runs what is predicted.
    """

    def __init__(self, card: Gpu, cases: Iterable[Case], budget_bytes: int) -> None:
        self._card = card
        self._budget_bytes = budget_bytes
        self._estimators: dict[Group, Estimator | None] = {}
        specs: dict[Group, set[TraceSpec]] = defaultdict(set)
        for case in cases:
            specs[case.model, case.config.sequence_length].add(TraceSpec.of(case.config))
        self._server = ForkServer()
        # A fork server is used from one thread alone.
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._traces = {
            group: self._thread.submit(self._trace, group, specs[group]) for group in specs
        }

    def __enter__(self) -> Predictions:
        return self

    def __exit__(self, *_: object) -> None:
        for future in self._traces.values():
            future.cancel()
        self._thread.submit(self._server.close)
        self._thread.shutdown()

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
        try:
            traces = self._traces[group].result()
        except AutotuneError as error:
            model, length = group
            say(f"{model} at {length} tokens: {error}")
            return None
        return Estimator(traces, self._card, memory_budget_bytes=self._budget_bytes)

    def _trace(self, group: Group, specs: set[TraceSpec]) -> dict[TraceSpec, Any]:
        model, length = group
        source = gpu_cases.source(model)
        return trace_all(source, gpu_cases.TASK, length, self._card, specs, server=self._server)
