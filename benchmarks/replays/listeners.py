"""Controllers that hear less than they could, to see what the rest is worth; and one that times its calls."""

from __future__ import annotations

from time import perf_counter_ns
from typing import Any

from kvserve_core.controller import Controller
from kvserve_core.policy import Decision, Outcome, ServiceContext


class NothingLearned(Controller):
    """Believes the library and the prior of the bandwidth, whatever comes."""

    def observe(self, decision: Decision, outcome: Outcome) -> None:
        """Nothing."""


class BandwidthOnly(Controller):
    """Learns the bandwidth, but neither speeds nor ratios: what the paper has without its bandit."""

    def observe(self, decision: Decision, outcome: Outcome) -> None:
        """Only the link's goodput."""
        self.links.observe(decision.context.link, outcome.wire_bytes, outcome.transfer_s)


class TotalsOnly(Controller):
    """Hears of a transfer how long it took in all, as from an engine that cannot tell its stages apart."""

    def observe(self, decision: Decision, outcome: Outcome) -> None:
        """The link's goodput, and one figure."""
        self.links.observe(outcome.link, outcome.wire_bytes, outcome.transfer_s)
        total_s = outcome.encode_s + outcome.transfer_s + outcome.decode_s
        whole = Outcome("", outcome.profile, outcome.raw_bytes, outcome.wire_bytes, total_s=total_s, link=outcome.link)
        super().observe(decision, whole)


class Timed(Controller):
    """Keeps how long every call took, in nanoseconds."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.spent: dict[str, list[int]] = {"choose": [], "observe": []}

    def choose(self, context: ServiceContext) -> Decision:
        began = perf_counter_ns()
        decision = super().choose(context)
        self.spent["choose"].append(perf_counter_ns() - began)
        return decision

    def observe(self, decision: Decision, outcome: Outcome) -> None:
        began = perf_counter_ns()
        super().observe(decision, outcome)
        self.spent["observe"].append(perf_counter_ns() - began)
