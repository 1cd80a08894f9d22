"""How long ``choose`` and ``observe`` take with 50 profiles, against an empty loop over them.

Every context differs in V and B, so nothing is answered from a memory of the same question, and every report moves the
costs of its profile. The machine is not alone, so there are many short windows: the quietest one counts, and the middle
one is shown beside it. ``python benchmarks/decision.py [--json]``
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import sys
from collections.abc import Callable
from importlib.metadata import version
from itertools import cycle
from time import perf_counter_ns
from typing import Any

from kvserve_core.controller import Controller
from kvserve_core.latency import Speed
from kvserve_core.library import Profile, ProfileLibrary, QualityRecord
from kvserve_core.policy import Decision, Outcome, Policy, ServiceContext
from kvserve_core.profile import RAW_CHAIN, PipelineSpec
from kvserve_plugins.policies.analytic import Analytic
from kvserve_plugins.policies.bandit import Bandit

BAR = 20.0
PROFILES = 50
Call = Callable[[ServiceContext], object]


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


def timed(call: Call, requests: list[ServiceContext]) -> list[int]:
    """Nanoseconds of each call."""
    spent = []
    for request in requests:
        start = perf_counter_ns()
        call(request)
        spent.append(perf_counter_ns() - start)
    return spent


def percentiles(spent: list[int]) -> dict[str, int]:
    ranked = sorted(spent)
    return {"p50_ns": ranked[len(ranked) // 2], "p99_ns": ranked[len(ranked) * 99 // 100]}


Windows = list[dict[str, dict[str, int]]]
"""Percentiles of each call, in turn."""


def windows(calls: dict[str, Call], requests: list[ServiceContext], rounds: int) -> Windows:
    """Every call in turn, ``rounds`` times, beside an empty loop over the profiles: each round is a short window."""

    def empty_loop(_: ServiceContext) -> None:
        for _profile in _EVERY:
            pass

    every = {**calls, "empty_loop": empty_loop}
    gc.collect()
    gc.freeze()
    return [{name: percentiles(timed(call, requests)) for name, call in every.items()} for _ in range(rounds)]


_EVERY = tuple(range(PROFILES))


def ratio(found: Windows, call: str) -> tuple[float, float]:
    """p99 over that of the empty loop: of the quietest window, and of the middle one."""
    ranked = sorted(w[call]["p99_ns"] / w["empty_loop"]["p99_ns"] for w in found)
    return round(ranked[0], 2), round(ranked[len(ranked) // 2], 2)


def measure(policy: Policy, count: int, rounds: int) -> Windows:
    """``choose`` and, on another controller, the ``observe`` of what it chose, once all places have outcomes."""
    rng = random.Random(0)
    control, requests = Controller(library(rng), policy), contexts(rng, count)
    told = [_reported(control, request, rng) for request in requests]
    for decision, outcome in told:
        control.observe(decision, outcome)
    each = cycle(told)

    def observe(_: ServiceContext) -> None:
        control.observe(*next(each))

    return windows({"choose": control.choose, "observe": observe}, requests, rounds)


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--count", type=int, default=5_000)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    bars, timings = {}, {}
    for policy in (Analytic(Analytic.Config()), Bandit(Bandit.Config())):
        name = type(policy).__name__.lower()
        found = measure(policy, options.count, options.rounds)
        timings[name] = found
        for call in ("choose", "observe"):
            best, middle = ratio(found, call)
            bars[f"{call} of {name}, p99 over an empty loop over the profiles"] = {
                "value": best,
                "bar": BAR,
                "ok": best <= BAR,
                "middle window": middle,
            }
    report = {
        "benchmark": "decision",
        "machine": {"cpu": platform.processor() or platform.machine(), "system": platform.platform()},
        "versions": {"python": platform.python_version()} | {n: version(n) for n in ("numpy", "msgspec", "pydantic")},
        "profiles": PROFILES,
        "decisions": options.count * options.rounds,
        "quietest windows": {name: quietest(found) for name, found in timings.items()},
        "bars": bars,
        "ok": all(bar["ok"] for bar in bars.values()),
    }
    print(json.dumps(report, indent=2) if options.json else _text(report))
    return 0 if report["ok"] else 1


def quietest(found: Windows) -> dict[str, dict[str, int]]:
    """For each call the percentiles of the window in which its p99 was lowest."""
    return {call: min((w[call] for w in found), key=lambda each: each["p99_ns"]) for call in found[0]}


def _text(report: dict[str, Any]) -> str:
    rows = [f"{name}: {bar}" for name, bar in report["bars"].items()]
    return "\n".join([*rows, *(f"{name}: {each}" for name, each in report["quietest windows"].items())])


if __name__ == "__main__":
    sys.exit(main())
