"""The bandit on the reference's own example, and what it costs: time of a decision, bytes of what it remembers."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from time import perf_counter_ns
from typing import Any

from decision import contexts, library

from kvserve_core.controller import Controller
from kvserve_core.policy import Decision, Outcome, ServiceContext
from kvserve_plugins.policies.bandit import Bandit
from replays.bars import Result
from replays.reference import WORKLOAD, as_they_price, short

RETURN = 20
RATIO = 20.0
STATE_BYTES = 2**20
MODEL_S = 0.005
EXAMPLE = ServiceContext(56_000_000, WORKLOAD, 25 * 1.25e8, slo_s=0.2, min_quality=0.97, model_s=MODEL_S)


def _in_all(decision: Decision, times: float = 1.0) -> Outcome:
    """All that the reference's controller hears of a transfer is one figure."""
    chosen = next(c for c in decision.candidates if c.profile == decision.profile)
    wire = round(decision.context.nbytes / chosen.cr)
    total_s = times * (chosen.latency_s - decision.context.model_s)
    return Outcome("t", decision.profile, decision.context.nbytes, wire, total_s=total_s)


def b3(seeds: int = 20) -> Result:
    """One observation of four times the estimate moves c12 to c13; then it comes back, at the latest after so many."""
    moved, back = set(), []
    for seed in range(seeds):
        control = Controller(as_they_price(1024), Bandit(Bandit.Config(seed=seed)), clock=lambda: 0.0)
        decision = control.choose(EXAMPLE)
        while short(decision.profile) != "c12":  # a first decision may explore
            decision = control.choose(EXAMPLE)
        control.observe(decision, _in_all(decision, 4.0))
        names = []
        for _ in range(2 * RETURN):
            decision = control.choose(EXAMPLE)
            names.append((short(decision.profile), decision.reason == "explore"))
            control.observe(decision, _in_all(decision))
        moved.add(next(name for name, explored in names if not explored))
        back.append(1 + next((i for i, n in enumerate(names) if n == ("c12", False)), 10 * RETURN))
    value = {"moves to": sorted(moved), "back after": max(back)}
    bar = {"moves to": ["c13"], "back after": RETURN}
    return Result(value, bar, moved == {"c13"} and max(back) <= RETURN, {"of each seed": back})


def decision(requests: int = 20_000, rounds: int = 5) -> Result:
    """p99 of ``choose`` over 50 profiles once every place has outcomes, over that of an empty loop over them."""
    control, contexts = _learned(requests)
    profiles = control.profiles
    spent: dict[str, list[int]] = {"choose": [], "empty loop": []}
    for _ in range(rounds):  # in turn, so that a slow moment of the machine meets both
        for context in contexts:
            began = perf_counter_ns()
            control.choose(context)
            spent["choose"].append(perf_counter_ns() - began)
        for _context in contexts:
            began = perf_counter_ns()
            for _profile in profiles:
                pass
            spent["empty loop"].append(perf_counter_ns() - began)
    p99 = {name: sorted(each)[len(each) * 99 // 100] for name, each in spent.items()}
    ratio = round(p99["choose"] / p99["empty loop"], 1)
    return Result(ratio, RATIO, ratio <= RATIO, {"p99 ns": p99})


def _learned(requests: int) -> tuple[Controller, list[ServiceContext]]:
    rng = random.Random(0)
    control, asked = Controller(library(rng), Bandit(Bandit.Config())), contexts(rng, requests)
    for context in asked:
        made = control.choose(context)
        control.observe(made, _in_all(made, rng.uniform(0.9, 1.1)))
    return control, asked


def state(requests: int = 1_000_000) -> Result:
    """Bytes of all that the policy remembers after so many requests of 20 workloads at all sizes and bandwidths."""
    rng = random.Random(0)
    policy = Bandit(Bandit.Config())
    control = Controller(library(rng), policy)
    asked = contexts(rng, 10_000)
    for i in range(requests):
        made = control.choose(replace(asked[i % len(asked)], workload=f"w{rng.randrange(20)}"))
        control.observe(made, _in_all(made, rng.uniform(0.9, 1.1)))
    found = size(policy.memory, set())
    return Result(found, STATE_BYTES, found <= STATE_BYTES, {"arms": len(policy.memory)})


def size(thing: Any, seen: set[int]) -> int:
    """Bytes of an object and all that it holds."""
    if id(thing) in seen or isinstance(thing, type):
        return 0
    seen.add(id(thing))
    inner: list[Any] = []
    if isinstance(thing, dict):
        inner = [*thing.keys(), *thing.values()]
    elif isinstance(thing, (list, tuple, set, frozenset)):
        inner = list(thing)
    inner += [getattr(thing, name) for name in getattr(type(thing), "__slots__", ()) if hasattr(thing, name)]
    inner += list(getattr(thing, "__dict__", {}).values())
    return sys.getsizeof(thing) + sum(size(each, seen) for each in inner)
