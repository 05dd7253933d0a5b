"""The speed that is promised, by CPU time: on a busy machine the wall clock says little.

validation/timing/speed.py measures both; on two idle cores a command's wall time lies between half its CPU
time and the whole.
"""

from __future__ import annotations

from pathlib import Path

import here
import pytest

from autotune.store import trace_cache
from validation.timing import speed

pytestmark = pytest.mark.slow

CORES = 2
BUSY = 1.5
"""Another load on the same cores takes caches and clock from this one."""


def test_help_is_instant() -> None:
    command = speed.COMMANDS["help"]
    assert command.target_seconds == 0.25
    cost = speed.best_of(command, 3)
    assert cost.cpu_seconds <= BUSY * command.target_seconds


def test_no_command_finds_what_the_user_has_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "traces-2.db"
    kept.touch()
    monkeypatch.setenv(trace_cache.VARIABLE, str(tmp_path))
    speed.cost_of(("cache", "--clear"))
    assert kept.exists()


def test_one_estimate() -> None:
    command = speed.COMMANDS["estimate"]
    assert command.target_seconds == 4
    cost = speed.cost_of(command.arguments)
    # Nearly all of it in one process at a time.
    assert cost.cpu_seconds <= BUSY * command.target_seconds
    assert cost.peak_bytes < 2 * 2**30


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def cold_search(traces: Path) -> speed.Cost:
    """Keeps the traces that it makes."""
    return speed.cost_of(speed.COMMANDS["find"].arguments, traces=traces)


def test_a_cold_search_of_the_default_space(cold_search: speed.Cost) -> None:
    command = speed.COMMANDS["find"]
    assert command.target_seconds == 8
    assert cold_search.cpu_seconds <= BUSY * CORES * command.target_seconds
    assert cold_search.peak_bytes < 2 * 2**30


@pytest.mark.usefixtures("cold_search")
def test_a_configuration_more_costs_less_than_a_millisecond(traces: Path) -> None:
    priced = speed.pricing(
        trace_cache.TraceCache(traces), methods=("lora",), server=here.workers, num_replays=0
    )
    assert priced.num_configs >= 5000
    assert priced.config_seconds <= 1e-3
