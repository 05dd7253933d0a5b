"""Replays that are kept: equal to those that are made, for whom they serve, and when they are made anew."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_model

from autotune.memory.replayer import Replayer
from autotune.memory.traces import Trace
from autotune.predict import kept_replays
from autotune.predict.estimator import Estimator
from autotune.records.estimate import Estimate, TraceSpec
from autotune.space.config import TrainConfig
from autotune.store.trace_cache import ReplayCache

pytestmark = pytest.mark.worker

ROOMY = 100 * 10**9


@pytest.fixture(scope="module")
def traces() -> Mapping[TraceSpec, Trace]:
    return tiny_model.traces()


def some() -> list[TrainConfig]:
    fixed = tiny_model.configs()[::97]
    return [*fixed, *(dataclasses.replace(c, expandable_segments=True) for c in fixed[:3])]


@pytest.fixture
def num_made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As many entries as replays are made."""
    made: list[int] = []
    real = Replayer.replay

    def counted(*args: Any, **rest: Any) -> Any:
        made.append(1)
        return real(*args, **rest)

    monkeypatch.setattr(Replayer, "replay", counted)
    return made


def estimates(
    traces: Mapping[TraceSpec, Trace], replays: ReplayCache | None, budget_bytes: int = ROOMY
) -> list[Estimate]:
    estimator = Estimator(
        traces, tiny_model.gpu(), memory_budget_bytes=budget_bytes, replays=replays
    )
    return [estimator.estimate(config) for config in some() if estimator.supports(config)]


def test_kept_replays_are_those_that_would_be_made(
    traces: Mapping[TraceSpec, Trace], tmp_path: Path, num_made: list[int]
) -> None:
    made = estimates(traces, None)
    assert len(made) > 3
    assert estimates(traces, ReplayCache(tmp_path)) == made
    num_made.clear()
    assert estimates(traces, ReplayCache(tmp_path)) == made
    assert not num_made
    # Segments of fixed size know no budget, growing ones do.
    assert estimates(traces, ReplayCache(tmp_path), ROOMY // 2) == estimates(
        traces, None, ROOMY // 2
    )


@pytest.mark.parametrize("share", [0.5, 0.9, 0.999, 1.0, 1.5])
def test_what_does_not_fit_is_kept_for_that_limit_alone(
    traces: Mapping[TraceSpec, Trace], tmp_path: Path, share: float
) -> None:
    config = some()[0]

    def within(most_bytes: int, replays: ReplayCache | None) -> Estimate | None:
        estimator = Estimator(traces, tiny_model.gpu(), memory_budget_bytes=ROOMY, replays=replays)
        return estimator.reserving(config, most_bytes)

    peak_bytes = within(ROOMY, ReplayCache(tmp_path)).peak_reserved_bytes  # type: ignore[union-attr]
    within(peak_bytes // 3, ReplayCache(tmp_path))
    asked_bytes = int(share * peak_bytes)
    for _ in range(2):
        assert within(asked_bytes, ReplayCache(tmp_path)) == within(asked_bytes, None)
    assert (within(asked_bytes, None) is None) == (share < 1)


def test_another_tape_order_of_ties_or_code_is_replayed_anew(
    traces: Mapping[TraceSpec, Trace],
    tmp_path: Path,
    num_made: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from autotune.store import trace_cache

    first = some()[0]

    def num(config: TrainConfig = first) -> int:
        num_made.clear()
        Estimator(
            traces, tiny_model.gpu(), memory_budget_bytes=ROOMY, replays=ReplayCache(tmp_path)
        ).estimate(config)
        return len(num_made)

    assert (num(), num()) == (1, 0)
    other = dataclasses.replace(some()[0], gradient_accumulation_steps=7)
    assert (num(other), num(other)) == (1, 0)
    is_lowest = kept_replays.takes_lowest_address()
    with monkeypatch.context() as patch:
        patch.setattr(kept_replays, "takes_lowest_address", lambda: not is_lowest)
        assert num() == 1
    with monkeypatch.context() as patch:
        patch.setattr(trace_cache, "_made_by", lambda: "other code or libraries")
        assert num() == 1
    assert num() == 0
    names = {str(each.name) for each in trace_cache._sources()}
    assert {"allocator.py", "steps.py", "expandable_segments.py", "running.py"} <= names


def test_the_digest_is_of_all_that_a_replay_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(**changes: Any) -> str:
        values: dict[str, Any] = {"sure_step": 1, "sizes": [512, 1024], "aside": ((1,), ())}
        values["parts"] = [part(0, "setup", [0]), part(1, "forward", [1, ~1])]
        return kept_replays._digest(SimpleNamespace(**{**values, **changes}))  # type: ignore[arg-type]

    def part(step: int, phase: str, events: list[int]) -> SimpleNamespace:
        return SimpleNamespace(step=step, phase=phase, events=np.array(events))

    first = part(0, "setup", [0])
    found = [
        digest(),
        digest(sure_step=2),
        digest(sizes=[512, 1025]),
        digest(sizes=[512, 2**63]),
        digest(sizes=[512, 2**63 + 1]),
        digest(aside=()),
        digest(aside=((), (1,))),
        digest(aside=((1,),)),
        digest(aside=((0,), ())),
        digest(parts=[first]),
        *(
            digest(parts=[first, part(*other)])
            for other in ((2, "forward", [1, ~1]), (1, "head", [1, ~1]), (1, "forward", [1]))
        ),
        digest(parts=[part(0, "setup", [0, 1]), part(1, "forward", [~1])]),
    ]
    is_lowest = kept_replays.takes_lowest_address()
    monkeypatch.setattr(kept_replays, "takes_lowest_address", lambda: not is_lowest)
    found.append(digest())
    assert len(set(found)) == len(found)
    assert digest() == found[-1]


def test_a_spoilt_one_is_made_again(
    traces: Mapping[TraceSpec, Trace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = estimates(traces, ReplayCache(tmp_path))
    real = ReplayCache.find
    monkeypatch.setattr(
        ReplayCache,
        "find",
        lambda *args: {request: {"spoilt": 1} for request in real(*args)},
    )
    assert estimates(traces, ReplayCache(tmp_path)) == made
