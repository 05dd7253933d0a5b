"""Prices that are kept: equal to those that are made, and made without reading a trace again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny_model

from autotune.memory.traces import Trace
from autotune.predict.estimator import Estimator
from autotune.predict.kept_prices import KeptPrices
from autotune.records.estimate import TraceSpec
from autotune.space.config import TrainConfig
from autotune.store.trace_cache import PriceCache, ReplayCache

pytestmark = pytest.mark.worker

ROOMY = 100 * 10**9


def some() -> list[TrainConfig]:
    fixed = tiny_model.configs()[::71]
    return [*fixed, dataclasses.replace(fixed[0], expandable_segments=True)]


@pytest.fixture(scope="module")
def traces() -> Mapping[TraceSpec, Trace]:
    return tiny_model.traces()


class _Unread(Trace):
    """A trace that says when something of it is read."""

    def __init__(self, whole: Trace, identity: str, num_read: list[int]) -> None:
        self._whole = whole
        self._num_read = num_read
        self.identity = identity

    def __getattr__(self, name: str) -> Any:
        whole = self.__dict__.pop("_whole", None)
        if whole is None:
            raise AttributeError(name)
        self._num_read.append(1)
        self.__dict__.update({**vars(whole), "identity": self.identity})
        return getattr(self, name)


def later(traces: Mapping[TraceSpec, Trace], num_read: list[int]) -> dict[TraceSpec, Trace]:
    return {
        spec: _Unread(trace, f"trace {number}", num_read)
        for number, (spec, trace) in enumerate(traces.items())
    }


def said(traces: Mapping[TraceSpec, Trace], prices: PriceCache | None, **other: Any) -> list[Any]:
    """All that a search asks for."""
    gpu = dataclasses.replace(tiny_model.gpu(), **other)
    replays = None if prices is None else ReplayCache(prices.file.parent)
    estimator = Estimator(traces, gpu, memory_budget_bytes=ROOMY, prices=prices, replays=replays)
    found = [
        (
            estimator.floor_bytes(config),
            estimator.tokens_per_second(config),
            estimator.parts(config),
            estimator.estimate(config),
            estimator.timeline(config),
            estimator.lean_layers(TraceSpec.of(config)),
            estimator.is_compiled_step(config),
        )
        for config in some()
        if estimator.supports(config)
    ]
    estimator.keep_prices()
    return found


def test_kept_prices_are_those_that_would_be_made(
    traces: Mapping[TraceSpec, Trace], tmp_path: Path
) -> None:
    made = said(traces, None)
    assert len(made) > 3
    num_read: list[int] = []
    given = later(traces, num_read)
    assert said(given, PriceCache(tmp_path)) == made
    assert num_read
    num_read.clear()
    assert said(later(traces, num_read), PriceCache(tmp_path)) == made
    assert not num_read


def test_another_card_has_times_of_its_own(
    traces: Mapping[TraceSpec, Trace], tmp_path: Path
) -> None:
    given = later(traces, [])
    said(given, PriceCache(tmp_path))
    slower: dict[str, Any] = {"memory_bandwidth_bytes_per_second": 10**11}
    assert said(given, PriceCache(tmp_path), **slower) == said(traces, None, **slower)
    assert said(traces, None, **slower) != said(traces, None)


def test_what_json_would_change_or_somebody_has_spoilt_is_made_again(tmp_path: Path) -> None:
    def prices() -> KeptPrices:
        return KeptPrices(PriceCache(tmp_path), "a machine", lambda: ())

    kept = prices()
    for name, value in (("large", 2**70), ("endless", float("inf")), ("usual", 0.1)):
        kept.note("one", name, value)
    kept.note("one", "spoilt", "text")
    kept.keep()
    assert prices().known(float, "one", "usual") == 0.1
    assert prices().known(int, "one", "large") is None
    assert prices().known(float, "one", "endless") is None
    assert prices().price(int, "one", "spoilt", lambda: 7) == 7
    assert prices().time(int, "one", "usual", lambda: 8) == 8  # of no machine so far
