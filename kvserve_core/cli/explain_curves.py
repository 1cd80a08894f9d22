"""Where profiles cross over bandwidth, for stages one after another or overlapped. Pure functions.

Over x = 1/B (s/byte) a pipeline of n chunks (see :mod:`~kvserve_core.overlap`) is a line that bends once, upwards,
where the transfer becomes its slowest stage: it is the higher of two lines. With one chunk both are eq. 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import inf

import numpy as np

from kvserve_core.latency import Line, crossing
from kvserve_core.overlap import Floats, Form
from kvserve_core.pricing import Priced

SAME = 1e-9
"""Relative distance up to which two crossings are one."""
NEAREST = 1e-300
"""s/byte below which no crossing is told: as a bandwidth it would be infinite."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds over x = 1/B without T_model: the higher of ``hidden``, where a stage hides the link, and ``bound``."""

    hidden: Line
    bound: Line

    def at(self, x: Floats) -> Floats:
        """Seconds at many x."""
        slopes = np.array([[self.hidden.slope], [self.bound.slope]])
        intercepts = np.array([[self.hidden.intercept], [self.bound.intercept]])
        return np.asarray((intercepts + slopes * x).max(axis=0))


def curve(priced: Priced, nbytes: float, form: Form) -> Curve:
    """``M + (enc + transfer + dec - M) / n`` at the live costs, for M a computing stage and for M the transfer."""
    encode_s, decode_s, wire = priced.costs(nbytes)
    slowest, fastest, chunks = max(encode_s, decode_s), min(encode_s, decode_s), form.chunks(nbytes)
    return Curve(Line(slowest + fastest / chunks, wire / chunks), Line((slowest + fastest) / chunks, wire))


def pays_below(each: Curve, base: Curve) -> float:
    """The bandwidth (bytes/s) below which ``each`` is faster than ``base`` throughout.

    inf: faster at every bandwidth. 0: nowhere, or not below any bandwidth.
    """
    edges = _edges((each, base))
    faster = each.at(middles := _middles(edges)) < base.at(middles)
    if faster.all():
        return inf
    slower = int(np.flatnonzero(~faster)[-1])
    return 1.0 / edges[slower] if slower < len(edges) else 0.0


def stretches(curves: Sequence[Curve]) -> list[tuple[int, float | None]]:
    """The lower envelope: which curve is fastest below which bandwidth (bytes/s), the highest first, which has None.

    Bent curves may be fastest in several stretches. Of equal curves the first counts.
    """
    edges = _edges(curves)
    best = np.argmin([c.at(_middles(edges)) for c in curves], axis=0).tolist()
    turns = [(after, 1.0 / x) for (before, after), x in zip(pairwise(best), edges, strict=True) if before != after]
    return [(best[0], None), *turns]


def _edges(curves: Iterable[Curve]) -> list[float]:
    """Every x > 0 at which two lines cross, rising: between two of them nothing changes."""
    lines = {line for c in curves for line in (c.hidden, c.bound)}
    found = sorted(x for a, b in combinations(lines, 2) if a.slope != b.slope and NEAREST < (x := crossing(a, b)) < inf)
    return [x for i, x in enumerate(found) if i == 0 or x > found[i - 1] * (1 + SAME)]


def _middles(edges: Sequence[float]) -> Floats:
    """A point in every stretch between edges, from 0 to beyond the last."""
    if not edges:
        return np.ones(1)
    return np.array([edges[0] / 2, *((a + b) / 2 for a, b in pairwise(edges)), 2 * edges[-1]])
