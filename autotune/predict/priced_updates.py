"""Updates of each optimizer on what each trace trains, priced once."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from autotune.catalogue.gpus import Gpu
from autotune.memory.traces import Trace
from autotune.predict.kept_prices import TRAINABLE, KeptPrices
from autotune.predict.optimizer_update import (
    LaterUpdate,
    Trainable,
    Update,
    UpdateCosts,
    costs_of,
    identity_of,
    priced_update,
)
from autotune.predict.sharding.shared_trace import SharedTrace
from autotune.records.estimate import TraceSpec
from autotune.space.optimizers import UPDATERS
from autotune.space.parallelisms import PARALLELISMS
from autotune.space.precisions import PRECISIONS


class PricedUpdates:
    """Prices optimizers on the parameters that traces train: one price where they train the same."""

    def __init__(
        self,
        traces: Mapping[TraceSpec, Trace | SharedTrace],
        prices: KeptPrices,
        gpu: Gpu,
    ) -> None:
        self._traces = traces
        self._prices = prices
        self._multiprocessors = gpu.multiprocessors
        self._product_bytes = gpu.product_workspace_bytes
        self._interned: dict[str, Trainable] = {}
        self.trainable = functools.cache(self._find_trainable)
        self._priced = functools.cache(self._price)

    def of(self, spec: TraceSpec, rank: int, name: str) -> Update:
        """Return the update of what the trace trains at this rank by the optimizer."""
        scaled = PRECISIONS[spec.precision].grad_scaler
        has_parts = PARALLELISMS[spec.parallelism].has_parts
        return self._priced(self.trainable(spec, rank), scaled, name, has_parts)

    def _find_trainable(self, spec: TraceSpec, rank: int) -> Trainable:
        trace = self._traces[spec]
        read = functools.cache(functools.partial(trace.trainable, rank))
        identity, num = self._prices.price(
            tuple[str, int],
            trace.identity,
            f"{TRAINABLE}{rank}",
            lambda: (identity_of(read()), len(read())),
        )
        return self._interned.setdefault(identity, Trainable(identity, num, read))

    def _price(self, trainable: Trainable, scaled: bool, name: str, has_parts: bool) -> Update:
        multiprocessors, product_bytes = self._multiprocessors, self._product_bytes

        def update() -> Update:
            return priced_update(
                UPDATERS[name],
                trainable.read(),
                scaled=scaled,
                has_parts=has_parts,
                multiprocessors=multiprocessors,
                product_bytes=product_bytes,
            )

        update = functools.cache(update)
        costs = self._prices.price(
            UpdateCosts,
            trainable.identity,
            f"update {name} {scaled} {has_parts} {multiprocessors} {product_bytes}",
            lambda: costs_of(update()),
        )
        return LaterUpdate(costs, update)
