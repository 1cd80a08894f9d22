"""What all profiles of a controller cost now, as one matrix, and how what was learned of them fades."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from math import inf

import numpy as np

from kvserve_core.overlap import Floats
from kvserve_core.pricing import Priced

REFRESH_S = 2.0
"""How often the learned costs of a profile are brought up to date with how far they have faded: one at a time,"""
OVERDUE_S = 10.0
"""or all that have waited for so much longer."""
ROWS = 5


class Costs:
    """``live`` is ``[5, P]``, columns as in :data:`pricing.Terms`; it is replaced whole, so no reader sees half of it.

    fade_s: when ``fade`` is due, at the earliest. Whoever writes holds the controller's lock.
    """

    __slots__ = ("_fading", "_next", "_places", "_view", "fade_s", "live")

    def __init__(self, every: Iterable[Priced]) -> None:
        found = list(every)
        width = len(found)
        self._places = {priced.name: tuple(range(i, ROWS * width, width)) for i, priced in enumerate(found)}
        self._next = array("d", bytes(8 * ROWS * width))  # items of an array are set faster than those of numpy
        self._view: Floats = np.frombuffer(self._next).reshape(ROWS, width)
        self._fading: dict[Priced, float] = {}
        for priced in found:
            self._write(priced)
        self.live: Floats = self._view.copy()
        self.fade_s = inf

    def learned(self, priced: Priced, now: float) -> None:
        """Take over what this profile costs after a report."""
        self._renew(priced, now)
        self.live = self._view.copy()

    def fade(self, now: float) -> None:
        """Let what was learned of the profile that has waited longest fade: one, so that no decision takes long."""
        if (due_s := next(iter(self._fading.values()))) > now:
            self.fade_s = due_s
            return
        due: list[Priced] = []
        for priced, at in self._fading.items():  # in this order
            if due and at + OVERDUE_S > now:
                break
            priced.refresh(now)
            due.append(priced)
        for priced in due:
            self._renew(priced, now)
        self.live = self._view.copy()
        self.fade_s = next(iter(self._fading.values()))

    def _renew(self, priced: Priced, now: float) -> None:
        """Its column; and it goes to the end of those that fade."""
        self._write(priced)
        due_s, fading = now + REFRESH_S, self._fading
        fading.pop(priced, None)
        fading[priced] = due_s
        if due_s < self.fade_s:
            self.fade_s = due_s

    def _write(self, priced: Priced) -> None:
        every = self._next
        wire, encode_fixed, encode_each, decode_fixed, decode_each = self._places[priced.name]
        (
            _,
            _,
            every[wire],
            every[encode_fixed],
            every[encode_each],
            every[decode_fixed],
            every[decode_each],
        ) = priced.terms
