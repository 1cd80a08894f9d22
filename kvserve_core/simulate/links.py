"""A link whose active transfers get equal parts of a bandwidth that changes: processor sharing in closed form.

Every active transfer has been served ``S`` bytes since the link was last idle, with ``dS = B dt / n``. One that joins
at ``S`` with w bytes ends when ``S`` has grown by w, whatever the others do meanwhile; so they end in the order of
``S + w``, and only the next end has to be known in time: ``K(t) = K(now) + n (S_end - S)``.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf

from kvserve_core.simulate.trace import Trace


class SharedLink:
    """Transfers by number. ``next_s`` is when the next one ends; ``active``, how many there are."""

    __slots__ = ("_carried", "_ends", "_served", "active", "next_s", "trace")

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.active = 0
        self.next_s = inf
        self._served = 0.0
        self._carried = 0.0
        self._ends: list[tuple[float, int]] = []

    def join(self, now: float, nbytes: float, number: int) -> None:
        """A transfer of ``nbytes`` begins."""
        carried = self.trace.carried(now)
        if self.active:
            self._served += (carried - self._carried) / self.active
        else:
            self._served = 0.0  # so that it never loses digits
        self._carried = carried
        heappush(self._ends, (self._served + nbytes, number))
        self.active += 1
        self._look_ahead(now)

    def pop(self) -> int:
        """The transfer that ends at ``next_s``."""
        now = self.next_s
        end, number = heappop(self._ends)
        self._carried += self.active * max(0.0, end - self._served)
        self._served = end
        self.active -= 1
        self._look_ahead(now)
        return number

    def _look_ahead(self, now: float) -> None:
        if not self._ends:
            self.next_s = inf
            return
        left = self.active * (self._ends[0][0] - self._served)
        self.next_s = max(now, self.trace.when(self._carried + left))


class PrivateLink:
    """Every transfer has the whole bandwidth: the trace says what one flow got."""

    __slots__ = ("_ends", "active", "next_s", "trace")

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.active = 0  # nobody waits for anybody
        self.next_s = inf
        self._ends: list[tuple[float, int]] = []

    def join(self, now: float, nbytes: float, number: int) -> None:
        """A transfer of ``nbytes`` begins."""
        end = max(now, self.trace.when(self.trace.carried(now) + nbytes))
        heappush(self._ends, (end, number))
        self.next_s = self._ends[0][0]

    def pop(self) -> int:
        """The transfer that ends at ``next_s``."""
        _, number = heappop(self._ends)
        self.next_s = self._ends[0][0] if self._ends else inf
        return number
