"""The feasible profiles for one kind of request, and which of them can be fastest for V bytes at bandwidth B.

V changes with every request and costs with every report, so a table of the envelope's intervals would be made anew
nearly as often as it is asked. Instead all profiles are priced at once, which gives the optimum and the runner-up, and
what Theorem 6.2 says of this point is read off: of the lines that are less steep than that of the optimum i, line j
crosses it at the distance ``(T_j - T_i) / (slope_i - slope_j)``, and the one that does so first is the neighbour at
lower bandwidth; of the steeper ones likewise that at higher bandwidth. (Of overlapped stages, whose lines are bent,
these are the neighbours of the tangents.)

Neighbours do not depend on B, and only exploration needs them, so they are kept for an octave of V and ten seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import frexp, inf
from operator import attrgetter

import numpy as np

from kvserve_core.costs import Costs
from kvserve_core.explain import Explainer
from kvserve_core.overlap import SEQUENTIAL, Floats, Form, Room, room_for
from kvserve_core.policy import Candidate
from kvserve_core.pricing import Priced

_latency = attrgetter("latency_s")
KEPT_S = 10.0
MAX_SIDES = 1024
"""Neighbours that a menu remembers, and for how long."""
_MOST_S = 1e200
"""Seconds of sending V raw that are told apart, so that no sum is infinite."""
_NEVER_S = 1e-15
"""Lines this near to each other still have a finite distance."""

Item = tuple[Priced, float]
"""A profile and its quality (the lower bound) for this workload."""
Beside = tuple[tuple[Item, ...], frozenset[int], float]
"""An optimum with its neighbours and what is always offered, their numbers, and until when that serves."""


class Menu:
    """``items``: of every profile in the order of ``costs``, None where it may not serve. ``rejected``: why not.

    Those named in ``always`` are offered at every bandwidth. note: what an explanation says besides.
    """

    __slots__ = ("_always", "_barred", "_beside", "_costs", "_places", "_spare", "explain", "form", "items", "rejected")

    def __init__(
        self,
        costs: Costs,
        items: Sequence[Item | None],
        rejected: Iterable[tuple[str, str]],
        always: Iterable[str],
        form: Form = SEQUENTIAL,
        note: str | None = None,
    ) -> None:
        wanted = set(always)
        self.items = tuple(item for item in items if item)
        self.rejected = tuple(rejected)
        self._costs = costs
        self.form = form
        self._places = [item or self.items[0] for item in items]
        self._barred = None if all(items) else np.array([0.0 if item else inf for item in items])
        self._spare: list[Room] = []
        self._beside: dict[tuple[int, int], Beside] = {}
        self._always = tuple(i for i, item in enumerate(items) if item and item[0].profile.name in wanted)
        self.explain = Explainer(tuple(priced for priced, _ in self.items), form, note)

    def near(self, nbytes: float, bandwidth: float, now: float) -> tuple[Item, ...]:
        """The optimum at this point, its neighbours on the envelope, the runner-up, and what is always offered."""
        raw_s = nbytes / bandwidth
        if raw_s > _MOST_S:
            raw_s = _MOST_S
        costs, spare = self._costs.live, self._spare
        try:
            room = spare.pop()
        except IndexError:  # as many threads are at it as never before
            room = room_for(costs)
        latency = self.form.latencies(costs, nbytes, raw_s, room)
        if self._barred is not None:
            latency += self._barred
        best = int(latency.argmin())
        place = (best, frexp(nbytes)[1])
        beside = self._beside.get(place)
        if beside is None or now >= beside[2]:
            beside = self._look_aside(latency, place, nbytes, raw_s, now)
        latency[best] = inf
        second = int(latency.argmin())
        spare.append(room)
        items, numbers, _ = beside
        return items if second in numbers else (*items, self._places[second])

    def _look_aside(self, latency: Floats, place: tuple[int, int], nbytes: float, raw_s: float, now: float) -> Beside:
        slope = self.form.slopes(self._costs.live, nbytes, raw_s)
        if len(self._beside) >= MAX_SIDES:
            self._beside = {}
        best = place[0]
        numbers = dict.fromkeys((best, *neighbours(latency, slope, best, raw_s), *self._always))
        items = tuple(self._places[i] for i in numbers)
        self._beside[place] = beside = (items, frozenset(numbers), now + KEPT_S)
        return beside


def neighbours(latency: Floats, slope: Floats, best: int, x: float) -> tuple[int, int]:
    """Whose lines follow that of ``best`` on the lower envelope, above and below x, at which ``best`` is the lowest.

    latency, slope: of all lines at x; a latency of inf is of one that does not count. Where none follows, ``best``.
    """
    lowest = latency.item(best) * (1.0 - 1e-12) - _NEVER_S
    nearness = (slope - slope.item(best)) / (latency - lowest)
    above, below = int(nearness.argmin()), int(nearness.argmax())
    if nearness.item(above) >= 0.0:
        above = best
    if nearness.item(below) * x <= 1.0:  # they cross at no positive x
        below = best
    return above, below


def price(
    items: Iterable[Item], nbytes: float, bandwidth: float, model_s: float, form: Form = SEQUENTIAL
) -> tuple[Candidate, ...]:
    """Exact estimates (eq. 1) at the live costs, fastest first; equal ones in the order of the menu."""
    raw_s, candidates = nbytes / bandwidth, []
    overlapped = form.chunk_bytes or form.stored
    for priced, quality in items:
        name, cr, wire, encode_fixed, encode_each, decode_fixed, decode_each = priced.terms
        encode_s = encode_fixed + encode_each * nbytes
        decode_s = decode_fixed + decode_each * nbytes
        transfer_s = wire * raw_s
        latency_s = model_s + encode_s + transfer_s + decode_s
        if overlapped:
            latency_s = model_s + form.seconds(encode_s, transfer_s, decode_s, nbytes)
        candidates.append(Candidate(name, cr, latency_s, encode_s, transfer_s, decode_s, quality))
    candidates.sort(key=_latency)
    return tuple(candidates)
