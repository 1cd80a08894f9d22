"""What all profiles of a controller cost now, as one matrix, and how what was learned of them fades."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from struct import Struct

import numpy as np

from kvserve_core.overlap import Floats
from kvserve_core.pricing import Priced

REFRESH_S = 2.0
"""How often the learned costs of a profile are brought up to date with how far they have faded: one at a time,"""
OVERDUE_S = 10.0
"""or all that have waited for so much longer."""
_FIVE = Struct("5d")
"""One profile's figures: wire, encoding fixed and per byte, decoding fixed and per byte."""


class Costs:
    """``live`` is ``[5, P]``, rows as in :data:`_FIVE`, written in place.

    Whoever writes holds the controller's lock; readers hold none, and may meet a profile of which some figures are new
    and some are not yet. That decides whom they offer; what they offer is priced by ``Priced.terms``, which are whole.

    fade_s: when ``fade`` is due, at the earliest.
    """

    __slots__ = ("_fading", "_figures", "_offsets", "fade_s", "live")

    def __init__(self, every: Iterable[Priced]) -> None:
        found = list(every)
        self._offsets = {priced.name: i * _FIVE.size for i, priced in enumerate(found)}
        self._figures = bytearray(_FIVE.size * len(found))
        self.live: Floats = np.frombuffer(self._figures).reshape(len(found), -1).T
        self._fading: dict[Priced, float] = {}
        for priced in found:
            self._write(priced)
        self.fade_s = inf

    def learned(self, priced: Priced, now: float) -> None:
        """Take over what this profile costs after a report; and it goes to the end of those that fade."""
        self._write(priced)
        due_s, fading = now + REFRESH_S, self._fading
        fading.pop(priced, None)
        fading[priced] = due_s
        if due_s < self.fade_s:
            self.fade_s = due_s

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
            self.learned(priced, now)
        self.fade_s = next(iter(self._fading.values()))

    def _write(self, priced: Priced) -> None:
        _, _, wire, encode_fixed, encode_each, decode_fixed, decode_each = priced.terms
        at = self._offsets[priced.name]
        _FIVE.pack_into(self._figures, at, wire, encode_fixed, encode_each, decode_fixed, decode_each)
