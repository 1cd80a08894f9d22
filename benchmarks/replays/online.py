"""The simulator on the published bandwidth trace (fig. 16, right), and against a clairvoyant (regret)."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.random import default_rng

from kvserve_core.component import ComponentSpec
from kvserve_core.controller import Controller
from kvserve_core.policy import Policy
from kvserve_core.registry import default_registry
from kvserve_core.settings import POLICY
from kvserve_core.simulate.engine import Run
from kvserve_core.simulate.hindsight import Hindsight
from kvserve_core.simulate.run import World, play_seed
from kvserve_core.simulate.scenario import Engine, Link, Scenario, Speeds, Tenant, Tokens
from kvserve_core.simulate.summary import latencies
from kvserve_core.simulate.trace import Floats, Trace
from replays.bars import Result
from replays.listeners import BandwidthOnly, NothingLearned, Timed, TotalsOnly
from replays.reference import WORKLOAD, in_true_units, text

FIXED = "c15"
"""What "without a controller" always uses. By the published latencies it sends 2.4 times the bytes that the full system
does, as this profile (cr 3.75) does against the best ratio in the library (8.83)."""
SEEDS = 20
MANY_SEEDS = 100
"""Where two ways differ by less than the p99 of 20 seeds does from the next 20."""
DROP_S = (20.0, 40.0)
SPIKE = 1.1
"""Mean latency in one step of the trace, over that of a clairvoyant."""
FAST = 10.0
"""Times the published bandwidth from which it is the bandwidth that decides which profile is best."""
CHOICE_GBPS = 20.0
"""Below it, in the reference library, what sends least is nearly always best, whoever knows or not."""
STEP_S = 60 / 99
"""Between two points of the figure."""


SPECS = {
    "analytic": POLICY,
    "eq. 1": ComponentSpec(name="analytic", configuration={"min_gain": 0.0}),
    "bandit": ComponentSpec(name="bandit"),
    "no controller": ComponentSpec(name="static", configuration={"profile": FIXED}),
}
"""``analytic`` is as adapters have it by default; without its ``min_gain`` it is eq. 1 to the letter, as the bandit is
without its residuals."""


def policy(name: str) -> Policy:
    made: Policy = default_registry().create("policy", SPECS[name])
    return made


def fig16_world(times: float = 1.0) -> World:
    """64 Ki tokens (3.7 GB) every 0.06 s over the published minute, each with the bandwidth of the trace to itself.

    True speeds are off by e^0.5 (sigma), as on another machine, drift by 30 % and are noisy by 10 %; T_model is 80 ms.
    times: a multiple of the published bandwidth.
    """
    rows = list(csv.DictReader(io.StringIO(text("online_selection_trace.csv"))))
    rates = [times * float(r["bandwidth_gbps"]) * 1e9 / 8 for r in rows]
    trace = Trace([float(r["time_s"]) for r in rows], rates)
    scenario = Scenario(
        requests=1000,
        every=0.06,
        min_quality=0.97,
        links=(Link(shared=False),),
        tenants=(Tenant(workload=WORKLOAD, tokens=Tokens(median=65536, sigma=0), output_tokens=1),),
        speeds=Speeds(bias=0.5, drift=0.3, drift_period=30.0),
        engine=Engine(prefill_fixed=0.08, prefill_per_token=0, prefill_workers=0, decode_per_token=0),
    )
    return World(scenario, in_true_units(32768), (trace,))


Played = list[tuple[Run, Hindsight]]
WAYS: dict[str, tuple[str, type[Controller]]] = {
    **{name: (name, Controller) for name in SPECS},
    "bandwidth only": ("eq. 1", BandwidthOnly),
    "nothing learned": ("eq. 1", NothingLearned),
}


@cache
def _played(way: str, times: float, seeds: int = SEEDS) -> Played:
    name, kind = WAYS[way]
    world = fig16_world(times)
    return [play_seed(world, policy(name), seed, kind) for seed in range(seeds)]


def fig16(full: str) -> dict[str, Result]:
    """Full < bandwidth only < no controller, in mean and in p99; and no spike while the bandwidth falls.

    full: the policy of a controller that learns all it can. At the published bandwidths the best profile by the library
    is always the same, so that a controller that learns the bandwidth alone chooses it for every request.
    """
    bars = _in_order("fig. 16", (full, "bandwidth only", "no controller"))
    spike = _spike(_played(full, 1.0))
    bars[f"fig. 16 no spike of {full} at {DROP_S[0]:.0f} to {DROP_S[1]:.0f} s"] = Result(
        round(spike, 4), SPIKE, spike <= SPIKE
    )
    return bars


def fig16_without_bandit() -> dict[str, Result]:
    """The figure's words to the letter: the same controller with its bandit, without it, and none."""
    return _in_order("fig. 16 to the letter,", ("bandit", "eq. 1", "no controller"), seeds=MANY_SEEDS)


def fig16_fast(full: str) -> dict[str, Result]:
    """The same minute with so much bandwidth that it decides which profile is best."""
    return _in_order(f"fig. 16, bandwidth x{FAST:g},", (full, "bandwidth only", "no controller"), FAST)


def _in_order(title: str, ways: tuple[str, ...], times: float = 1.0, seeds: int = SEEDS) -> dict[str, Result]:
    """Each way in this world, and whether every one is better than the next, in mean and in p99."""
    shown = {way: _shown(_played(way, times, seeds)) for way in (*ways, "nothing learned")}
    detail = {"simulated": shown, "published": _published()} if times == 1.0 else {"simulated": shown}
    found = {}
    for key in ("mean_s", "p99_s"):
        values = [shown[way][key] for way in ways]
        ok = all(a < b for a, b in pairwise(values))
        found[f"{title} {key} of {ways[0]} in order"] = Result(values, " < ".join(ways), ok, detail)
    return found


def _shown(runs: Played) -> dict[str, Any]:
    spent = np.concatenate([latencies(run)[0] for run, _ in runs])
    names = list(runs[0][0].truth.index)
    chosen = Counter(names[i] for run, _ in runs for i in run.profile)
    mean_s, p99_s = round(float(spent.mean()), 4), round(float(np.percentile(spent, 99)), 4)
    parts = [round(float(np.percentile(part, 99)), 4) for part in np.split(spent, len(runs) // SEEDS)]
    found = {"mean_s": mean_s, "p99_s": p99_s, f"p99_s of each {SEEDS} seeds": parts}
    return found | {"chosen": dict(chosen.most_common())}


def _published() -> dict[str, dict[str, float]]:
    rows = list(csv.DictReader(io.StringIO(text("online_selection_trace.csv"))))
    names = {"full": "latency1_s", "without bandit": "latency2_s", "without controller": "latency3_s"}
    found = {name: np.array([float(r[column]) for r in rows]) for name, column in names.items()}
    return {
        n: {"mean_s": round(float(v.mean()), 4), "p99_s": round(float(np.percentile(v, 99)), 4)}
        for n, v in found.items()
    }


def _spike(runs: Played) -> float:
    """The worst step of the drop: mean over seeds and requests of latency, over the clairvoyant's."""
    arrival = np.asarray(runs[0][0].requests.arrival)
    inside = (arrival >= DROP_S[0]) & (arrival < DROP_S[1])
    place = ((arrival[inside] - DROP_S[0]) / STEP_S).astype(int)
    chosen, best = (np.bincount(place, _mean(runs, inside, name)) for name in ("chosen_s", "best_s"))
    kept = best > 0
    return float((chosen[kept] / best[kept]).max())


def _mean(runs: Played, inside: np.ndarray, name: str) -> Floats:
    return np.asarray(np.mean([(getattr(h, name) + h.before_s)[inside] for _, h in runs], axis=0))


def steps(seed: int, count: int, low: float = 1.0) -> Trace:
    """A new bandwidth of ``low`` to 200 Gbps (log-uniform) every 100 s."""
    rng = default_rng([seed, 1])
    rates = 10 ** rng.uniform(np.log10(low), np.log10(200), count // 100) * 1e9 / 8
    return Trace([100.0 * i for i in range(len(rates))], rates.tolist())


def walk(seed: int, count: int, low: float = 1.0) -> Trace:
    """A random walk of log B in steps of 5 % a second, reflected at ``low`` and at 200 Gbps."""
    rng = default_rng([seed, 2])
    top = float(np.log(200 / low))
    free = np.mod(np.log(20 / low) + np.cumsum(0.05 * rng.standard_normal(count)), 2 * top)
    return Trace(list(range(count)), (low * np.exp(np.minimum(free, 2 * top - free)) * 1e9 / 8).tolist())


def fast_steps(seed: int, count: int) -> Trace:
    """Steps where the bandwidth decides which profile is best."""
    return steps(seed, count, CHOICE_GBPS)


def fast_walk(seed: int, count: int) -> Trace:
    """A walk within the same."""
    return walk(seed, count, CHOICE_GBPS)


def regret_world(trace: Trace, count: int, slo_s: float | None = None) -> World:
    """One request a second, alone on its link: about 4096 tokens, 30 % drift, 10 % noise."""
    scenario = Scenario(
        requests=count,
        every=1.0,
        min_quality=0.97,
        links=(Link(shared=False),),
        tenants=(Tenant(workload=WORKLOAD, slo=slo_s, tokens=Tokens(median=4096, sigma=0.8)),),
        speeds=Speeds(drift=0.3, noise=0.1),
        engine=Engine(prefill_workers=0),
    )
    return World(scenario, in_true_units(), (trace,))


def regret(name: str, make: Callable[[int, int], Trace], count: int = 10_000, seeds: int = 3) -> dict[str, Any]:
    """Mean regret over seeds: of T_p (eq. 1, T_model included) and of the KV's way alone.

    And what a controller that learns nothing has: where that is no more, the world does not tell.
    """
    found = [play_seed(regret_world(make(seed, count), count), policy(name), seed)[1] for seed in range(seeds)]
    unlearned = [_unlearned(make, seed, count) for seed in range(seeds)]
    return {
        "of T_p": round(float(np.mean([h.regret() for h in found])), 5),
        "of the KV alone": round(float(np.mean([h.regret(model=False) for h in found])), 5),
        "of the KV alone, nothing learned": round(float(np.mean(unlearned)), 5),
    }


@cache
def _unlearned(make: Callable[[int, int], Trace], seed: int, count: int) -> float:
    world = regret_world(make(seed, count), count)
    return play_seed(world, policy("eq. 1"), seed, NothingLearned)[1].regret(model=False)


def totals_only() -> Result:
    """Where the bandit pays: the world of fig. 16 without stages in the reports. Regret of the KV's way alone."""
    world, found = fig16_world(), {}
    for name in ("bandit", "eq. 1"):
        each = [play_seed(world, policy(name), seed, TotalsOnly)[1].regret(model=False) for seed in range(SEEDS)]
        found[name] = np.array(each)
    mean = {name: round(float(each.mean()), 4) for name, each in found.items()}
    detail = {
        "worst seed": {name: round(float(each.max()), 4) for name, each in found.items()},
        "seeds in which the bandit's is lower": [int((found["bandit"] < found["eq. 1"]).sum()), SEEDS],
    }
    return Result(mean, "bandit < eq. 1", mean["bandit"] < mean["eq. 1"], detail)


def in_loop(name: str, count: int = 10_000, rounds: int = 5) -> dict[str, dict[str, Any]]:
    """Microseconds of choose and observe inside a simulation: of the median of some rounds, and all their p99."""
    kept: list[Timed] = []

    class Kept(Timed):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            kept.append(self)

    for _ in range(rounds):
        play_seed(regret_world(walk(0, count), count), policy(name), 0, Kept)
    return {call: _median([np.array(each.spent[call]) / 1e3 for each in kept]) for call in ("choose", "observe")}


def _median(rounds: list[Floats]) -> dict[str, Any]:
    found = [{f"p{p}_us": round(float(np.percentile(us, p)), 2) for p in (50, 90, 99)} for us in rounds]
    ranked = sorted(found, key=lambda each: each["p99_us"])
    return ranked[len(ranked) // 2] | {"p99_us of all rounds": [each["p99_us"] for each in found]}
