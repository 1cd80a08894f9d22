"""The bandit on the reference's own example, what its tries cost others, and the bytes of what it remembers."""

from __future__ import annotations

import random
import sys
from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
from decision import contexts, library

from kvserve_core.controller import Controller
from kvserve_core.policy import Decision, Outcome, ServiceContext
from kvserve_core.simulate.engine import Run
from kvserve_core.simulate.run import play_seed
from kvserve_core.simulate.trace import Floats
from kvserve_plugins.policies.bandit import Bandit
from replays.bars import Result
from replays.online import regret_world, steps, walk
from replays.reference import WORKLOAD, as_they_price, short

RETURN = 20
SLOS_S = (0.25, 0.3, 0.5, 1.0, 2.0)
"""From one that half of the requests miss whatever is chosen, to one that hardly any does."""
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


def exploration(count: int = 10_000, seeds: int = 3) -> Result:
    """Requests that missed their SLO though some profile met it, and were a try."""
    found = Counter[str]()
    for make, slo_s, seed in product((steps, walk), SLOS_S, range(seeds)):
        world = regret_world(make(seed, count), count, slo_s)
        run, hindsight = play_seed(world, Bandit(Bandit.Config(seed=seed)), seed)
        tried = np.isin(run.reason, [i for i, said in enumerate(run.reasons) if said.startswith("explore")])
        left_s = slo_s - world.scenario.engine.decode_per_token  # the TTFT includes the first token
        late = hindsight.before_s + _moved(run) > left_s
        safe = hindsight.before_s + hindsight.best_s <= left_s
        found["tries"] += int(tried.sum())
        found["of them late"] += int((tried & late).sum())
        found["late requests"] += int(late.sum())
        found["late by a try"] += int((tried & late & safe).sum())
    return Result(found["late by a try"], 0, found["late by a try"] == 0, dict(found))


def _moved(run: Run) -> Floats:
    return np.asarray(run.encode_s) + np.asarray(run.transfer_s) + np.asarray(run.decode_s)


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
