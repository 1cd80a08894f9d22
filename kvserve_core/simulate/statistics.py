"""Distributions of one run, and their means over seeds with Student's t intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from kvserve_core.simulate.trace import Floats

PERCENTILES = (50, 90, 95, 99)
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16, 2.145, 2.131)
_NORMAL = 1.96
"""Two-sided 95 % quantiles of Student's t by degrees of freedom; beyond the table the formula is within 0.1 %."""


def distribution(values: Floats) -> dict[str, float]:
    """Mean and percentiles."""
    found = {f"p{p}": float(x) for p, x in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)}
    return {"mean": float(values.mean()), **found}


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and its 95 % confidence bounds; None with a single seed."""

    value: float
    low: float | None = None
    high: float | None = None


def over_seeds(values: Sequence[float]) -> Interval:
    """Mean and confidence interval of one figure, a value per seed."""
    count = len(values)
    mean = sum(values) / count
    if count < 2:
        return Interval(mean)
    half = t_quantile(count - 1) * sqrt(sum((v - mean) ** 2 for v in values) / (count - 1) / count)
    return Interval(mean, mean - half, mean + half)


def t_quantile(freedom: int) -> float:
    """97.5 % quantile of Student's t. Beyond the table by its expansion around the normal quantile."""
    if freedom <= len(_T):
        return _T[freedom - 1]
    return _NORMAL + (_NORMAL**3 + _NORMAL) / (4 * freedom) + _z5(freedom)


def _z5(freedom: int) -> float:
    return (5 * _NORMAL**5 + 16 * _NORMAL**3 + 3 * _NORMAL) / (96 * freedom**2)
