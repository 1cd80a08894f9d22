"""The event loop: what happens when, what the controller is told, and queueing theory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvserve_core.controller import Controller
from kvserve_core.policy import Candidate, Choice, Decision, Outcome, ServiceContext
from kvserve_core.simulate.engine import MAX_REASON, MAX_REASONS, OTHERS, Run
from kvserve_core.simulate.run import play_seed
from kvserve_core.simulate.summary import REASONS, latencies, most, summarise
from kvserve_plugins.policies.analytic import Analytic
from kvserve_plugins.policies.static import Static
from simulated_worlds import EXACT, library, made


class Watched(Controller):
    """Keeps what it was asked and told, with the time."""

    asked: list[tuple[float, ServiceContext]]
    told: list[tuple[float, Decision, Outcome]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.clock = kwargs["clock"]
        self.asked, self.told = [], []
        seen.append(self)
        super().__init__(*args, **kwargs)

    def choose(self, context: ServiceContext) -> Decision:
        self.asked.append((self.clock(), context))
        return super().choose(context)

    def observe(self, decision: Decision, outcome: Outcome) -> None:
        self.told.append((self.clock(), decision, outcome))
        super().observe(decision, outcome)


seen: list[Watched] = []


def static(profile: str) -> Static:
    return Static(Static.Config(profile=profile))


def played(profile: str, seed: int = 0, **fields: Any) -> tuple[Run, Watched]:
    seen.clear()
    run, _ = play_seed(made(library(), **{**EXACT, **fields}), static(profile), seed, Watched)
    return run, seen[0]


def test_a_lone_request_takes_what_eq_1_says() -> None:
    link = {"bandwidth": "8Gbps", "overhead": 0.001}
    tenant = {"tokens": {"median": 1000, "sigma": 0}, "output_tokens": 11}
    run, watched = played("fast", requests=1, links=[link], tenants=[tenant])
    nbytes = 1000 * 57344
    assert run.encode_s[0] == run.decode_s[0] == pytest.approx(nbytes / 40e9)
    assert run.transfer_s[0] == pytest.approx(nbytes / 3 / 1e9 + 0.001)
    ttft, jct = latencies(run)
    prefill = 0.01 + 1000 * 5e-5
    assert ttft[0] == pytest.approx(prefill + 2 * nbytes / 40e9 + nbytes / 3e9 + 0.001 + 0.02)
    assert jct[0] - ttft[0] == pytest.approx(10 * 0.02)
    ((time_s, decision, outcome),) = watched.told
    assert time_s == pytest.approx(ttft[0] - 0.02)  # when the KV was decoded
    assert (decision.profile, outcome.profile, outcome.ok) == ("fast", "fast", True)
    assert (outcome.raw_bytes, outcome.wire_bytes) == (nbytes, nbytes // 3)
    assert (outcome.encode_s, outcome.transfer_s) == (run.encode_s[0], run.transfer_s[0])


def test_every_request_is_asked_once_and_told_once_and_time_never_runs_back() -> None:
    run, watched = played("fast", requests=500, rate=40)
    assert len(watched.asked) == len(watched.told) == len(run.requests)
    assert [t for t, _ in watched.asked] == run.requests.start.tolist()
    assert [t for t, *_ in watched.told] == sorted(t for t, *_ in watched.told)


def test_the_context_holds_no_bandwidth_and_the_budget_that_is_left() -> None:
    engine = {"prefill_workers": 1, "prefill_noise": 0.2}
    tenants = [{"slo": "2s", "workload": "w", "min_quality": 0.3}]
    run, watched = played("raw", requests=50, rate=8, engine=engine, tenants=tenants)
    waited = np.asarray(run.requests.start) - np.asarray(run.requests.arrival)
    assert waited.max() > 0.05
    for (_, context), wait, model_s in zip(watched.asked, waited, run.requests.model_s, strict=True):
        assert context.bandwidth is None
        assert (context.workload, context.min_quality) == ("w", 0.3)
        assert context.slo_s == pytest.approx(max(0.0, 2.0 - 0.02 - wait))  # the first token is in the TTFT
        assert context.model_s == model_s  # expected, not what the noise will make of it
    assert run.requests.model_s != run.requests.prefill_s


def test_a_jct_budget_leaves_room_for_the_tokens() -> None:
    tenants = [{"slo": "5s", "slo_kind": "jct", "output_tokens": 101}]
    _, watched = played("raw", requests=3, tenants=tenants)
    assert [c.slo_s for _, c in watched.asked] == pytest.approx([5.0 - 101 * 0.02] * 3)


@pytest.mark.parametrize(("kind", "slo"), [("ttft", "700ms"), ("jct", "2700ms")])
def test_what_the_controller_expects_to_be_late_is_late(kind: str, slo: str) -> None:
    """Nothing is noisy, and the prior is right: a decision and the figures of the run must agree on every request."""
    engine = {**EXACT["engine"], "decode_per_token": 0.2}
    links = [{"bandwidth": "8Gbps", "shared": False, "overhead": 0}]
    tenant = {"slo": slo, "slo_kind": kind, "output_tokens": 11, "tokens": {"median": 5000, "sigma": 0.8}}
    run, _ = played("raw", requests=400, engine=engine, links=links, tenants=[tenant], prior_bandwidth="8Gbps")
    ttft, jct = latencies(run)
    late = (ttft if kind == "ttft" else jct) > run.scenario.tenants[0].slo
    expected = ["SLO" in run.reasons[i] for i in run.reason]
    assert 40 < late.sum() < 360
    assert late.tolist() == expected


def test_a_budget_that_is_spent_is_nothing_left_and_no_error() -> None:
    engine = {"prefill_workers": 1}
    run, watched = played("raw", requests=30, rate=30, engine=engine, tenants=[{"slo": "100ms"}])
    left = [context.slo_s for _, context in watched.asked]
    assert left[0] == pytest.approx(0.08)
    assert left[-1] == 0.0
    assert "no profile meets the SLO" in run.reasons[run.reason[-1]]


class Talkative(Static):
    """Names a figure in every reason."""

    def choose(self, context: ServiceContext, candidates: Sequence[Candidate]) -> Choice:
        return Choice(super().choose(context, candidates).index, f"{context.nbytes} bytes{'!' * 300}")


def test_reasons_are_bounded_however_much_a_policy_has_to_say() -> None:
    policy = Talkative(Static.Config(profile="raw"))
    world = made(library(), requests=3000)
    run, hindsight = play_seed(world, policy, 0)
    assert len(run.reasons) == MAX_REASONS + 1
    assert max(map(len, run.reasons)) == MAX_REASON
    found = summarise(run, hindsight)["reasons"]
    assert len(found) == REASONS + 1
    assert list(found)[-1] == OTHERS
    assert sum(found.values()) == pytest.approx(1.0)


def test_the_largest_shares_are_named_and_the_rest_is_one() -> None:
    shares = {OTHERS: 0.5} | {f"r{i}": i / 1e4 for i in range(60)}
    found = most(shares)
    assert list(found) == [*(f"r{i}" for i in range(59, 9, -1)), OTHERS]
    assert found[OTHERS] == pytest.approx(0.5 + sum(range(10)) / 1e4)
    assert most({"a": 0.25, "b": 0.75}) == {"b": 0.75, "a": 0.25}


def test_links_do_not_disturb_each_other() -> None:
    links = [{"name": "a", "bandwidth": "8Gbps"}, {"name": "b", "bandwidth": "80Gbps"}]
    tenants = [{"name": n, "link": n, "tokens": {"sigma": 0}} for n in "ab"]
    run, watched = played("raw", requests=400, rate=2, links=links, tenants=tenants)
    tenant, spent = np.asarray(run.requests.tenant), np.asarray(run.transfer_s)
    assert spent[tenant == 1].max() < spent[tenant == 0].min()
    assert {o.link for _, _, o in watched.told} == {"a", "b"}
    assert watched.links.estimate("b") == pytest.approx(1e10, rel=0.15)


def test_what_is_learned_is_what_a_shared_link_gives() -> None:
    run, watched = played("raw", requests=2000, rate=3, links=[{"bandwidth": "8Gbps", "overhead": 0}])
    assert np.mean(run.active) > 1.5
    assert watched.links.estimate("default") < 0.8e9


def test_a_shared_link_obeys_queueing_theory() -> None:
    """M/G/1 with processor sharing: a transfer takes its own time / (1 - load) on average, whatever the sizes."""
    load, rate = 0.5, 5.0
    tokens = {"median": 1000, "sigma": 0.5, "low": 1}
    mean_bytes = 1000 * np.exp(0.5**2 / 2) * 57344
    link = {"bandwidth": rate * mean_bytes / load, "overhead": 0}
    run, _ = played("raw", requests=30_000, rate=rate, links=[link], tenants=[{"tokens": tokens}])
    slowdown = np.asarray(run.transfer_s) / (np.asarray(run.requests.nbytes) / link["bandwidth"])
    assert slowdown.min() >= 1 - 1e-9
    assert slowdown.mean() == pytest.approx(1 / (1 - load), rel=0.05)


def test_costs_drift_and_are_biased_within_their_bounds() -> None:
    speeds = {"drift": 0.3, "drift_period": 10, "noise": 0, "ratio_noise": 0}
    run, _ = played("fast", requests=400, every=0.1, speeds=speeds)
    factor = np.asarray(run.encode_s) / (np.asarray(run.requests.nbytes) / 40e9)
    assert 0.7 <= factor.min() < 0.72
    assert 1.28 < factor.max() <= 1.3
    biased, _ = played("fast", requests=1, speeds={**EXACT["speeds"], "bias": 0.5})
    assert biased.encode_s[0] != biased.decode_s[0] != biased.requests.nbytes[0] / 40e9


def test_the_controller_learns_the_bandwidth_from_outcomes_alone() -> None:
    fields = {**EXACT, "links": [{"bandwidth": "400Gbps", "shared": False}], "prior_bandwidth": "1Gbps"}
    run, _ = play_seed(made(library(), requests=200, rate=1, **fields), Analytic(Analytic.Config()), 0)
    names = list(run.truth.index)
    assert names[run.profile[0]] == "small"
    assert {names[p] for p in run.profile[50:]} == {"raw"}
