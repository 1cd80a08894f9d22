"""What all profiles of a controller cost now, as one matrix, and how what was learned of them fades."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from math import inf

import numpy as np

from kvserve_core.overlap import Floats
from kvserve_core.pricing import Priced

REFRESH_S = 2.0
"""How often the learned costs of a profile are brought up to date with how far they have faded: one at a time,"""
OVERDUE_S = 10.0
"""or all that have waited for so much longer."""


class Costs:
    """``live`` is ``[5, P]``, columns as in :data:`pricing.Terms`; it is replaced whole, so no reader sees half of it.

    fade_s: when ``fade`` is due. Whoever writes holds the controller's lock.
    """

    __slots__ = ("_fading", "_places", "fade_s", "live")

    def __init__(self, every: Iterable[Priced]) -> None:
        terms = [priced.terms for priced in every]
        self.live: Floats = np.array([t[2:] for t in terms]).T.copy()
        self._places = {t[0]: i for i, t in enumerate(terms)}
        self._fading: OrderedDict[Priced, float] = OrderedDict()
        self.fade_s = inf

    def learned(self, priced: Priced, now: float) -> None:
        """Take over what this profile costs after a report."""
        self._update([priced], now)

    def fade(self, now: float) -> None:
        """Let what was learned of the profile that has waited longest fade: one, so that no decision takes long."""
        due: list[Priced] = []
        for priced, at in self._fading.items():  # in this order
            if due and at + OVERDUE_S > now:
                break
            priced.refresh(now)
            due.append(priced)
        self._update(due, now)

    def _update(self, moved: list[Priced], now: float) -> None:
        """New columns; these profiles go to the end of those that fade."""
        live, fading = self.live.copy(), self._fading
        for priced in moved:
            live[:, self._places[priced.terms[0]]] = priced.terms[2:]
            fading[priced] = now + REFRESH_S
            fading.move_to_end(priced)
        self.live = live
        self.fade_s = next(iter(fading.values()))
