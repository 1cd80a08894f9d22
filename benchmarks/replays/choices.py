"""What is chosen from the shipped library: the three choices of the artefact (B3), its envelopes, its intervals."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvserve_core.controller import Controller
from kvserve_core.latency import Line, lower_envelope
from kvserve_core.library import ProfileLibrary
from kvserve_core.policy import ServiceContext
from kvserve_plugins.policies.analytic import Analytic
from replays.bars import Result
from replays.reference import MB, WORKLOAD, as_stored, as_they_price, buckets, in_true_units, short, stored

GBPS = 1e9 / 8
B3_BYTES, B3_MODEL_S, B3_SLO_S = 56_000_000, 0.005, 0.2
"""1024 tokens are 56 MiB, of which the reference makes 56 decimal MB when it divides by a bandwidth."""
B3 = {5: ("c1", 20.75, 94.60), 25: ("c12", 11.74, 22.92), 150: ("raw", 7.99, 7.99)}
"""Gbps -> profile, its milliseconds, those of raw."""
ENVELOPES = {
    0: (["c6", "c0"], [32312.9]),
    1: (["c15", "c13", "c1", "c4"], [25253.8, 11347.4, 255.5]),
    2: (["c14", "c12", "c3", "c5"], [29417.8, 6558.9, 1727.3]),
}
"""Bucket -> profiles from high bandwidth to low, and the MB/s where the next one takes over."""
BANDWIDTHS = np.geomspace(1.0, 1e6, 10_000)
"""MB/s."""


def controller(library: ProfileLibrary, min_quality: float = 0.0) -> Controller:
    return Controller(library, Analytic(Analytic.Config()), min_quality=min_quality)


def b3_at(library: ProfileLibrary, nbytes: int, gbps: float) -> tuple[str, float, float]:
    """The profile, its milliseconds and those of raw."""
    made = controller(library, 0.97)
    context = ServiceContext(nbytes, WORKLOAD, gbps * GBPS, slo_s=B3_SLO_S, model_s=B3_MODEL_S)
    decision = made.choose(context)
    by_name = {c.profile: round(c.latency_s * 1e3, 2) for c in decision.candidates}
    return decision.profile, by_name[decision.profile], by_name["raw"]


def b3() -> Result:
    """5 Gbps -> c1, 25 -> c12, 150 -> raw, to 0.01 ms, in the reference's units; and what true units give."""
    theirs, ours = as_they_price(1024), in_true_units()
    found = {gbps: b3_at(theirs, B3_BYTES, gbps) for gbps in B3}
    detail = {"true units, 4096 tokens' speeds": {f"{g} Gbps": b3_at(ours, 56 * 2**20, g) for g in B3}}
    return Result(
        {f"{g} Gbps": v for g, v in found.items()}, {f"{g} Gbps": v for g, v in B3.items()}, found == B3, detail
    )


def lines_of(bucket: int) -> dict[str, Line]:
    """The bucket's profiles over x = 1 / (MB/s), for one MB."""
    return {
        short(p["profile_id"]): Line(1 / p["performance_metrics"]["harmonic_speed_mbps"], 1 / _cr(p))
        for p in buckets()[bucket]
    }


def _cr(profile: dict[str, Any]) -> float:
    return float(profile["performance_metrics"]["compression_ratio"])


def envelopes() -> Result:
    """Section by section as computed by hand, and at 10,000 bandwidths the same latency as the best of all lines."""
    found, worst = {}, 0.0
    for bucket in ENVELOPES:
        lines = lines_of(bucket)
        names, made = list(lines), lower_envelope(list(lines.values()))
        found[bucket] = ([names[i] for i in made.order], [round(1 / x, 1) for x in made.breaks])
        for mbps in BANDWIDTHS:
            best = min(line.at(1 / mbps) for line in lines.values())
            worst = max(worst, lines[names[made.best(1 / mbps)]].at(1 / mbps) / best - 1)
    ok = found == ENVELOPES and worst <= 1e-12
    return Result(worst, 1e-12, ok, {"envelopes": found, "bandwidths": len(BANDWIDTHS)})


def intervals() -> Result:
    """Regret over all bandwidths of the stored intervals against that of the controller, which must have none."""
    ours, detail = 0.0, {}
    for bucket in ENVELOPES:
        ours = max(ours, _our_regret(bucket))
        detail[bucket] = _stored_regret(bucket)
    wrong = sum(d["beaten"] for d in detail.values()), sum(d["best is no candidate"] for d in detail.values())
    worst = max(d["worst"] for d in detail.values())
    return Result(ours, 1e-9, ours <= 1e-9 < worst, {"stored": detail, "beaten, best is no candidate": wrong})


def _our_regret(bucket: int) -> float:
    """By the controller itself, raw included; 1024 tokens."""
    library = as_stored(bucket)
    made, worst = controller(library), 0.0
    for mbps in BANDWIDTHS:
        decision = made.choose(ServiceContext(B3_BYTES, WORKLOAD, mbps * MB))
        all_s = {p.name: p.line(B3_BYTES).at(1 / (mbps * MB)) for p in library.profiles}
        worst = max(worst, all_s[decision.profile] / min(all_s.values()) - 1)
    return worst


def _stored_regret(bucket: int) -> dict[str, Any]:
    """Of the intervals below the first critical bandwidth, where compressing helps at all."""
    given = next(b for b in stored()["accuracy_buckets"] if b["bucket_id"] == bucket)["bandwidth_intervals"]
    lines, regrets, beaten, missing = lines_of(bucket), [], 0, 0
    for interval in given[1:]:
        high, low = interval["B_range_mbps"]
        inside = np.append(BANDWIDTHS[(high > BANDWIDTHS) & (low < BANDWIDTHS)], (high + max(low, 1.0)) / 2)
        chosen = lines[short(interval["model_optimal_profile_id"])]
        candidates = {short(name) for name in interval["candidate_profile_ids"]}
        best = [min(lines, key=lambda n, x=1 / mbps: lines[n].at(x)) for mbps in inside]
        excess = [float(chosen.at(1 / b) / lines[n].at(1 / b) - 1) for b, n in zip(inside, best, strict=True)]
        beaten += bool(max(excess) > 1e-12)
        missing += not candidates.issuperset(best)
        regrets += excess[:-1]
    found = {
        "mean": float(np.mean(regrets)),
        "worst": float(max(regrets)),
        "beaten": beaten,
        "best is no candidate": missing,
    }
    return found | {"intervals": len(given) - 1}
