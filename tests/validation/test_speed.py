"""The speed that is promised, by CPU time: on a busy machine the wall clock says little.

validation/timing/speed.py measures both; on two idle cores a command's wall time lies between half its CPU
time and the whole. Machines differ threefold: a slow one is allowed as many yardsticks as a command took on a
slow one (studies/speed/README.md), whatever its seconds.
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

YARDSTICKS = {"help": 0.17, "estimate": 4.8, "find": 23.6}
"""CPU time of commands in that of speed.YARDSTICK, as measured on an idle machine."""


def fits(name: str, cost: speed.Cost, cores: int = 1) -> bool:
    """Whether a command takes what its target allows, or what is usual on a slow machine.

    Another load only adds: where it takes more, it is run twice more.
    """
    command = speed.COMMANDS[name]
    for _ in range(3):
        usual = YARDSTICKS[name] * speed.yardstick_seconds()
        if cost.cpu_seconds <= BUSY * max(cores * command.target_seconds, usual):
            return True
        cost = speed.cost_of(command.arguments)
    return False


def test_help_is_instant() -> None:
    command = speed.COMMANDS["help"]
    assert command.target_seconds == 0.25
    assert fits("help", speed.best_of(command, 3))


def test_no_command_finds_what_the_user_has_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "traces-2.db"
    kept.touch()
    monkeypatch.setenv(trace_cache.VARIABLE, str(tmp_path))
    speed.cost_of(("cache", "--clear"))
    assert kept.exists()


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
    assert fits("find", cold_search, CORES)
    assert cold_search.peak_bytes < 2 * 2**30


@pytest.mark.usefixtures("cold_search")  # It leaves compiled what both import.
def test_one_estimate() -> None:
    command = speed.COMMANDS["estimate"]
    assert command.target_seconds == 4
    cost = speed.cost_of(command.arguments)
    # Nearly all of it in one process at a time.
    assert fits("estimate", cost)
    assert cost.peak_bytes < 2 * 2**30


@pytest.mark.usefixtures("cold_search")
def test_a_configuration_more_costs_less_than_a_millisecond(traces: Path) -> None:
    priced = speed.pricing(
        trace_cache.TraceCache(traces), methods=("lora",), server=here.workers, num_replays=0
    )
    assert priced.num_configs >= 5000
    assert priced.config_seconds <= 1e-3
