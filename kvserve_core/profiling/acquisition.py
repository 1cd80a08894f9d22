"""What makes a candidate worth measuring: the acquisition of KVServe (arXiv 2605.13734, Algorithm 1), as functions.

::

    a(c) = w(c) CR(c) P(quality(c) >= floor) + lambda_t sigma(c) / max sigma  mean(CR)      lambda_t = lambda_0 decay^t

Its two-sided pruning takes quality to fall with the ratio. It does not fall strictly, so that here ``w`` makes a
candidate less likely and never impossible.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import erf, sqrt

import numpy as np
from numpy.typing import NDArray

from kvserve_core.profiling.encoding import Matrix
from kvserve_core.profiling.gp import Belief
from kvserve_core.profiling.point import Measurement

NORMAL_95 = 1.959964
CLEARLY_BAD = 2.0
"""A floor is clearly missed by twice the tolerance: an upper bound below ``floor - (1 - floor)``."""
FADE = 0.02
"""Below the best ratio, the weight falls by e for every 2 % of it."""


def feasible(m: Measurement, floor: float) -> bool:
    """Whether the lower bound of the quality keeps the floor."""
    return not m.error and m.quality_low >= floor


def clearly_bad(m: Measurement, floor: float) -> bool:
    """Whether even the upper bound misses the floor by as much as the floor allows to lose, or it failed."""
    return bool(m.error) or m.quality_high < 1 - CLEARLY_BAD * (1 - floor)


def variance(m: Measurement) -> float:
    """Of the mean quality, from its 95 % interval."""
    return float(((m.quality_high - m.quality_low) / 2 / NORMAL_95) ** 2)


def margin(told: Iterable[Measurement]) -> float:
    """How far the lower bound lies below the mean: the median of what was seen."""
    seen = [m.quality - m.quality_low for m in told if not m.error]
    return float(np.median(seen)) if seen else 0.0


def chance(belief: Belief, below: float, floor: float) -> Matrix:
    """P(the lower bound keeps the floor) of each candidate, when it lies ``below`` under the mean."""
    z = (belief.mean - below - floor) / belief.std / sqrt(2)
    return np.array([0.5 * (1 + erf(v)) for v in z])


def below_best(ratios: Matrix, best: float, prune: float) -> Matrix:
    """Weights after a feasible candidate of ratio ``best``: ``prune`` at it, fading below it, 1 above."""
    if prune == 1:
        return np.ones_like(ratios)
    under = np.minimum(ratios / best - 1, 0)
    return np.where(ratios > best, 1.0, prune * np.exp(under / FADE))


def above_failure(ratios: Matrix, alike: NDArray[np.bool_], failed: float, prune: float) -> Matrix:
    """Weights after a clear failure of ratio ``failed``: ``prune`` for what is ``alike`` and compresses more."""
    return np.where(alike & (ratios > failed), prune, 1.0)


def acquisition(ratios: Matrix, likely: Matrix, weights: Matrix, belief: Belief, explore: float) -> Matrix:
    """The formula above; ``explore`` is lambda_t. Ratio 0 stands for a candidate that cannot be encoded."""
    usual = float(ratios[ratios > 0].mean())
    found: Matrix = weights * ratios * likely + explore * usual * belief.std / belief.std.max()
    return found
