"""The event loop: decide when prefill begins, encode after it, share the link, decode, then report what it took.

There are three kinds of event. Decisions are known beforehand (prefill does not depend on them) and come from a sorted
column; joining a link and reporting wait in one heap; each link knows when its next transfer ends. A million requests
are some 4 million events, of which the controller's two calls cost more than the loop around them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf

from kvserve_core.controller import Controller
from kvserve_core.policy import Decision, Outcome, ServiceContext
from kvserve_core.simulate.arrivals import Requests
from kvserve_core.simulate.links import PrivateLink, SharedLink
from kvserve_core.simulate.scenario import Scenario
from kvserve_core.simulate.trace import Trace, constant
from kvserve_core.simulate.truth import Truth

AnyLink = SharedLink | PrivateLink
MAX_REASONS, MAX_REASON = 1000, 200
"""Reasons that are told apart in a run, and characters of one: a policy may name a figure in each."""
OTHERS = "others"


class Clock:
    """The time of the simulation, as the controller's clock."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Seconds since the simulation began."""
        return self.now


@dataclass(frozen=True, slots=True)
class Run:
    """One seed, played: columns in order of ``requests``. Seconds.

    profile: an index into ``truth.index``. reason: an index into ``reasons``. active: transfers on the link when this
    one had joined, itself included; 1 on a private link. transfer_s includes the link's overhead. policy_failures,
    refused_outcomes: the controller's counts in the end.
    """

    scenario: Scenario
    requests: Requests
    truth: Truth
    traces: Sequence[Trace]
    profile: array[int]
    reason: array[int]
    reasons: list[str]
    active: array[int]
    encode_s: array[float]
    transfer_s: array[float]
    decode_s: array[float]
    wire_bytes: array[float]
    policy_failures: int = 0
    refused_outcomes: int = 0


def blank(scenario: Scenario, requests: Requests, truth: Truth, traces: Sequence[Trace]) -> Run:
    """A run with room for every request."""
    whole, real = array("q", bytes(8 * len(requests))), array("d", bytes(8 * len(requests)))
    encode_s, transfer_s, decode_s, wire_bytes = (real[:] for _ in range(4))
    return Run(
        *(scenario, requests, truth, traces, whole[:], whole[:], [], whole[:]),
        *(encode_s, transfer_s, decode_s, wire_bytes),
    )


def play(run: Run, controller: Controller, clock: Clock) -> Run:
    """Play every request of ``run`` to its end; its columns are filled in place."""
    stage = _Stage(run, controller, clock)
    links, waiting, starts = stage.links, stage.waiting, run.requests.start
    deciding, total, reported = 0, len(starts), 0
    while reported < total:
        link = links[0] if len(links) == 1 else min(links, key=_next_end)
        wait_s = waiting[0][0] if waiting else inf
        start = starts[deciding] if deciding < total else inf
        if start <= wait_s and start <= link.next_s:
            stage.decide(deciding, start)
            deciding += 1
        elif wait_s <= link.next_s:
            now, number = heappop(waiting)
            if number >= 0:
                stage.join(number, now)
            else:
                stage.report(~number, now)
                reported += 1
        else:
            stage.arrived(link)
    return replace(run, policy_failures=controller.policy_failures, refused_outcomes=controller.refused_outcomes)


def _next_end(link: AnyLink) -> float:
    return link.next_s


class _Stage:
    """What happens at each event. ``waiting`` holds (time, i) for requests that join, (time, ~i) for reports."""

    __slots__ = (
        *("clock", "controller", "decisions", "links", "overheads", "per_token_s", "reasons", "run"),
        *("tenants", "waiting"),
    )

    def __init__(self, run: Run, controller: Controller, clock: Clock) -> None:
        self.run = run
        self.controller = controller
        self.clock = clock
        made = run.scenario.links
        self.links = [SharedLink(t) if m.shared else PrivateLink(t) for m, t in zip(made, run.traces, strict=True)]
        self.overheads = [link.overhead for link in made]
        places = {link.name: i for i, link in enumerate(made)}
        self.per_token_s = run.scenario.engine.decode_per_token
        self.tenants = [
            (t.workload, t.slo, t.slo_kind == "jct", t.min_quality, t.link, places[t.link])
            for t in run.scenario.tenants
        ]
        self.waiting: list[tuple[float, int]] = []
        self.decisions: dict[int, Decision] = {}
        self.reasons: dict[str, int] = {}

    def decide(self, i: int, now: float) -> None:
        """Choose a profile with what a scheduler knows, and find out what encoding will really take."""
        run = self.run
        requests, truth = run.requests, run.truth
        workload, slo, to_the_last, floor, link, _ = self.tenants[requests.tenant[i]]
        if slo is not None:
            # What is left of it: the wait is over, and tokens are to come; the first is in the TTFT too.
            tokens = requests.output_tokens[i] if to_the_last else 1
            slo = max(0.0, slo - (now - requests.arrival[i]) - self.per_token_s * tokens)
        nbytes = requests.nbytes[i]
        self.clock.now = now
        context = ServiceContext(
            nbytes=nbytes, workload=workload, slo_s=slo, min_quality=floor, model_s=requests.model_s[i], link=link
        )
        decision = self.controller.choose(context)
        self.decisions[i] = decision
        run.profile[i] = profile = truth.index[decision.profile]
        run.reason[i] = self._number(decision.reason)
        encode, decode = truth.factors(profile, now)
        encode_fixed, encode_each, decode_fixed, decode_each, wire = truth.costs[profile]
        encode_s = (encode_fixed + encode_each * nbytes) * encode * requests.encode_noise[i]
        run.encode_s[i] = encode_s
        run.decode_s[i] = (decode_fixed + decode_each * nbytes) * decode * requests.decode_noise[i]
        run.wire_bytes[i] = nbytes * wire * requests.ratio_noise[i]
        heappush(self.waiting, (now + requests.prefill_s[i] + encode_s, i))

    def join(self, i: int, now: float) -> None:
        """Encoding is done: the transfer begins."""
        link = self.links[self.tenants[self.run.requests.tenant[i]][5]]
        link.join(now, self.run.wire_bytes[i], i)
        self.run.active[i] = link.active or 1
        self.run.transfer_s[i] = now

    def arrived(self, link: AnyLink) -> None:
        """The last byte is there: ``transfer_s``, which held the start, becomes a duration."""
        now = link.next_s
        i = link.pop()
        run = self.run
        now += self.overheads[self.tenants[run.requests.tenant[i]][5]]
        run.transfer_s[i] = now - run.transfer_s[i]
        heappush(self.waiting, (now + run.decode_s[i], ~i))

    def report(self, i: int, now: float) -> None:
        """Decoding is done: the controller hears what it took, and nothing else."""
        self.clock.now = now
        run, decision = self.run, self.decisions.pop(i)
        wire, encode, transfer, decode = run.wire_bytes[i], run.encode_s[i], run.transfer_s[i], run.decode_s[i]
        nbytes, link = run.requests.nbytes[i], decision.context.link
        outcome = Outcome(
            "", decision.profile, nbytes, int(wire), encode, transfer, decode, transfer + decode, link=link
        )
        self.controller.observe(decision, outcome)

    def _number(self, reason: str) -> int:
        number = self.reasons.get(reason)
        return self._new(reason[:MAX_REASON]) if number is None else number

    def _new(self, reason: str) -> int:
        if len(self.reasons) >= MAX_REASONS:
            reason = OTHERS
        number = self.reasons.setdefault(reason, len(self.run.reasons))
        if number == len(self.run.reasons):
            self.run.reasons.append(reason)
        return number


def traces_of(scenario: Scenario, files: dict[str, dict[str, Trace]]) -> list[Trace]:
    """The trace of each link; ``files`` holds those of every CSV by its path."""
    return [
        constant(link.bandwidth) if link.trace is None else files[str(link.trace)][link.name] for link in scenario.links
    ]
