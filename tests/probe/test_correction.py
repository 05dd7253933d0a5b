"""Beliefs about predictions, against closed forms of others and against sampling."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from autotune.probe.correction import DEGREES_OF_FREEDOM, Correction, Prior

PRIOR = Prior(bias=0.5, knob=0.2, residual=0.1)


def correction(num_rows: int) -> tuple[Correction, Any]:
    """A belief about rows with a bias and two knobs, and the covariance that it starts from."""
    rng = np.random.default_rng(5)
    design = np.column_stack([np.ones(num_rows), rng.normal(size=(num_rows, 2))])
    is_bias = np.array([True, False, False])
    weights = np.diag([0.5**2, 0.2**2, 0.2**2])
    return Correction(design, is_bias, PRIOR), design @ weights @ design.T


def test_equalities_condition_as_a_student_t_process_does() -> None:
    beliefs, shared = correction(8)
    seen, values = [1, 4, 6], np.array([0.4, -0.1, 0.9])
    for number, value in zip(seen, values, strict=True):
        beliefs.is_equal(number, value)
    mean, sd = beliefs.beliefs()
    # Shah, Wilson and Ghahramani, "Student-t processes as alternatives to Gaussian processes",
    # AISTATS 2014, lemma 3, all at once; its covariance is this scale matrix times nu / (nu - 2).
    observed = shared[np.ix_(seen, seen)] + 0.1**2 * np.eye(3)
    cross = shared[:, seen]
    solved = np.linalg.solve(observed, values)
    np.testing.assert_allclose(mean, cross @ solved)
    degrees = DEGREES_OF_FREEDOM
    left = np.diag(shared) + 0.1**2 - np.diag(cross @ np.linalg.solve(observed, cross.T))
    scale = (degrees + values @ solved) / (degrees + 3 - 2)
    np.testing.assert_allclose(sd, np.sqrt(left * scale))


def test_a_bound_conditions_as_sampling_does() -> None:
    beliefs, shared = correction(4)
    _, sd_before = beliefs.beliefs()
    beliefs.is_at_least(2, 0.6)
    mean, sd = beliefs.beliefs()
    degrees = DEGREES_OF_FREEDOM
    widened = shared * degrees / (degrees - 2)
    own = 0.1**2 * degrees / (degrees - 2)
    draws = np.random.default_rng(0).multivariate_normal(
        np.zeros(5),
        # The four rows without residuals, and the observed one's ratio with it.
        np.block([[widened, widened[:, [2]]], [widened[[2]], widened[2, 2] + own]]),
        size=400_000,
    )
    kept = draws[draws[:, 4] >= 0.6][:, :4]
    np.testing.assert_allclose(mean, kept.mean(axis=0), atol=0.01)
    np.testing.assert_allclose(sd, np.sqrt(kept.var(axis=0) + own), rtol=0.02)
    assert (sd <= sd_before + 1e-12).all()


def test_a_bound_far_beyond_all_beliefs_is_taken_in_all_the_same() -> None:
    beliefs, _ = correction(4)
    beliefs.is_at_least(2, 60.0)
    mean, sd = beliefs.beliefs()
    assert 50 < mean[2] <= 60.5
    assert np.isfinite(sd).all()


def test_a_bound_that_was_expected_changes_nothing() -> None:
    beliefs, _ = correction(4)
    before = beliefs.beliefs()
    beliefs.is_at_least(2, -60.0)
    np.testing.assert_allclose(beliefs.beliefs(), before)


def test_after_a_drift_surprises_are_counted_anew() -> None:
    """Beliefs that nothing has surprised since are as wide as a Student's t of their variance."""
    for values in ([], [0.4], [0.4, -0.1, 0.9]):
        beliefs, _ = correction(8)
        for number, value in enumerate(values):
            beliefs.is_equal(number, value)
        mean, sd = beliefs.beliefs()
        beliefs.drift(Prior(bias=0.0, knob=0.0, residual=0.0))
        drifted_mean, drifted_sd = beliefs.beliefs()
        others = slice(len(values), None)
        np.testing.assert_allclose(drifted_mean[others], mean[others])
        np.testing.assert_allclose(drifted_mean[: len(values)], values)
        wider = math.sqrt(DEGREES_OF_FREEDOM / (DEGREES_OF_FREEDOM - 2))
        np.testing.assert_allclose(drifted_sd[others], wider * sd[others])
