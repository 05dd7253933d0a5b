"""A Bayesian linear regression that learns from measurements how far predictions are off.

log(measured / predicted) of each candidate is the sum of a bias, a weight for each setting that it has,
and a residual of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prior:
    """Widths of log(measured / predicted) before anything is measured, where their scale is 1."""

    bias: float
    """Width common to all candidates: the card, its clocks, the machine."""
    knob: float
    """Width of each value of each knob; of a number, from the middle of its range to an end."""
    residual: float
    """Width of each candidate alone: knobs that act on each other, and noise."""


DEGREES_OF_FREEDOM = 4
"""Degrees of freedom of the scale that all widths of a prior share. [judgement] Its widths weigh as much as
four measurements: surprised by more than that, the sampler believes the surprises."""


class Correction:
    """Beliefs about the log ratio of each candidate: y = design @ weights + its own residual.

    Weights and residuals are Gaussian about 0, with the prior's widths times one unknown scale whose
    square follows a scaled inverse chi-squared distribution: the conjugate prior, so conditioning is
    closed form (Gelman et al., Bayesian Data Analysis, 3rd ed., section 14.2), here one observation
    at a time. The marginals, Student's t, are handed out as Gaussians of the same variance.

    A bound (out of memory: at least so much) conditions by moments: what the candidate's Gaussian
    becomes, cut off at the bound, has a mean and a variance, and those are what is taken in (assumed
    density filtering; Minka, "A family of algorithms for approximate Bayesian inference", 2001,
    chapter 3). Its order matters little, but bounds come after all equalities, which set the scale.
    """

    def __init__(self, design: Floats, is_bias: npt.NDArray[np.bool_], prior: Prior) -> None:
        self._design = design
        self._is_bias = is_bias
        self._residual = np.zeros(len(design))
        """Each candidate's own residual, as far as it was known before the first `is_equal`."""
        self._residual_variance = np.full(len(design), prior.residual**2)
        self._mean = np.zeros(design.shape[1])
        self._covariance = np.diag(np.where(is_bias, prior.bias, prior.knob) ** 2)
        self._known: dict[int, float] = {}
        self._num_equal = 0
        self._surprise = 0.0
        """Sum of squared standardized errors of the forecasts: a chi-squared, were the scale 1."""

    def is_equal(self, number: int, value: float) -> None:
        """Take in that the ratio of that candidate is `value`."""
        mean, variance = self._belief(number)
        self._num_equal += 1
        self._surprise += (value - mean) ** 2 / variance
        self._known = {**self._known, number: value}
        self._condition(number, value, 0.0)

    def drift(self, prior: Prior) -> None:
        """Let everything have changed since by as much, and the residuals stay what they were."""
        scale = self._scale
        residual = np.zeros(len(self._design))
        variance = self._residual_variance * scale
        for number, value in self._known.items():
            residual[number] = value - self._design[number] @ self._mean
            variance[number] = 0.0
        self._residual = residual
        self._residual_variance = variance + prior.residual**2
        widths = np.where(self._is_bias, prior.bias, prior.knob)
        self._covariance = self._covariance * scale + np.diag(widths**2)
        self._known = {}
        self._num_equal, self._surprise = 0, 0.0

    def is_at_least(self, number: int, bound: float) -> None:
        """Take in that the ratio of that candidate is at least `bound`."""
        mean, variance = self._belief(number)
        sd = math.sqrt(variance * self._scale)
        z = (bound - mean) / sd
        # Mills: the ratio of density and tail tends to z + 1/z, before the tail underflows.
        hazard = float(density(z) / below(-z)) if z < 30 else z + 1 / z
        shrink = min(max(1 - hazard * (hazard - z), 0.0), 1.0)
        self._condition(number, mean + sd * hazard, shrink * variance)

    def beliefs(self) -> tuple[Floats, Floats]:
        """Mean and standard deviation of the ratio of each candidate."""
        variance = np.einsum("ij,jk,ik->i", self._design, self._covariance, self._design)
        return self._design @ self._mean + self._residual, np.sqrt(
            (variance + self._residual_variance) * self._scale
        )

    @property
    def _scale(self) -> float:
        """The factor on squared widths that makes them variances of Student's t."""
        degrees = DEGREES_OF_FREEDOM + self._num_equal
        return (DEGREES_OF_FREEDOM + self._surprise) / (degrees - 2)

    def _belief(self, number: int) -> tuple[float, float]:
        """Mean and variance of one candidate's ratio, at scale 1."""
        row = self._design[number]
        return float(row @ self._mean + self._residual[number]), float(
            row @ self._covariance @ row + self._residual_variance[number]
        )

    def _condition(self, number: int, mean: float, variance: float) -> None:
        """Let the ratio of a candidate have these moments, and the weights follow."""
        before, before_variance = self._belief(number)
        shared = self._covariance @ self._design[number]
        gain = shared / before_variance
        self._mean = self._mean + gain * (mean - before)
        self._covariance = self._covariance - np.outer(gain, shared) * (
            1 - variance / before_variance
        )


def design_of(
    settings: Sequence[Mapping[str, str | bool | float]],
) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """The regression's design: (matrix of candidates x weights, which weights are the bias).

    A column per value of each knob that varies; one from -1 to 1 for a knob that is a number. A
    candidate without the knob has 0 there.
    """
    columns = [np.ones(len(settings))]
    for name in sorted({name for each in settings for name in each}):
        values = [each.get(name) for each in settings]
        known = sorted({value for value in values if value is not None}, key=str)
        if isinstance(known[0], str | bool):
            if len(set(values)) > 1:
                columns += [np.array([float(v == k) for v in values]) for k in known]
            continue
        numbers = np.array([np.nan if v is None else v for v in values], dtype=np.float64)
        low, high = np.nanmin(numbers), np.nanmax(numbers)
        if low < high:
            columns.append(np.nan_to_num((2 * numbers - low - high) / (high - low)))
    design = np.stack(columns, axis=1)
    return design, np.arange(design.shape[1]) == 0


def density(z: Floats | float) -> Floats:
    """The density of the standard Gaussian at z."""
    density: Floats = np.exp(-np.square(z) / 2) / math.sqrt(2 * math.pi)
    return density


_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def below(z: Floats | float) -> Floats:
    """The probability that a standard Gaussian variable is below z."""
    below: Floats = _erfc(-np.asarray(z) / math.sqrt(2)) / 2
    return below
