"""The feasible profiles for one kind of request, and which of them can be fastest for V bytes at bandwidth B.

With fixed costs the envelope depends on V. Divided by V a profile is ``f/V + a + x/cr``, in which V moves only the
fixed part: one table per 1/32 octave of V, made when first needed, holds the breaks in x = 1/B. Its candidates are
then priced for the exact V and B, so the best of them is within 1.1 % of the difference in fixed cost of the true
optimum, and nearly always it. Tables are made anew when a learned cost moves by :data:`pricing.DRIFT`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from math import inf, log2
from operator import attrgetter

from kvserve_core.explain import Explainer
from kvserve_core.latency import Envelope
from kvserve_core.overlap import Form
from kvserve_core.policy import Candidate
from kvserve_core.pricing import Priced

SEQUENTIAL = Form()
_latency = attrgetter("latency_s")
STEPS = 32
"""Tables per octave of V."""

Item = tuple[Priced, float]
"""A profile and its quality (the lower bound) for this workload."""


class Table:
    """For one V: the breaks in x = 1/B, and between them the candidates.

    They are the optimum, its neighbours on the envelope, the best of what is not on it, and the musts. So the runner-up
    is always there: it is one of the neighbours, or the best of what is not on the envelope.
    """

    __slots__ = ("breaks", "items")

    def __init__(self, envelope: Envelope, second: Envelope, menu: Sequence[Item], always: Sequence[int]) -> None:
        self.breaks = tuple(sorted({*envelope.breaks, *second.breaks}))
        self.items = tuple(
            tuple(menu[i] for i in dict.fromkeys((*_window(envelope, x), *_best(second, x), *always)))
            for x in (*self.breaks, inf)
        )


def _window(envelope: Envelope, x: float) -> tuple[int, ...]:
    """The optimum just below x and its neighbours."""
    place = envelope.position(x)
    return envelope.order[max(0, place - 1) : place + 2]


def _best(envelope: Envelope, x: float) -> tuple[int, ...]:
    return (envelope.best(x),) if envelope.order else ()


class Menu:
    """Feasible ``items``; those at ``always`` are offered at every bandwidth. ``rejected``: names with reasons."""

    __slots__ = ("_always", "_form", "explain", "items", "rejected", "tables")

    def __init__(
        self, items: Sequence[Item], rejected: Iterable[tuple[str, str]], always: Iterable[str], form: Form = SEQUENTIAL
    ) -> None:
        wanted = set(always)
        self.items = tuple(items)
        self.rejected = tuple(rejected)
        self._always = tuple(i for i, (priced, _) in enumerate(self.items) if priced.profile.name in wanted)
        self.tables: dict[int, Table] = {}
        self._form = form
        self.explain = Explainer(tuple(priced for priced, _ in self.items), form)

    def table(self, step: int) -> Table:
        """The table of the V whose ``log2`` is ``step / STEPS``; not yet kept."""
        nbytes = 2.0 ** (step / STEPS)
        costs = [priced.costs(nbytes) for priced, _ in self.items]
        envelope = self._form.envelope(costs, nbytes)
        rest = [i for i in range(len(costs)) if i not in envelope.order]
        second = self._form.envelope([costs[i] for i in rest], nbytes)
        return Table(envelope, Envelope(tuple(rest[i] for i in second.order), second.breaks), self.items, self._always)

    def near(self, nbytes: float, bandwidth: float) -> Sequence[Item]:
        """The optimum at this point, its neighbours on the envelope, and what is always offered."""
        step = round(log2(nbytes) * STEPS)
        table = self.tables.get(step)
        if table is None:
            table = self.tables.setdefault(step, self.table(step))
        return table.items[bisect_left(table.breaks, 1.0 / bandwidth)]


def price(
    items: Iterable[Item], nbytes: float, bandwidth: float, model_s: float, form: Form = SEQUENTIAL
) -> tuple[Candidate, ...]:
    """Exact estimates (eq. 1) at the live costs, fastest first; equal ones in the order of the menu."""
    raw_s = nbytes / bandwidth
    sequential = form.chunk_bytes is None
    candidates = []
    for priced, quality in items:
        name, cr, wire, encode_fixed, encode_each, decode_fixed, decode_each = priced.terms
        encode_s = encode_fixed + encode_each * nbytes
        decode_s = decode_fixed + decode_each * nbytes
        transfer_s = wire * raw_s
        stages_s = (
            encode_s + transfer_s + decode_s if sequential else form.seconds(encode_s, transfer_s, decode_s, nbytes)
        )
        candidates.append(Candidate(name, cr, model_s + stages_s, encode_s, transfer_s, decode_s, quality))
    candidates.sort(key=_latency)
    return tuple(candidates)
