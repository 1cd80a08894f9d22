"""Decisions that wait for the outcomes of all ranks, and what is learned when these have come."""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, field

from kvserve_core.deployment import Deployment
from kvserve_core.latency import critical_bandwidth
from kvserve_core.policy import Decision, Outcome, joined
from kvserve_vllm.scheduler.refusals import Refusals, not_decodable
from kvserve_vllm.stats import StatsBuffer

log = logging.getLogger(__name__)
MAX_UNSETTLED = 4096
"""Decisions kept until their outcomes come; the oldest give way."""


@dataclass
class Unsettled:
    """A decision and the outcomes of the ranks so far. named: whether it was made for a consumer known by name."""

    decision: Decision
    named: bool
    outcomes: list[Outcome] = field(default_factory=list)


class Settling:
    """By transfer id. ranks: how many outcomes a transfer has."""

    def __init__(self, deployment: Deployment, stats: StatsBuffer) -> None:
        self._deployment, self._stats = deployment, stats
        self._open: OrderedDict[str, Unsettled] = OrderedDict()
        self.refusals = Refusals()
        self.ranks = 1

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, transfer_id: str) -> bool:
        return transfer_id in self._open

    def add(self, transfer_id: str, decision: Decision, named: bool) -> None:
        """A transfer was opened."""
        self._open[transfer_id] = Unsettled(decision, named)
        if len(self._open) > MAX_UNSETTLED:
            self._open.popitem(last=False)

    def ended(self, outcome: Outcome) -> None:
        """On one rank: the controller sees a transfer once, when all ranks have told theirs."""
        unsettled = self._open.get(outcome.transfer_id)
        if unsettled is None:
            return
        unsettled.outcomes.append(outcome)
        self._learn_refusal(unsettled, outcome.reason)
        if len(unsettled.outcomes) == self.ranks:
            del self._open[outcome.transfer_id]
            self._settle(unsettled.decision, joined(unsettled.outcomes))

    def failed(self, transfer_id: str, reason: str) -> bool:
        """On some rank, and so as a whole; whether that is news."""
        unsettled = self._open.pop(transfer_id, None)
        if unsettled is None:
            return False
        log.info("transfer %r was not delivered: %s", transfer_id, reason)
        self._stats.add("transfers", 1, "producer", "false")
        self._learn_refusal(unsettled, reason)
        return True

    def _learn_refusal(self, unsettled: Unsettled, reason: str) -> None:
        """With ``peers.accept = "any"`` unknown consumers are sent whatever they may make of it."""
        if not unsettled.named and self._deployment.settings.peers.accept == "portable" and not_decodable(reason):
            self.refusals.add(unsettled.decision.profile, reason)

    def _settle(self, decision: Decision, outcome: Outcome) -> None:
        controller = self._deployment.controller
        controller.observe(decision, outcome)
        self._stats.transferred(outcome, "producer")
        self._stats.add("encode_seconds", outcome.encode_s)
        slo_s = decision.context.slo_s
        if slo_s is not None and decision.context.model_s + outcome.encode_s + outcome.total_s > slo_s:
            self._stats.add("slo_misses", 1)
        goodput = controller.links.estimate(decision.context.link)
        self._stats.add("goodput_bytes_per_second", goodput, decision.context.link)
        nbytes = decision.context.nbytes
        for priced in controller.feasible(decision.context):
            if priced.profile.name == outcome.profile:
                encode_s, decode_s, wire_bytes = priced.costs(nbytes)
                pays_below = critical_bandwidth(nbytes / wire_bytes, nbytes / max(encode_s + decode_s, 1e-9))
                self._stats.add("break_even_bytes_per_second", pays_below, outcome.profile)
