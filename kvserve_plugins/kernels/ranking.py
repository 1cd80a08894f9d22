"""Which heads are precise: a global ranking of head scores."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Decimal
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Scores = tuple[tuple[float, ...], ...]
"""``[L][H]`` by global layer and head index."""


@lru_cache(maxsize=64)
def low_heads(scores: Scores, low_ratio: float) -> NDArray[np.bool_]:
    """``[L, H]``: True for the ``round(low_ratio * L * H)`` (half up) lowest scores over all layers and heads.

    Equal scores rank by layer, then head.
    """
    table = np.asarray(scores, np.float64)
    low = np.zeros(table.size, np.bool_)
    low[np.argsort(table, axis=None, kind="stable")[: low_count(low_ratio, table.size)]] = True
    return low.reshape(table.shape)


def low_layers(scores: Scores, low_ratio: float) -> NDArray[np.bool_]:
    """``[L]``: True for the ``round(low_ratio * L)`` layers with the lowest mean score; equal ones from the first."""
    return low_heads(tuple((float(np.mean(row)),) for row in scores), low_ratio)[:, 0]


def last_layers(count: int, low_ratio: float) -> NDArray[np.bool_]:
    """``[count]``: True for the last ``round(low_ratio * count)``."""
    return np.arange(count) >= count - low_count(low_ratio, count)


def low_count(low_ratio: float, of: int) -> int:
    """``round(low_ratio * of)``, half up, in decimal: 0.145 of 100 are 15, on every machine."""
    return int((Decimal(str(low_ratio)) * of).to_integral_value(ROUND_HALF_UP))


def rectangles(chosen: NDArray[np.bool_]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """True cells of ``[L, H]`` as (rows, columns) products: one for all rows where these agree, else one a row.

    Rows are adjacent.
    """
    columns = [tuple(np.flatnonzero(row).tolist()) for row in chosen]
    if len(set(columns)) == 1:
        return [(tuple(range(len(columns))), columns[0])] if columns[0] else []
    return [((row,), heads) for row, heads in enumerate(columns) if heads]


def is_rectangular(scores: Sequence[Sequence[float]]) -> bool:
    """Whether all layers score the same number of heads, at least one."""
    return len({len(row) for row in scores}) == 1 and len(scores[0]) > 0
