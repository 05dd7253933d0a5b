"""What earlier trials say to a search: hardware and libraries are never mixed."""

from __future__ import annotations

import dataclasses
from typing import Any

import answers
import optuna
import pytest
from optuna.trial import TrialState

from autotune.errors import StorageError
from autotune.probe.study_view import StudyView
from autotune.records.fingerprint import Fingerprint
from autotune.records.measurement import Measurement

SEEN = answers.measurement()
HERE = SEEN.fingerprint
ELSEWHERE = dataclasses.replace(HERE, driver="999.0")
LARGER = dataclasses.replace(answers.CONFIG, micro_batch_size=8, gradient_accumulation_steps=4)


def seen_in(study: optuna.Study) -> StudyView:
    return StudyView(study, lambda _: HERE)


def add(
    study: optuna.Study,
    *,
    state: TrialState = TrialState.COMPLETE,
    measurement: Measurement | None = SEEN,
    fingerprint: Fingerprint = HERE,
) -> None:
    attributes: dict[str, Any] = {}
    if measurement is not None:
        made = dataclasses.replace(measurement, fingerprint=fingerprint)
        attributes["measurement"] = made.to_dict()
    value = 1.0 if state == TrialState.COMPLETE else None
    study.add_trial(optuna.create_trial(state=state, value=value, user_attrs=attributes))


@pytest.fixture
def study() -> optuna.Study:
    return optuna.create_study(direction="maximize")


def test_what_was_measured_elsewhere_says_nothing(study: optuna.Study) -> None:
    add(study)
    add(study, fingerprint=ELSEWHERE)
    found = seen_in(study)
    assert found.left_out == {1}
    assert found.known([answers.CONFIG]) == [SEEN]
    assert found.num_begun == 1


def test_what_runs_is_counted(study: optuna.Study) -> None:
    for state in (TrialState.RUNNING, TrialState.WAITING):
        add(study, state=state, measurement=None)
    found = seen_in(study)
    assert (found.num_running, found.num_begun, found.left_out) == (1, 1, set())


def test_what_others_add_is_seen_at_the_next_look(study: optuna.Study) -> None:
    found = seen_in(study)
    assert found.fastest() is None
    add(study)
    assert found.known([answers.CONFIG]) == []
    found.look()
    assert found.known([answers.CONFIG]) == [SEEN]
    assert found.fastest() == SEEN
    assert found.known([LARGER]) == []


@pytest.mark.parametrize(
    ("step_seconds", "is_known"),
    [
        (9.0, False),  # faster than all that is chosen from: stopped beside something else
        (10.05, False),  # as fast, within the noise
        # The noise is 2 %, and 10 s / 0.98 are 10.204 s.
        (10.2, False),
        (10.21, True),
        (15.0, True),
    ],
)
def test_what_was_too_slow_beside_other_configurations_is_tried_again(
    study: optuna.Study, step_seconds: float, is_known: bool
) -> None:
    stopped = answers.measurement(config=LARGER, outcome="slow", step_seconds=step_seconds)
    add(study, state=TrialState.PRUNED, measurement=stopped)
    add(study)
    found = seen_in(study)
    assert found.known([LARGER]) == [stopped]
    found.choose_from([LARGER, answers.CONFIG])
    assert found.known([LARGER]) == [stopped] * is_known
    assert (found.left_out, found.num_begun) == (set() if is_known else {0}, 1 + is_known)


def test_what_is_refused_stays_out_whenever_it_comes(study: optuna.Study) -> None:
    add(study)
    found = seen_in(study)
    found.refuse([answers.CONFIG])
    add(study)
    found.look()
    assert found.left_out == {0, 1}
    assert found.fastest() is None


def test_what_was_killed_while_it_was_told_is_known_and_may_be_asked_for_again(
    study: optuna.Study,
) -> None:
    add(study, state=TrialState.FAIL)
    found = seen_in(study)
    assert found.known([answers.CONFIG]) == [SEEN]
    assert found.num_begun == 0


def test_what_cannot_be_read_is_said(study: optuna.Study) -> None:
    study.add_trial(optuna.create_trial(value=1.0, user_attrs={"measurement": {}}))
    with pytest.raises(StorageError, match="Trial 0 of the study cannot be read"):
        seen_in(study)
