"""How fast quality falls with the ratio among candidates that differ in numbers only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvserve_core.profiling.encoding import Matrix

SOUND = 0.5
"""Relative quality below which a candidate is ruined; it is so at any higher ratio, which says nothing of the slope."""


def slope(log_ratio: Matrix, quality: Matrix, groups: NDArray[np.int64]) -> float:
    """One slope of quality over the logarithm of the ratio, shared by all groups; never above 0.

    After failures at high ratios a Gaussian process, whose mean is constant, does not believe in lower ratios of the
    same kind: away from what it saw it returns to the mean of everything, which the failures have made a low one. A
    slope that is taken out before the fit and put back after it carries on where the process has forgotten.

    It is least squares on what was measured, ``[m]`` each, every group about its own means. It shrinks by its
    uncertainty (James and Stein's estimator, positive part): ``b max(0, 1 - (se / b)^2)``, so that chance makes none.
    """
    sound = quality > SOUND
    x, q, own = _centred(log_ratio[sound], groups[sound]), _centred(quality[sound], groups[sound]), groups[sound]
    free, spread = len(x) - len(np.unique(own)) - 1, float(x @ x)
    if free < 1 or not spread:
        return 0.0
    found = float(x @ q) / spread
    if found >= 0:
        return 0.0
    error = float(((q - found * x) ** 2).sum()) / free / spread
    return found * max(0.0, 1 - error / found**2)


def _centred(values: Matrix, groups: NDArray[np.int64]) -> Matrix:
    """Less the mean of their group."""
    _, at = np.unique(groups, return_inverse=True)
    means = np.bincount(at, values) / np.maximum(np.bincount(at), 1)
    centred: Matrix = values - means[at]
    return centred
