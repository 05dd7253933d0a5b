"""Probes, each recorded beside its prediction."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from autotune.catalogue.models import ModelSource
from autotune.probe.fleet.one_card import OneCard
from autotune.probe.run_one import Prober
from autotune.records.measurement import ProbeSpec
from autotune.space.config import TrainConfig
from autotune.store.probe_key import probe_key
from tools.gpu_check import cases as gpu_cases
from tools.gpu_check.check import Check, Nothing, say, shown
from tools.gpu_check.deadline import PunctualServer
from tools.gpu_check.processes import PeakOnCard
from tools.gpu_check.records import Records


class Probes:
    """Probes beside their predictions."""

    def __init__(self, check: Check, records: Records, max_seconds: float) -> None:
        self._check = check
        self._records = records
        self._max_seconds = max_seconds
        self._probers: dict[str, tuple[ModelSource, Prober]] = {}

    def measure(
        self,
        model: str,
        config: TrainConfig,
        budget_bytes: int,
        predict: Callable[[], Any],
        *,
        is_capped: bool = False,
    ) -> bool:
        """Probe and record, unless it is recorded. False when the time is over.

        `predict()` is the Estimate, or None for what is not to be probed. `is_capped`: the budget is
        what is predicted to do.
        """
        if not self._check.deadline.allows_another():
            return False
        spec = ProbeSpec(
            task=gpu_cases.TASK,
            backend=self._check.backend,
            memory_budget_bytes=budget_bytes,
            max_seconds=self._max_seconds,
        )
        source, prober = self._prober(model, spec)
        what = probe_key(source.config, config, spec, prober.fingerprint_of(config))
        # Each is measured under a budget of its own, and under no other's.
        key = f"{what.digest}-{budget_bytes}"
        if key in self._records:
            return True
        estimate = predict()
        if estimate is None:
            return True
        if not self._check.deadline.allows_another():
            return False
        prober.spec = spec
        began = time.monotonic()
        with PeakOnCard(self._check.backend) as seen:
            measurement = prober.measure(config)
        wall_seconds = time.monotonic() - began
        if measurement.outcome == "timeout" and not self._check.deadline.allows_another():
            return False  # cut off by the end of the piece: nothing is known of it
        self._records.add(
            key,
            model=model,
            capped_at_prediction=is_capped,
            prediction=estimate.to_dict(budget_bytes),
            measurement=measurement.to_dict(),
            card_peak_bytes=seen.peak_bytes,
            wall_seconds=wall_seconds,
        )
        say(f"{measurement.outcome:8}{wall_seconds:6.1f} s  {model} {shown(config)}")
        return True

    def _prober(self, model: str, spec: ProbeSpec) -> tuple[ModelSource, Prober]:
        if model not in self._probers:
            source = gpu_cases.source(model)
            server: Any = PunctualServer(self._check.server, self._check.deadline)
            table: Any = Nothing()
            self._probers[model] = source, Prober(OneCard(server), table, source, spec)
        return self._probers[model]
