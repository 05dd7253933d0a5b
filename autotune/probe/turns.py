"""Turns of several processes in one study: each asks in its own, and a dead one's trials are given back.

A turn is a lock of the database, and in it: closing what the dead have left, proposing, asking, the first
heartbeat. So whoever proposes sees the settings of every trial that runs elsewhere, and proposes none of
them again. The probe itself runs outside of the turn.

| a trial that runs                             | is given back                                    |
|-----------------------------------------------|--------------------------------------------------|
| without an owner, or without a heartbeat      | at once: who asked died in its turn              |
| whose owner was a process of this machine     | as soon as that process is gone                  |
| whose owner is elsewhere, or cannot be judged | when its heartbeat is older than GRACE_SECONDS   |

Given back means told as FAIL without an `outcome`: the sampler proposes it again, a few times.
Optuna's own RetryHeartbeatStaleTrialCallback would put a copy into the study's queue, from which a machine
of other hardware may take it.

Heartbeats are Optuna's, and run inside `study.optimize` alone: hence one call of it per trial.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import optuna
import sqlalchemy
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState

from autotune.probe import owners
from autotune.probe.tell_optuna import Failed
from autotune.probe.trial_history import INTERRUPTED, OWNER


class _Heartbeat(threading.Thread):
    """Optuna's heartbeat thread as a daemon, so that an interrupt cannot leave it behind.

    An interrupt between its start and the trial's would: no process ends before its last thread, unless that
    is a daemon (optuna 5.0, storages/_heartbeat.py).
    """

    def __init__(self, *, target: Callable[..., None], args: tuple[Any, ...]) -> None:
        super().__init__(target=target, args=args, daemon=True)
        self._of = threading.current_thread()
        self._stop_event: threading.Event = args[-1]

    @classmethod
    def stop_those_left(cls) -> None:
        """Stop the heartbeats of trials that this thread has run."""
        for thread in threading.enumerate():
            if isinstance(thread, cls) and thread._of is threading.current_thread():
                thread._stop_event.set()


optuna.storages._heartbeat.Thread = _Heartbeat  # type: ignore[attr-defined, assignment]


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """The parameters that a trial is to have, and their distributions."""

    params: Mapping[str, Any]
    distributions: Mapping[str, BaseDistribution]


def take_turn(
    study: optuna.Study,
    turn: AbstractContextManager[object],
    owner: Mapping[str, Any],
    propose: Callable[[], Proposal | None],
    run: Callable[[optuna.Trial, Proposal], float],
) -> bool:
    """Ask for the trial that `propose` returns, and run it.

    Returns False, and asks for nothing, where it returns None. `run` returns the trial's value, or raises
    TrialPruned or Failed; whatever else it raises goes on from here, and the trial is given back. Where
    others took it for dead meanwhile, it is theirs, and that is no error.
    """
    with ExitStack() as held:
        held.enter_context(turn)
        give_back_abandoned(study)
        asked = propose()
        if asked is None:
            return False
        # All of it in one transaction; what is asked for is the first of the queue.
        study.add_trial(
            optuna.create_trial(
                state=TrialState.WAITING,
                params=dict(asked.params),
                distributions=dict(asked.distributions),
                user_attrs={OWNER: dict(owner)},
            )
        )
        raised: BaseException | None = None

        def objective(trial: optuna.Trial) -> float:
            nonlocal raised
            try:
                if OWNER not in trial.user_attrs:
                    raise Failed("Somebody else put it into the queue.")
                # Optuna's thread does so as well, at some moment: now it is in before the turn is over.
                study._storage.record_heartbeat(trial._trial_id)  # type: ignore[attr-defined]
                held.close()
                return run(trial, asked)
            except (optuna.TrialPruned, Failed, optuna.exceptions.UpdateFinishedTrialError):
                raise
            except BaseException as error:
                raised = error
                _say_interrupted(trial)
                if not isinstance(error, Exception | KeyboardInterrupt):
                    study.tell(trial, state=TrialState.FAIL)  # Optuna leaves these as they are.
                raise

        try:
            study.optimize(objective, n_trials=1, catch=(Failed,))
        except (ValueError, AssertionError, optuna.exceptions.UpdateFinishedTrialError) as error:
            if raised is not None:
                raise raised from raised.__cause__
            if not _says_told_by_others(error):
                raise
        except UnboundLocalError as error:
            # Optuna's, of a database that fails when the trial is told (the same place): what it said.
            said = raised or error.__context__ or error
            raise said from said.__cause__
        finally:
            _Heartbeat.stop_those_left()
    return True


def runs_on(trial: FrozenTrial, fingerprint: str) -> bool:
    """Whether the trial's owner is a machine of that fingerprint; True for a trial without an owner."""
    return bool(trial.user_attrs.get(OWNER, {}).get("fingerprint", fingerprint) == fingerprint)


def _says_told_by_others(error: Exception) -> bool:
    """Whether Optuna raised this because somebody else has told the trial (optuna 5.0, study/).

    Its loop raises such a ValueError or AssertionError itself; those of a sampler have passed through it.
    """
    if isinstance(error, optuna.exceptions.UpdateFinishedTrialError):
        return True
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals["__name__"]).startswith("optuna.study.")


def give_back_abandoned(study: optuna.Study) -> None:
    """Give back the trials of dead processes: each is told as FAIL.

    Only in a turn: who asks has not said its name yet.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        optuna.storages.fail_stale_trials(study)
    open_trials = study.get_trials(deepcopy=False, states=(TrialState.RUNNING, TrialState.WAITING))
    alive = _with_heartbeat(study, [trial._trial_id for trial in open_trials])
    for trial in open_trials:
        owner = trial.user_attrs.get(OWNER)
        if trial.state == TrialState.WAITING:
            is_abandoned = owner is not None
        else:
            # The first heartbeat is written in the turn, and this is ours.
            is_abandoned = owner is None or trial._trial_id not in alive or owners.is_gone(owner)
        if owner is None and is_abandoned:
            _say_interrupted(optuna.Trial(study, trial._trial_id))
        if is_abandoned:
            # As fail_stale_trials does it; Study.tell takes no trial that waits.
            study._storage.set_trial_state_values(trial._trial_id, state=TrialState.FAIL)


def _with_heartbeat(study: optuna.Study, trial_ids: list[int]) -> set[int]:
    """Numbers of the trials that ever gave a sign of life (optuna 5.0, storages/_rdb/models.py)."""
    if not trial_ids:
        return set()
    heartbeats = sqlalchemy.table("trial_heartbeats", sqlalchemy.column("trial_id"))
    query = sqlalchemy.select(heartbeats.c.trial_id).where(heartbeats.c.trial_id.in_(trial_ids))
    storage: Any = study._storage
    engine = getattr(storage, "_backend", storage).engine
    with engine.connect() as connection:
        return set(connection.execute(query).scalars())


def _say_interrupted(trial: optuna.Trial) -> None:
    with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
        trial.set_user_attr("outcome", INTERRUPTED)
