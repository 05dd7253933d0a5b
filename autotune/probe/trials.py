"""Trials of a study, asked for and given back by the one who searches in it.

A study has one searcher at a time (autotune.store.locks): a trial that runs when a search begins was left by
a killed one. It is told as FAIL, without an `outcome`: the sampler proposes it again, a few times.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import optuna
import sqlalchemy
from optuna.distributions import BaseDistribution
from optuna.trial import TrialState

from autotune.probe.trial_history import INTERRUPTED


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """The parameters that a trial is to have, and their distributions."""

    params: Mapping[str, Any]
    distributions: Mapping[str, BaseDistribution]


class _Given(optuna.samplers.BaseSampler):
    """Samples what was proposed."""

    def __init__(self, proposal: Proposal) -> None:
        self._proposal = proposal

    def infer_relative_search_space(self, *_: object) -> dict[str, BaseDistribution]:
        return dict(self._proposal.distributions)

    def sample_relative(self, *_: object) -> dict[str, Any]:
        return dict(self._proposal.params)

    def sample_independent(self, *_: object) -> Any:
        raise AssertionError("Every parameter is proposed.")


def ask(study: optuna.Study, proposal: Proposal) -> optuna.Trial:
    """Ask the study for the trial that was proposed.

    What others have put into its queue fails: autotune proposes its own.
    """
    sampler, study.sampler = study.sampler, _Given(proposal)
    try:
        while True:
            trial = study.ask(dict(proposal.distributions))
            if trial.params == proposal.params:
                return trial
            study.tell(trial, state=TrialState.FAIL)
    finally:
        study.sampler = sampler


def give_back_abandoned(study: optuna.Study) -> None:
    """Tell the trials that a killed search has left as FAIL; only for who has the study's lock."""
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)


def give_back_interrupted(study: optuna.Study, trial: optuna.Trial) -> None:
    """Tell a trial whose probe was interrupted through no fault of its own.

    Where the database fails as well, the next search gives it back.
    """
    failures = (optuna.exceptions.OptunaError, sqlalchemy.exc.SQLAlchemyError)
    with contextlib.suppress(*failures):
        trial.set_user_attr("outcome", INTERRUPTED)
        study.tell(trial, state=TrialState.FAIL)
