"""What ``kvserve simulate`` prints: every figure as a mean over seeds with its confidence interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvserve_core.simulate.scenario import Scenario
from kvserve_core.simulate.statistics import Interval, over_seeds
from kvserve_core.simulate.summary import most
from kvserve_core.units import format_duration

Summaries = Sequence[Mapping[str, Any]]
DISTRIBUTIONS = ("ttft_s", "jct_s", "kv_s")
SCALARS = ("slo_met", "sent", "regret", "regret_kv", "wall_s", "cpu_s")
TROUBLES = {
    "policy_failures": "its policy failed {} times; what it was asked then went raw",
    "refused_outcomes": "{} reports could not be true, and nothing was learned from them (a transfer of over a day?)",
}
"""Counts over all seeds, and what is said of one that is not 0."""


def report(scenario: Scenario, done: Mapping[str, Summaries], seeds: Sequence[int]) -> dict[str, Any]:
    """Plain data for ``--json``. ``requests``: those that were played, of each seed."""
    return {
        "requests": next(iter(done.values()))[0]["requests"],
        "seeds": list(seeds),
        "scenario": scenario.model_dump(mode="json"),
        "policies": [{"policy": name, **_over(summaries)} for name, summaries in done.items()],
    }


def _over(summaries: Summaries) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: {key: _interval([s[name][key] for s in summaries]) for key in summaries[0][name]}
        for name in DISTRIBUTIONS
    }
    found |= {name: _interval([s[name] for s in summaries]) for name in SCALARS if summaries[0][name] is not None}
    found |= {name: sum(s[name] for s in summaries) for name in TROUBLES}
    profiles, reasons = (_shares([s[name] for s in summaries]) for name in ("profiles", "reasons"))
    return found | {"profiles": profiles, "reasons": most(reasons)}


def _interval(values: Sequence[float]) -> dict[str, float | None]:
    found = over_seeds(values)
    return {"value": found.value, "low": found.low, "high": found.high}


def _shares(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean shares, the largest first."""
    names = dict.fromkeys(name for shares in each for name in shares)
    mean = {name: sum(shares.get(name, 0.0) for shares in each) / len(each) for name in names}
    return dict(sorted(mean.items(), key=lambda item: -item[1]))


COLUMNS = ("policy", "TTFT mean", "TTFT p99", "JCT mean", "JCT p99", "SLO met", "sent", "regret", "profiles")


def rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The same as a table, one row a policy."""
    return [_row(each) for each in report["policies"]]


def troubles(report: Mapping[str, Any]) -> list[str]:
    """What went wrong, a line each: figures of a policy that failed are not those of the policy."""
    return [
        f"{each['policy']}: {text.format(each[name])}"
        for each in report["policies"]
        for name, text in TROUBLES.items()
        if each[name]
    ]


def _row(each: Mapping[str, Any]) -> tuple[str, ...]:
    spent = [_seconds(each[name][key]) for name in ("ttft_s", "jct_s") for key in ("mean", "p99")]
    slo = f"{each['slo_met']['value']:.2%}" if "slo_met" in each else "none set"
    most = ", ".join(f"{name} {share:.0%}" for name, share in list(each["profiles"].items())[:3])
    return (each["policy"], *spent, slo, f"{each['sent']['value']:.1%}", f"{each['regret']['value']:.2%}", most)


def _seconds(found: Mapping[str, Any]) -> str:
    interval = Interval(**found)
    if interval.high is None:
        return format_duration(interval.value)
    return f"{format_duration(interval.value)} ± {format_duration(interval.high - interval.value)}"
