"""The feasible profiles for one kind of request, and which of them can be fastest for V bytes at bandwidth B.

With fixed costs the envelope depends on V. Divided by V a profile is ``f/V + a + x/cr``, in which V moves only the
fixed part: one table per 1/32 octave of V, made when first needed, holds the breaks in x = 1/B. Its candidates are
then priced for the exact V and B, so the best of them is within 1.1 % of the difference in fixed cost of the true
optimum, and nearly always it. Tables are made anew when a learned cost moves by :data:`pricing.DRIFT`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from math import log2

from kvserve_core.explain import Explainer
from kvserve_core.latency import Envelope, Line, lower_envelope
from kvserve_core.pricing import Priced

STEPS = 32
"""Tables per octave of V."""

Item = tuple[Priced, float]
"""A profile and its quality (the lower bound) for this workload."""


class Table:
    """For one V: the breaks in x = 1/B, and between them the candidates (the optimum, its neighbours, the musts)."""

    __slots__ = ("breaks", "items")

    def __init__(self, envelope: Envelope, menu: Sequence[Item], always: Sequence[int]) -> None:
        self.breaks = envelope.breaks
        order = envelope.order
        windows = (order[max(0, i - 1) : i + 2] for i in range(len(order)))
        self.items = tuple(tuple(menu[i] for i in dict.fromkeys((*window, *always))) for window in windows)


class Menu:
    """Feasible ``items``; those at ``always`` are offered at every bandwidth. ``rejected``: names with reasons."""

    __slots__ = ("_always", "explain", "items", "rejected", "tables")

    def __init__(self, items: Sequence[Item], rejected: Iterable[tuple[str, str]], always: Iterable[str]) -> None:
        wanted = set(always)
        self.items = tuple(items)
        self.rejected = tuple(rejected)
        self._always = tuple(i for i, (priced, _) in enumerate(self.items) if priced.profile.name in wanted)
        self.tables: dict[int, Table] = {}
        self.explain = Explainer(tuple(priced for priced, _ in self.items))

    def table(self, step: int) -> Table:
        """The table of the V whose ``log2`` is ``step / STEPS``; not yet kept."""
        nbytes = 2.0 ** (step / STEPS)
        lines = (priced.line(nbytes) for priced, _ in self.items)
        scaled = [Line(line.intercept / nbytes, line.slope / nbytes) for line in lines]
        return Table(lower_envelope(scaled), self.items, self._always)

    def near(self, nbytes: float, bandwidth: float) -> Sequence[Item]:
        """The optimum at this point, its neighbours on the envelope, and what is always offered."""
        step = round(log2(nbytes) * STEPS)
        table = self.tables.get(step)
        if table is None:
            table = self.tables.setdefault(step, self.table(step))
        return table.items[bisect_left(table.breaks, 1.0 / bandwidth)]
