"""The figures of one played seed, as plain data: what a report needs, and what a process can send back cheaply."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvserve_core.simulate.engine import OTHERS, Run
from kvserve_core.simulate.hindsight import Hindsight
from kvserve_core.simulate.statistics import distribution
from kvserve_core.simulate.trace import Floats

BINS = 120
"""Points in time, and quantiles, that are kept of a run for a plot."""
REASONS = 50
"""The most frequent of them are reported by name."""


def summarise(run: Run, hindsight: Hindsight) -> dict[str, Any]:
    """Distributions in seconds, shares of profiles and reasons, regret, and what went wrong.

    sent: wire bytes per original byte. policy_failures, refused_outcomes: calls of the policy, and reports.
    """
    requests, names = run.requests, list(run.truth.index)
    ttft, jct = latencies(run)
    used = np.bincount(np.asarray(run.profile), minlength=len(names)) / len(requests)
    return {
        "requests": len(requests),
        "ttft_s": distribution(ttft),
        "jct_s": distribution(jct),
        "kv_s": distribution(np.asarray(run.encode_s) + np.asarray(run.transfer_s) + np.asarray(run.decode_s)),
        "slo_met": _slo_met(run, ttft, jct),
        "sent": float(np.sum(run.wire_bytes) / np.sum(requests.nbytes)),
        "regret": hindsight.regret(),
        "regret_kv": hindsight.regret(model=False),
        "profiles": {name: float(share) for name, share in zip(names, used, strict=True) if share},
        "reasons": most({run.reasons[i]: n / len(requests) for i, n in Counter(run.reason).items()}),
        "policy_failures": run.policy_failures,
        "refused_outcomes": run.refused_outcomes,
        "plot": {"ttft_s": np.quantile(ttft, np.linspace(0, 1, BINS + 1)).tolist(), "over_time": _over_time(run, ttft)},
    }


def most(shares: Mapping[str, float]) -> dict[str, float]:
    """The :data:`REASONS` largest, the largest first, and the rest of them as one."""
    found = sorted(((n, s) for n, s in shares.items() if n != OTHERS), key=lambda item: -item[1])
    rest = shares.get(OTHERS, 0.0) + sum(share for _, share in found[REASONS:])
    return dict(found[:REASONS]) | ({OTHERS: rest} if rest else {})


def latencies(run: Run) -> tuple[Floats, Floats]:
    """TTFT and JCT of every request, in seconds: to the first token that decoding makes, and to the last."""
    requests, per_token = run.requests, run.scenario.engine.decode_per_token
    wait = np.asarray(requests.start) - np.asarray(requests.arrival)
    moved = np.asarray(run.encode_s) + np.asarray(run.transfer_s) + np.asarray(run.decode_s)
    ttft = wait + np.asarray(requests.prefill_s) + moved + per_token
    return ttft, ttft + per_token * (np.asarray(requests.output_tokens) - 1)


def _slo_met(run: Run, ttft: Floats, jct: Floats) -> float | None:
    """The share of requests with an SLO that met it, or None."""
    limits = np.array([np.nan if t.slo is None else t.slo for t in run.scenario.tenants])
    on_jct = np.array([t.slo_kind == "jct" for t in run.scenario.tenants])
    tenant = np.asarray(run.requests.tenant)
    limit, spent = limits[tenant], np.where(on_jct[tenant], jct, ttft)
    known = ~np.isnan(limit)
    return float((spent <= limit)[known].mean()) if known.any() else None


def _over_time(run: Run, ttft: Floats) -> dict[str, list[float]]:
    """Mean TTFT and the first link's bandwidth in equal spans of time; empty spans are left out."""
    arrival = np.asarray(run.requests.arrival)
    edges = np.linspace(0, float(arrival[-1]) or 1.0, BINS + 1)
    place = np.clip(np.digitize(arrival, edges) - 1, 0, BINS - 1)
    count = np.bincount(place, minlength=BINS)
    mean = np.bincount(place, ttft, BINS) / np.maximum(count, 1)
    middles = (edges[:-1] + edges[1:]) / 2
    kept = np.flatnonzero(count)
    rates = [run.traces[0].rate(float(middles[i])) for i in kept]
    return {"time_s": middles[kept].tolist(), "ttft_s": mean[kept].tolist(), "bytes_per_s": rates}
