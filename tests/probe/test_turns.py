"""Several processes in one study: no probe is made twice, and what the dead leave is given back."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy
from optuna.distributions import IntDistribution
from optuna.trial import TrialState

from autotune.errors import StorageError
from autotune.probe import owners, turns
from autotune.probe.tell_optuna import Failed
from autotune.probe.trial_history import INTERRUPTED, OWNER
from autotune.probe.turns import Proposal, take_turn
from autotune.space.config import Workload
from autotune.store.optuna_study import open_study

pytestmark = pytest.mark.worker

WORKLOAD = Workload(model="gpt2", memory_budget_bytes=10**9)
SIZES = IntDistribution(1, 16)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/autotune.db"


@pytest.fixture
def study(url: str) -> Iterator[optuna.Study]:
    with open_study(url, "s", workload=WORKLOAD, gpu="CPU", has_heartbeats=True) as opened:
        yield opened


def me(**changes: Any) -> dict[str, Any]:
    return {**owners.this_process(), "fingerprint": "here", **changes}


def ask(size: int) -> Proposal:
    return Proposal(params={"size": size}, distributions={"size": SIZES})


def turn(study: optuna.Study, run: Any, *, owner: dict[str, Any] | None = None) -> bool:
    return take_turn(study, contextlib.nullcontext(), owner or me(), lambda: ask(4), run)


def state_of(study: optuna.Study) -> tuple[TrialState, object]:
    (trial,) = study.trials
    return trial.state, trial.user_attrs.get("outcome")


def left_by(study: optuna.Study, owner: dict[str, Any] | None) -> None:
    """A trial that nobody will ever tell."""
    given = {} if owner is None else {OWNER: owner}
    asked = ask(4)
    study.add_trial(
        optuna.create_trial(
            state=TrialState.RUNNING,
            params=dict(asked.params),
            distributions=dict(asked.distributions),
            user_attrs=given,
        )
    )


def test_what_is_asked_for_runs_outside_of_the_turn(study: optuna.Study) -> None:
    held: list[str] = []

    @contextlib.contextmanager
    def lock() -> Iterator[None]:
        held.append("held")
        yield
        held.append("let go")

    def run(trial: optuna.Trial, asked: Proposal) -> float:
        assert held == ["held", "let go"]
        assert trial.params == asked.params == {"size": 4}
        assert trial.user_attrs[OWNER]["pid"] == os.getpid()
        return 7.0

    assert take_turn(study, lock(), me(), lambda: ask(4), run)
    assert study.best_value == 7.0
    assert not take_turn(study, lock(), me(), lambda: None, run)
    assert len(study.trials) == 1


@pytest.mark.parametrize(
    ("raised", "state"), [(optuna.TrialPruned, TrialState.PRUNED), (Failed, TrialState.FAIL)]
)
def test_an_outcome_without_a_value_ends_the_trial_and_not_the_search(
    study: optuna.Study, raised: type[Exception], state: TrialState, capfd: Any
) -> None:
    def run(*_: object) -> float:
        raise raised("no")

    assert turn(study, run)
    assert state_of(study) == (state, None)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_database_that_fails_meanwhile_says_so(url: str, is_interrupted: bool) -> None:
    def run(*_: object) -> float:
        with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as database:
            database.execute("drop table trials")
        if is_interrupted:
            raise KeyboardInterrupt
        return 7.0

    with (
        pytest.raises(KeyboardInterrupt if is_interrupted else StorageError) as said,
        open_study(url, "s", workload=WORKLOAD, gpu="CPU") as study,
    ):
        turn(study, run)
    assert is_interrupted or "no such table: trials" in str(said.value)


@pytest.mark.parametrize("raised", [KeyboardInterrupt, ValueError, SystemExit])
def test_what_breaks_a_trial_off_goes_on_and_the_trial_is_given_back(
    study: optuna.Study, raised: type[BaseException]
) -> None:
    def run(*_: object) -> float:
        raise raised("mine")

    with pytest.raises(raised, match="mine"):
        turn(study, run)
    assert state_of(study) == (TrialState.FAIL, INTERRUPTED)


@pytest.mark.parametrize("tells", [False, True])
def test_a_trial_that_others_took_for_dead_is_theirs(study: optuna.Study, tells: bool) -> None:
    def run(trial: optuna.Trial, _: Proposal) -> float:
        study._storage.set_trial_state_values(trial._trial_id, state=TrialState.FAIL)
        if tells:
            trial.report(3.0, 1)
        return 3.0

    assert turn(study, run)
    assert state_of(study) == (TrialState.FAIL, None)


def test_a_trial_that_others_tell_while_optuna_does_is_theirs(
    study: optuna.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between Optuna's own look at the trial and what it writes."""

    def optimize(*_: Any, **__: Any) -> None:
        raise optuna.exceptions.UpdateFinishedTrialError

    monkeypatch.setattr(study, "optimize", optimize)
    assert turn(study, lambda *_: 1.0)


class Broken(optuna.samplers.RandomSampler):
    """A sampler with a mistake in one of the places where Optuna asks it."""

    def __init__(self, where: str, error: type[Exception]) -> None:
        super().__init__(seed=0)
        setattr(self, where, self._fail)
        self._error = error

    def _fail(self, *_: object) -> Any:
        raise self._error("the sampler's own")


@pytest.mark.parametrize("error", [AssertionError, ValueError])
@pytest.mark.parametrize("where", ["before_trial", "after_trial"])
def test_a_mistake_of_the_sampler_is_not_taken_for_a_trial_of_others(
    study: optuna.Study, where: str, error: type[Exception]
) -> None:
    study.sampler = Broken(where, error)
    with pytest.raises(error, match="the sampler's own"):
        turn(study, lambda *_: 1.0)


def test_an_interrupt_while_the_first_heartbeat_starts_leaves_none(
    study: optuna.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[threading.Thread] = []
    start = turns._Heartbeat.start

    def interrupted(thread: turns._Heartbeat) -> None:
        start(thread)
        started.append(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(turns._Heartbeat, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        turn(study, lambda *_: 1.0)
    (thread,) = started
    assert thread.daemon
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_what_somebody_else_put_into_the_queue_is_not_measured_as_ours(study: optuna.Study) -> None:
    study.enqueue_trial({"size": 9})
    ran: list[int] = []

    def run(trial: optuna.Trial, _: Proposal) -> float:
        ran.append(trial.params["size"])
        return 1.0

    assert turn(study, run)
    assert turn(study, run)
    assert ran == [4]
    assert not [t for t in study.trials if not t.state.is_finished()]


def ended_process() -> dict[str, Any]:
    """What a process said of itself that is no more."""
    code = (
        "import json; from autotune.probe import owners; print(json.dumps(owners.this_process()))"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    said: dict[str, Any] = json.loads(child.stdout)
    return said


def test_a_process_of_this_machine_is_known_to_be_gone() -> None:
    assert not owners.is_gone(owners.this_process())
    ended = ended_process()
    assert ended["pid"] != os.getpid()
    assert owners.is_gone(ended)
    # Another process has its number now.
    assert owners.is_gone({**owners.this_process(), "began": 1})
    assert not owners.is_gone({**ended, "place": "another machine"})
    assert not owners.is_gone({})


def test_a_child_that_nobody_has_waited_for_is_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert owners._began(child.pid) is None


def test_trials_of_the_dead_are_given_back_and_others_are_left(study: optuna.Study) -> None:
    for owner in (None, ended_process(), me(), me(place="another machine", pid=1)):
        left_by(study, owner)
    for trial in study.trials[1:]:
        study._storage.record_heartbeat(trial._trial_id)  # type: ignore[attr-defined]
    study.add_trial(
        optuna.create_trial(
            state=TrialState.WAITING,
            params={"size": 4},
            distributions={"size": SIZES},
            user_attrs={OWNER: ended_process()},
        )
    )
    turns.give_back_abandoned(study)
    fail, running = TrialState.FAIL, TrialState.RUNNING
    assert [t.state for t in study.trials] == [fail, fail, running, running, fail]
    assert study.trials[0].user_attrs["outcome"] == INTERRUPTED
    assert "outcome" not in study.trials[1].user_attrs


def test_silence_tells_where_nothing_else_does(study: optuna.Study) -> None:
    for _ in range(2):
        left_by(study, me(place="another machine"))
    silent, speaking = study.trials
    storage = study._storage
    for trial in (silent, speaking):
        storage.record_heartbeat(trial._trial_id)  # type: ignore[attr-defined]
    turns.give_back_abandoned(study)
    assert {t.state for t in study.trials} == {TrialState.RUNNING}
    long_ago = "UPDATE trial_heartbeats SET heartbeat = '2026-01-01 00:00:00' WHERE trial_id = :id"
    with storage._backend.engine.begin() as connection:  # type: ignore[attr-defined]
        connection.execute(sqlalchemy.text(long_ago), {"id": silent._trial_id})
    turns.give_back_abandoned(study)
    assert [t.state for t in study.trials] == [TrialState.FAIL, TrialState.RUNNING]


def test_who_died_before_its_first_sign_of_life_is_not_waited_for(study: optuna.Study) -> None:
    """Killed in its turn: nobody else could have asked meanwhile, and no heartbeat grows old."""
    left_by(study, me(place="another machine"))
    turns.give_back_abandoned(study)
    assert state_of(study) == (TrialState.FAIL, None)
