"""Levenberg-Marquardt on logarithms, with residuals beyond 10 % counted less (pseudo-Huber)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LARGE = 0.1
_STEP = 1e-4


def fit(
    residuals: Callable[[Floats], Floats], start: Floats, weights: Floats, steps: int = 80
) -> Floats:
    """Parameters that make `residuals` (natural logarithms of ratios) small, from `start` on."""

    def loss(r: Floats) -> float:
        return float((weights * (np.sqrt(1 + (r / LARGE) ** 2) - 1)).sum())

    found, r, damping = start, residuals(start), 1e-2
    best = loss(r)
    for _ in range(steps):
        slopes = [(residuals(found + _STEP * unit) - r) / _STEP for unit in np.eye(len(found))]
        jacobian = np.stack(slopes, axis=1)
        weight = weights / np.sqrt(1 + (r / LARGE) ** 2)
        normal = jacobian.T @ (jacobian * weight[:, None])
        damped = normal + damping * np.diag(np.diag(normal) + 1e-3)
        tried = found - np.linalg.solve(damped, jacobian.T @ (weight * r))
        tried_r = residuals(tried)
        if np.isfinite(tried_r).all() and loss(tried_r) < best:
            gain, found, r, best = best - loss(tried_r), tried, tried_r, loss(tried_r)
            damping = max(damping / 3, 1e-7)
            if gain < 1e-6 * best:
                break
        else:
            damping *= 4
            if damping > 1e8:
                break
    return found
