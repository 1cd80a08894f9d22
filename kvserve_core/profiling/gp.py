"""A Gaussian process over candidates: what quality to expect, and how sure that is."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvserve_core.errors import UnavailableComponentError
from kvserve_core.profiling.encoding import Matrix

NU = 1.5
"""Smoothness of the Matern kernel, as in the reference (arXiv 2605.13734, Algorithm 1)."""
SCALES = (0.1, 10.0)
NOISE = (1e-5, 1.0)
"""Bounds of the kernel, in units of scaled inputs and of standardised observations."""
FLAT = 1e-6
"""Spread below which observations count as equal."""


@dataclass(frozen=True)
class Belief:
    """Mean and standard deviation of the quality of each candidate, as it would be measured without sampling noise."""

    mean: Matrix
    std: Matrix


def believe(inputs: Matrix, at: list[int], quality: Matrix, variance: Matrix, seed: int) -> Belief:
    """Fit on the candidates ``at``, predict for all.

    inputs: ``[n, d]``. quality, variance: ``[m]`` of the measured ones; the variance is that of their sampling and adds
    to the noise that the fit finds by itself.

    Raises:
        UnavailableComponentError: scikit-learn is not installed.
    """
    regressor, kernels = sklearn()
    middle, spread = float(quality.mean()), max(float(quality.std()), FLAT)
    kernel = kernels.ConstantKernel(1.0, SCALES) * kernels.Matern(1.0, SCALES, nu=NU)
    kernel += kernels.WhiteKernel(1e-2, NOISE)
    process = regressor(
        kernel, alpha=variance / spread**2 + 1e-10, n_restarts_optimizer=1, random_state=seed, normalize_y=False
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a length scale at its bound is an answer, not a fault
        process.fit(inputs[at], (quality - middle) / spread)
        mean, std = process.predict(inputs, return_std=True)
    return Belief(mean * spread + middle, np.maximum(std * spread, 1e-12))


def sklearn() -> tuple[Any, Any]:
    """The regressor's class and the module of kernels, imported when a search begins.

    Raises:
        UnavailableComponentError: scikit-learn is not installed.
    """
    try:
        from sklearn.gaussian_process import GaussianProcessRegressor, kernels
    except ImportError as error:
        hint = "the search needs 'sklearn', which is not installed; pip install 'kvserve[profile]'"
        raise UnavailableComponentError(hint) from error
    return GaussianProcessRegressor, kernels
