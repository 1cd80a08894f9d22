"""Which measurements are worth keeping: not beaten in quality, ratio and latency at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from kvserve_core.latency import latency_line
from kvserve_core.profiling.point import Measurement


def non_dominated(goals: ArrayLike) -> list[int]:
    """Rows of ``[n, k]`` that no other row equals or exceeds in every column and exceeds in one. More is better.

    Rows that are equal do not beat each other: all of them stay.
    """
    table = np.asarray(goals, np.float64)
    return [i for i, row in enumerate(table) if not ((table >= row).all(axis=1) & (table > row).any(axis=1)).any()]


def latency_s(m: Measurement, nbytes: float, bandwidth_bps: float) -> float:
    """Eq. 1 without the model's time, for ``nbytes`` original bytes over ``bandwidth_bps`` bytes/s."""
    return latency_line(nbytes, m.cr, m.encode, m.decode).at(1.0 / bandwidth_bps)


def front(measurements: Sequence[Measurement], nbytes: float, bandwidth_bps: float) -> list[Measurement]:
    """The measurements that are not beaten over quality (its lower bound), ratio and latency; failed ones are none."""
    good = [m for m in measurements if not m.error and m.cr > 0]
    goals = [(m.quality_low, m.cr, -latency_s(m, nbytes, bandwidth_bps)) for m in good]
    return [good[i] for i in non_dominated(goals)] if good else []
