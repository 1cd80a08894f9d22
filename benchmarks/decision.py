"""How long ``choose`` and ``observe`` take with 50 profiles, against an empty loop over them.

Requests are as adapters make them: with tokens and the time that has passed, over links whose bandwidth is learned; and
for comparison with a bandwidth and T_model that are given. Each differs in V, so nothing is answered from a memory of
the same question; before each choice its link is reported on, untimed, and every report moves the costs of its profile.
The machine is not alone, so there are many short windows. Of each call the quietest one counts, and of the empty loop
too, each for itself: a disturbed empty loop must not make a ratio small.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter_ns
from typing import Any

from kvserve_core.controller import Controller
from kvserve_core.latency import Speed
from kvserve_core.library import Profile, ProfileLibrary, QualityRecord
from kvserve_core.policy import Decision, Outcome, Policy, ServiceContext
from kvserve_core.profile import RAW_CHAIN, PipelineSpec

BAR = 20.0
PROFILES = 50
BYTES_PER_TOKEN = 57344
LOOP, CHOOSE, GIVEN, OBSERVE = "empty loop", "choose", "choose, bandwidth given", "observe"


def library(rng: random.Random) -> ProfileLibrary:
    """48 profiles, most of them on the envelope somewhere; raw and lossless make 50."""
    record = QualityRecord(value=1.0, lower=0.995, upper=1.0, metric="none", samples=1)
    profiles = []
    for i in range(PROFILES - 2):
        cr = 1.2 + 0.25 * i
        encode = Speed.of(40e9 / cr**1.5 * rng.uniform(0.8, 1.2), rng.uniform(1e-4, 1e-3))
        decode = Speed.of(60e9 / cr**1.5, 2e-4)
        pipeline = PipelineSpec(planes={"*": RAW_CHAIN})
        quality = {"default": record}
        profiles.append(Profile(name=f"p{i}", pipeline=pipeline, cr=cr, encode=encode, decode=decode, quality=quality))
    return ProfileLibrary(model_id="m", fingerprint="f", device="none", created="", profiles=tuple(profiles))


def contexts(rng: random.Random, count: int) -> list[ServiceContext]:
    """1 MB to 10 GB over 80 Mbps to 250 Gbps, log-uniform; a link for every factor of 1.8."""
    drawn = [(int(10 ** rng.uniform(6, 10)), rng.uniform(7, 10.5)) for _ in range(count)]
    return [
        ServiceContext(nbytes=nbytes, bandwidth=10**power, slo_s=1.0, link=f"{round(4 * power)}")
        for nbytes, power in drawn
    ]


def as_adapters_ask(request: ServiceContext) -> ServiceContext:
    """The same size over the same link: T_model and B are for the controller to know."""
    return replace(request, bandwidth=None, tokens=request.nbytes // BYTES_PER_TOKEN, elapsed_s=0.01)


def percentiles(spent: list[int]) -> dict[str, int]:
    ranked = sorted(spent)
    return {"p50_ns": ranked[len(ranked) // 2], "p99_ns": ranked[len(ranked) * 99 // 100]}


@dataclass(frozen=True)
class Timed:
    """What is timed, what it is called with, one after another, and what is done before each call, untimed."""

    call: Callable[..., object]
    given: Sequence[tuple[Any, ...]]
    before: Callable[..., object] | None = None

    def nanoseconds(self) -> list[int]:
        """Of each call."""
        call, before, spent = self.call, self.before, []
        for arguments in self.given:
            if before:
                before(*arguments)
            start = perf_counter_ns()
            call(*arguments)
            spent.append(perf_counter_ns() - start)
        return spent


Windows = list[dict[str, dict[str, int]]]
"""Percentiles of each call, in turn."""


def windows(calls: Mapping[str, Timed], rounds: int) -> Windows:
    """Every call in turn, ``rounds`` times: each round is a short window."""
    gc.collect()
    gc.freeze()
    return [{name: percentiles(each.nanoseconds()) for name, each in calls.items()} for _ in range(rounds)]


_EVERY = tuple(range(PROFILES))


def _empty_loop(_: ServiceContext) -> None:
    for _profile in _EVERY:
        pass


def quietest(found: Windows) -> dict[str, dict[str, int]]:
    """For each call the percentiles of the window in which its p99 was lowest."""
    return {call: min((w[call] for w in found), key=lambda each: each["p99_ns"]) for call in found[0]}


def ratio(found: Windows, call: str) -> float:
    """p99 over that of the empty loop, each in its own quietest window."""
    best = quietest(found)
    return round(best[call]["p99_ns"] / best[LOOP]["p99_ns"], 2)


def middle(found: Windows, call: str) -> float:
    """The median over the windows of that ratio within each."""
    return round(median(w[call]["p99_ns"] / w[LOOP]["p99_ns"] for w in found), 2)


def measure(policy: Policy, count: int, rounds: int) -> Windows:
    """Of a controller whose links, profiles and places all have outcomes."""
    rng = random.Random(0)
    control, given = Controller(library(rng), policy), contexts(rng, count)
    for request in given:
        control.observe(*_reported(control, request, rng))
    control.observe_prefill(1000, 0.05, queue_s=0.01)
    asked = [as_adapters_ask(request) for request in given]
    told = [_reported(control, request, rng) for request in asked]
    links = control.links

    def report(request: ServiceContext) -> None:
        links.observe(request.link, request.nbytes, request.nbytes / links.estimate(request.link))

    calls = {
        CHOOSE: Timed(control.choose, [(request,) for request in asked], report),
        GIVEN: Timed(control.choose, [(request,) for request in given]),
        OBSERVE: Timed(control.observe, told),
        LOOP: Timed(_empty_loop, [(request,) for request in given]),
    }
    return windows(calls, rounds)


def _reported(control: Controller, request: ServiceContext, rng: random.Random) -> tuple[Decision, Outcome]:
    """A decision, and a report that is up to 10 % off what was expected."""
    decision = control.choose(request)
    chosen = next(c for c in decision.candidates if c.profile == decision.profile)
    encode_s, transfer_s, decode_s = (
        seconds * rng.uniform(0.9, 1.1) for seconds in (chosen.encode_s, chosen.transfer_s, chosen.decode_s)
    )
    wire = round(request.nbytes / chosen.cr)
    spent = (encode_s, transfer_s, decode_s)
    return decision, Outcome("t", decision.profile, request.nbytes, wire, *spent, link=request.link)
