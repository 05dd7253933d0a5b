"""Trials of a study as a search asks for them and gives them back."""

from __future__ import annotations

import optuna
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.trial import TrialState

from autotune.probe.trials import Proposal, ask, give_back_abandoned, give_back_interrupted

PROPOSAL = Proposal(
    params={"size": 4, "attention": "sdpa"},
    distributions={
        "size": IntDistribution(1, 64, log=True),
        "attention": CategoricalDistribution(("eager", "sdpa")),
    },
)


def states(study: optuna.Study) -> list[TrialState]:
    return [trial.state for trial in study.trials]


def test_what_is_proposed_is_what_is_asked_for() -> None:
    study = optuna.create_study()
    sampler = study.sampler
    trial = ask(study, PROPOSAL)
    assert trial.params == PROPOSAL.params
    assert study.trials[0].distributions == PROPOSAL.distributions
    assert study.sampler is sampler
    assert states(study) == [TrialState.RUNNING]


def test_what_others_have_put_into_the_queue_fails() -> None:
    study = optuna.create_study()
    study.enqueue_trial({"size": 8, "attention": "eager"})
    trial = ask(study, PROPOSAL)
    assert trial.params == PROPOSAL.params
    assert states(study) == [TrialState.FAIL, TrialState.RUNNING]


def test_what_a_killed_search_has_left_is_given_back() -> None:
    study = optuna.create_study()
    ask(study, PROPOSAL)
    study.tell(ask(study, PROPOSAL), 1.0)
    give_back_abandoned(study)
    assert states(study) == [TrialState.FAIL, TrialState.COMPLETE]


def test_an_interrupt_is_no_fault_of_the_trial() -> None:
    study = optuna.create_study()
    trial = ask(study, PROPOSAL)
    give_back_interrupted(study, trial)
    assert study.trials[0].user_attrs["outcome"] == "interrupted"
    # Told by others meanwhile: that is no error.
    give_back_interrupted(study, trial)
    assert states(study) == [TrialState.FAIL]
