"""Candidates as vectors: one-hot for choices, min-max for numbers, a column for the ratio that is known beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvserve_core.profiling.point import Point, Value

Matrix: TypeAlias = NDArray[np.float64]
ABSENT = 0.5
"""Where a candidate stands on a number that it does not have: as far from one end as from the other."""
WIDE = 10.0
"""Numbers that span this factor are compared by their logarithm."""
APART = 0.5**0.5
"""Length of a one-hot entry: two choices are then as far apart as the two ends of a number."""


def one_hot_min_max(points: Sequence[Point]) -> Matrix:
    """``[n, d]`` over all dimensions of the points. What never differs has no column."""
    columns = [column for name in dimensions(points) for column in _columns([p.at.get(name) for p in points])]
    return np.stack(columns, 1) if columns else np.zeros((len(points), 0))


def ordinal(points: Sequence[Point]) -> Matrix:
    """``[n, d]``, each choice numbered in order of appearance, no scaling: what the encoding is compared with."""
    columns = []
    for name in dimensions(points):
        values = [p.at.get(name) for p in points]
        if _numeric(values):
            columns.append([0.0 if v is None else float(v) for v in values])
        else:
            order = {v: i for i, v in enumerate(dict.fromkeys(values))}
            columns.append([float(order[v]) for v in values])
    return np.array(columns, np.float64).T if columns else np.zeros((len(points), 0))


def dimensions(points: Sequence[Point]) -> list[str]:
    """Names of all dimensions, in order of appearance."""
    return list(dict.fromkeys(name for p in points for name, _ in p.values))


def scaled(values: Matrix) -> Matrix:
    """A vector of numbers on [0, 1], by logarithm where they are positive and span ``WIDE``; constant ones on 0."""
    low, high = values.min(), values.max()
    if low > 0 and high / low >= WIDE:
        return scaled(np.log(values / low)) if high / low < np.inf else np.zeros_like(values)
    return (values - low) / (high - low) if high > low else np.zeros_like(values)


def _columns(values: Sequence[Value | None]) -> list[Matrix]:
    return _number(values) if _numeric(values) else _choice(values)


def _numeric(values: Sequence[Value | None]) -> bool:
    return all(v is None or (isinstance(v, (int, float)) and not isinstance(v, bool)) for v in values)


def _number(values: Sequence[Value | None]) -> list[Matrix]:
    here = np.array([v is not None for v in values])
    column = np.full(len(values), ABSENT)
    column[here] = scaled(np.array([float(v) for v in values if v is not None]))
    return [column] if np.ptp(column) > 0 else []


def _choice(values: Sequence[Value | None]) -> list[Matrix]:
    known = [v for v in dict.fromkeys(values) if v is not None]
    if len(set(values)) < 2:
        return []
    return [np.array([APART if v == choice else 0.0 for v in values]) for choice in known]
