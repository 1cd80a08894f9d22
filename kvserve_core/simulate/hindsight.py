"""What every other profile would have cost: the choice of a clairvoyant, which knows true speeds and the link.

Each request is judged by itself, without noise, with the transfers beside it as many as when it joined. On a link
that is not shared this is exact; on a shared one it leaves out that a better choice would have helped the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvserve_core.feasible import Filter, Request
from kvserve_core.library import Profile
from kvserve_core.simulate.arrivals import Ints
from kvserve_core.simulate.engine import Run
from kvserve_core.simulate.trace import Floats, Trace


@dataclass(frozen=True)
class Hindsight:
    """Per request: seconds between the end of prefill and decoded KV of every profile ``[N, P]``, inf where it may
    not serve, and of the choice ``[N]``; ``before`` ``[N]``: seconds from arrival to the end of prefill, as expected.
    """

    all_s: Floats
    chosen_s: Floats
    before_s: Floats

    @property
    def best_s(self) -> Floats:
        """Of the clairvoyant choice."""
        return np.asarray(self.all_s.min(axis=1))

    def regret(self, model: bool = True) -> float:
        """By how much the choices took longer than clairvoyant ones, as a share of the latter's total.

        model: with the wait and the prefill in both totals, as in T_p of eq. 1; else of the KV's way alone.
        """
        base = self.before_s.sum() if model else 0.0
        return float((self.chosen_s.sum() + base) / (self.best_s.sum() + base) - 1.0)


def look_back(run: Run, profiles: tuple[Profile, ...], rules: Filter) -> Hindsight:
    """Judge every request of a run. ``rules``: a filter like that of the controller that played it."""
    requests = run.requests
    nbytes, start = (np.asarray(c, np.float64) for c in (requests.nbytes, requests.start))
    ready = start + np.asarray(requests.model_s)
    tenant, active = np.asarray(requests.tenant), np.asarray(run.active, np.float64)
    all_s = np.empty((len(requests), len(profiles)))
    for p, profile in enumerate(profiles):
        encode, decode = run.truth.stages(p, nbytes, start)
        wire = nbytes / profile.cr * active
        all_s[:, p] = encode + _transfers(run, tenant, ready + encode, wire) + decode
    chosen = np.take_along_axis(all_s, np.asarray(run.profile)[:, None], axis=1)[:, 0]
    for t, each in enumerate(run.scenario.tenants):
        request = Request(each.workload, each.min_quality, None, "transfer")
        refused = [p for p, profile in enumerate(profiles) if rules.refusal(profile, request)]
        all_s[np.ix_(tenant == t, refused)] = np.inf
    return Hindsight(all_s, chosen, ready - np.asarray(requests.arrival))


def _transfers(run: Run, tenant: Ints, joined: Floats, wire: Floats) -> Floats:
    """Seconds on the link for ``wire`` bytes each, already times the number of transfers that share it."""
    places = {link.name: i for i, link in enumerate(run.scenario.links)}
    link = np.array([places[t.link] for t in run.scenario.tenants])[tenant]
    spent = np.empty_like(wire)
    for i, (made, trace) in enumerate(zip(run.scenario.links, run.traces, strict=True)):
        mine = link == i
        spent[mine] = _alone(trace, joined[mine], wire[mine]) + made.overhead
    return spent


def _alone(trace: Trace, joined: Floats, wire: Floats) -> Floats:
    return np.asarray(trace.when_all(trace.carried_all(joined) + wire) - joined)
