"""Least squares with inequalities, for fits of eq. 1 to published points."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def constrained(rows: Floats, wanted: Floats, at_least: Floats, margins: Floats, rounds: int = 200) -> Floats:
    """``p`` that minimises ``|rows p - wanted|^2`` with ``at_least p >= margins``, to within a few parts in 10^6.

    A quadratic penalty on what is violated, made heavier in steps; each step is solved by Newton's method, that is by
    least squares over the constraints that are violated at the time.
    """
    p = np.linalg.lstsq(rows, wanted, rcond=None)[0]
    for weight in (1e1, 1e2, 1e3, 1e4, 1e5, 1e6):
        seen: set[bytes] = set()
        for _ in range(rounds):
            violated = at_least @ p < margins
            if violated.tobytes() in seen:
                break
            seen.add(violated.tobytes())
            both = np.concatenate([rows, weight * at_least[violated]])
            p = np.linalg.lstsq(both, np.concatenate([wanted, weight * margins[violated]]), rcond=None)[0]
    return np.asarray(p)


def line_error(x: Floats, y: Floats) -> float:
    """The smallest possible largest relative error of any ``a + b x`` with a, b >= 0 at these points.

    Chebyshev: the best line errs as much at three points, in turn above and below; or, with a or b at 0, at two. All
    are tried. x rises.
    """
    errors = [_error(x, y, *_through(x, y, shape)) for shape in ((1.0, 0.0), (0.0, 1.0))]
    signs = np.array([1.0, -1.0, 1.0])
    for chosen in map(list, combinations(range(len(x)), 3)):
        a, b, _ = np.linalg.solve(np.c_[1 / y[chosen], x[chosen] / y[chosen], signs], np.ones(3))
        if a >= 0 and b >= 0:
            errors.append(_error(x, y, a, b))
    return min(errors)


def scale_error(fixed: Floats, each: Floats, y: Floats) -> tuple[float, float]:
    """The smallest possible largest relative error of ``fixed + k each`` with k >= 0 at these points, and that k.

    The error is a convex function of k, made of straight parts, that is lowest where two of them meet, or at k = 0.
    """
    base, slope = fixed / y - 1.0, each / y
    tried = [0.0]
    for i, j in combinations(range(len(y)), 2):
        for sign in (1.0, -1.0):
            if bend := slope[i] - sign * slope[j]:
                tried.append(float((sign * base[j] - base[i]) / bend))
    return min((float(np.abs(base + k * slope).max()), k) for k in tried if k >= 0.0)


def bend_error(x: Floats, y: Floats, sign: int) -> tuple[float, tuple[int, int, int]]:
    """The smallest possible largest relative error of any convex (1) or concave (-1) function at these points.

    Between two points a convex function is below its chord, so of three points the middle one is too high by a share of
    ``(y_j - chord) / (y_j + chord)`` at least, and there is one that errs no more than the worst three. Also these.
    """
    worst, where = 0.0, (0, 0, 0)
    for i, j, k in combinations(range(len(x)), 3):
        share = (x[k] - x[j]) / (x[k] - x[i])
        chord = share * y[i] + (1.0 - share) * y[k]
        error = float(sign * (y[j] - chord) / (y[j] + chord))
        if error > worst:
            worst, where = error, (i, j, k)
    return worst, where


def _through(x: Floats, y: Floats, shape: tuple[float, float]) -> tuple[float, float]:
    share = (shape[0] + shape[1] * x) / y
    scale = 2.0 / (share.max() + share.min())
    return shape[0] * scale, shape[1] * scale


def _error(x: Floats, y: Floats, a: float, b: float) -> float:
    return float(np.abs((a + b * x) / y - 1.0).max())
