"""Curves of ratio against quality, and ratios compared at equal quality."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

Point = tuple[float, float]
"""``(KL, CR)``."""
KL_TARGETS = (0.0045, 0.0128, 0.05)
"""Nats per token: about what KIVI with 4 bits, the reference pipeline and CacheGen's shipped levels cost."""


def cr_at(points: Sequence[Point], kl: float) -> float | None:
    """The ratio at a KL: straight lines between neighbours in the logarithms of both, so CR = c KL^a piecewise.

    None outside the measured range. Points without loss have no logarithm and are left out. Where noise makes the
    curve cross a KL more than once, the smallest ratio counts.
    """
    usable = sorted((cr, k) for k, cr in points if k > 0 and cr > 0)
    found = [made for (c0, k0), (c1, k1) in pairwise(usable) if (made := _between(k0, c0, k1, c1, kl)) is not None]
    exact = [cr for cr, k in usable if k == kl]
    return min([*found, *exact], default=None)


def _between(k0: float, c0: float, k1: float, c1: float, kl: float) -> float | None:
    if not min(k0, k1) <= kl <= max(k0, k1) or k0 == k1:
        return None
    share = (math.log(kl) - math.log(k0)) / (math.log(k1) - math.log(k0))
    return math.exp(math.log(c0) + share * (math.log(c1) - math.log(c0)))


def at_targets(rows: Sequence[Mapping[str, Any]], targets: Sequence[float] = KL_TARGETS) -> list[dict[str, Any]]:
    """For each target ``cr``, and ``low`` and ``high`` from the curves through the ends of the 95 % intervals of KL.

    rows: the points of one family, ``{"cr": ..., "kl": {"mean": ..., "low": ..., "high": ...}}``.
    """
    ends = {"cr": "mean", "low": "high", "high": "low"}
    curves = {name: [(r["kl"][end], r["cr"]) for r in rows if r["kl"][end] is not None] for name, end in ends.items()}
    return [{"kl": kl} | {name: cr_at(points, kl) for name, points in curves.items()} for kl in targets]
