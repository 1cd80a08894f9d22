"""One decision per request, and one report of it to the controller, however many prefill ranks take part."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf

from kvserve_core.deployment import Deployment
from kvserve_core.pipeline import Pipeline
from kvserve_core.policy import Decision, Outcome, ServiceContext, joined
from kvserve_core.requests import RequestOptions
from kvserve_sglang.messages import Decided, Register

REMEMBERED = 4096
"""Decisions that wait for their reports."""


class Judge:
    """The first prefill rank's: asks the controller, joins the ranks' outcomes, and lets the controller learn."""

    def __init__(self, deployment: Deployment, pipelines: Mapping[str, Pipeline]) -> None:
        self._deployment, self._pipelines = deployment, pipelines
        self._open: OrderedDict[str, tuple[Decision, int, dict[int, Outcome]]] = OrderedDict()

    def decide(
        self,
        room: int,
        tokens: int,
        asked: Sequence[Register],
        options: RequestOptions,
        *,
        ranks: int,
        elapsed_s: float,
        to_prefill: int,
        active: int,
    ) -> tuple[Decided, Decision]:
        """For a request of ``tokens`` that those who ``asked`` will fetch.

        ranks: prefill ranks that will report. to_prefill: tokens whose prefill is still to come, the rest is in
        ``elapsed_s``. active: transfers on the link now.
        """
        link = asked[0].peer.link
        context = self._deployment.context(
            tokens, options, link=link, elapsed_s=elapsed_s, active=active, acceptable=self._acceptable(asked)
        )
        decision = self._deployment.controller.choose(replace(context, tokens=to_prefill or None))
        transfer_id = f"{room:x}-{secrets.token_hex(6)}"
        self._open[transfer_id] = (decision, ranks, {})
        while len(self._open) > REMEMBERED:
            self._open.popitem(last=False)
        return Decided(room, transfer_id, decision.profile, decision.reason, link), decision

    def _acceptable(self, asked: Sequence[Register]) -> frozenset[str]:
        """The profiles that every one of them can take."""
        readable = [self._deployment.acceptable(self._pipelines, register.peer) for register in asked]
        every = frozenset.intersection(*readable)
        if not any(register.exact for register in asked):
            return every
        return frozenset(name for name in every if self._pipelines[name].lossless)

    def report(self, rank: int, outcome: Outcome) -> tuple[Decision, Outcome] | None:
        """One rank's part; the decision and the whole once all have reported."""
        waiting = self._open.get(outcome.transfer_id)
        if waiting is None:
            return None
        decision, ranks, parts = waiting
        parts[rank] = outcome
        if len(parts) < ranks:
            return None
        del self._open[outcome.transfer_id]
        whole = joined(list(parts.values()))
        self._deployment.controller.observe(decision, whole)
        return decision, whole

    def forget(self, transfer_id: str) -> None:
        """It ended without reports."""
        self._open.pop(transfer_id, None)


def as_decision(decided: Decided, profile: str) -> Decision:
    """What a rank opens its part with; ``raw`` where it cannot serve the profile that was decided."""
    reason = decided.reason if profile == decided.profile else "fallback"
    return Decision(profile, reason, ServiceContext(nbytes=0, link=decided.link), inf)
