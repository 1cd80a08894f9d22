"""How long ``Controller.choose`` takes over 50 profiles, against an empty loop over them and against an empty call.

Every context differs in V and B, so nothing is answered from a memory of the same question; building the tables is
part of what is timed. ``python benchmarks/decision.py [--json]``
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
from collections.abc import Callable
from importlib.metadata import version
from time import perf_counter_ns

from kvserve_core.controller import Controller
from kvserve_core.latency import Speed
from kvserve_core.library import Profile, ProfileLibrary, QualityRecord
from kvserve_core.policy import Outcome, ServiceContext
from kvserve_core.profile import RAW_CHAIN, PipelineSpec
from kvserve_plugins.policies.analytic import Analytic

BAR = 20.0
PROFILES = 50


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
    """1 MB to 10 GB over 80 Mbps to 250 Gbps, log-uniform."""
    return [
        ServiceContext(nbytes=int(10 ** rng.uniform(6, 10)), bandwidth=10 ** rng.uniform(7, 10.5), slo_s=1.0)
        for _ in range(count)
    ]


def timed(call: Callable[[ServiceContext], object], requests: list[ServiceContext]) -> list[int]:
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


def measure(count: int, rounds: int) -> dict[str, dict[str, int]]:
    rng = random.Random(0)
    made = library(rng)
    control, learner = (Controller(made, Analytic(Analytic.Config())) for _ in range(2))
    profiles, requests = control.profiles, contexts(rng, count)
    decision = control.choose(requests[0])
    outcome = Outcome("t", "p9", 10**8, 3 * 10**7, 0.01, 0.1, 0.01)

    def empty_loop(_: ServiceContext) -> None:
        for _profile in profiles:
            pass

    def empty_call(_: ServiceContext) -> None:
        return None

    def observe(_: ServiceContext) -> None:
        learner.observe(decision, outcome)

    calls = {"choose": control.choose, "empty_loop": empty_loop, "empty_call": empty_call, "observe": observe}
    spent: dict[str, list[int]] = {name: [] for name in calls}
    for _ in range(rounds):  # in turn, so that a slow moment of the machine meets all of them
        for name, call in calls.items():
            spent[name] += timed(call, requests)
    return {name: percentiles(each) for name, each in spent.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    found = measure(options.count, options.rounds)
    p99 = {name: each["p99_ns"] for name, each in found.items()}
    ratio = p99["choose"] / p99["empty_loop"]
    report = {
        "benchmark": "decision",
        "machine": {"cpu": platform.processor() or platform.machine(), "system": platform.platform()},
        "versions": {"python": platform.python_version()} | {n: version(n) for n in ("msgspec", "pydantic")},
        "profiles": PROFILES,
        "decisions": options.count * options.rounds,
        "timings": found,
        "ratio_to_empty_call": round(p99["choose"] / p99["empty_call"], 2),
        "bars": {
            "p99 over an empty loop over the profiles": {"value": round(ratio, 2), "bar": BAR, "ok": ratio <= BAR}
        },
        "ok": ratio <= BAR,
    }
    print(json.dumps(report, indent=2) if options.json else _text(report, found))
    return 0 if report["ok"] else 1


def _text(report: dict[str, object], found: dict[str, dict[str, int]]) -> str:
    rows = [f"{name:12} p50 {t['p50_ns']:6} ns  p99 {t['p99_ns']:6} ns" for name, t in found.items()]
    return "\n".join([*rows, f"bars {report['bars']}", f"over an empty call {report['ratio_to_empty_call']}x"])


if __name__ == "__main__":
    sys.exit(main())
