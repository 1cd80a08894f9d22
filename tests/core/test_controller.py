"""The controller: what is feasible, what is fastest, and how it explains itself."""

from __future__ import annotations

import logging
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller_cases import FREE_RAW, GBPS, MIB, Recorder, analytic, library, profile, three
from kvserve_core import controller as module
from kvserve_core.artefacts import Artefacts
from kvserve_core.controller import MAX_NOTES, Controller
from kvserve_core.errors import ConfigError, UnknownNameError
from kvserve_core.latency import Speed
from kvserve_core.library import RAW_PROFILE, Profile, QualityRecord, built_in
from kvserve_core.policy import Outcome, ServiceContext
from kvserve_core.profile import RAW_CHAIN, PipelineSpec
from kvserve_plugins.policies.static import Static


@pytest.mark.parametrize(("gbps", "expected"), [(5, "slow9"), (25, "fast5"), (150, "raw")])
def test_the_best_profile_changes_with_bandwidth(gbps: float, expected: str) -> None:
    decision = three().choose(ServiceContext(nbytes=56 * MIB, bandwidth=gbps * GBPS, model_s=0.005))
    assert decision.profile == expected
    assert decision.bandwidth == gbps * GBPS
    assert decision.reason == "fastest"
    assert "raw" in {c.profile for c in decision.candidates}


def test_raw_wins_on_an_unlimited_link() -> None:
    decision = three().choose(ServiceContext(nbytes=56 * MIB, bandwidth=float("inf")))
    assert decision.profile == "raw"
    assert decision.candidates[0].transfer_s == 0.0


def test_estimates_are_eq_1_for_the_exact_request() -> None:
    decision = three().choose(ServiceContext(nbytes=10**8, bandwidth=GBPS, model_s=0.5))
    best = decision.candidates[0]
    assert (best.profile, best.cr) == ("slow9", pytest.approx(8.62))
    assert best.encode_s == best.decode_s == pytest.approx(1e8 / 12e9)
    assert best.transfer_s == pytest.approx(1e8 / 8.62 / GBPS)
    assert best.latency_s == pytest.approx(0.5 + 2e8 / 12e9 + 1e8 / 8.62 / GBPS)


def test_a_fixed_cost_counts_for_short_requests_only() -> None:
    control = Controller(library(FREE_RAW, profile("p", 4.0, 1e12, fixed_s=0.01)), analytic())
    assert control.choose(ServiceContext(nbytes=10**5, bandwidth=1e8)).profile == "raw"
    assert control.choose(ServiceContext(nbytes=10**8, bandwidth=1e8)).profile == "p"


def test_nothing_to_move_is_decided_too() -> None:
    assert three().choose(ServiceContext(nbytes=0, bandwidth=GBPS)).candidates[0].latency_s == 0.0


rates = st.floats(1e8, 1e12)
profiles_of = st.lists(st.tuples(st.floats(0.5, 30), rates, st.floats(0, 0.01)), max_size=50)


@settings(max_examples=200)
@given(profiles_of, st.lists(st.tuples(st.integers(1, 2**40), st.floats(1e5, 1e12)), min_size=1, max_size=5))
def test_the_choice_is_the_optimum_over_all_profiles(
    made: list[tuple[float, float, float]], requests: list[tuple[int, float]]
) -> None:
    profiles = [FREE_RAW, *(profile(f"p{i}", *args) for i, args in enumerate(made))]
    control = Controller(library(*profiles), analytic())
    for nbytes, bandwidth in requests:
        decision = control.choose(ServiceContext(nbytes=nbytes, bandwidth=bandwidth))
        best = min(p.line(nbytes).at(1 / bandwidth) for p in control.profiles)
        assert decision.candidates[0].latency_s == pytest.approx(best, rel=1e-9)


def test_candidates_are_the_optimum_its_neighbours_and_raw_fastest_first() -> None:
    policy = Recorder()
    made = [profile(f"p{i}", 2.0 + i, 40e9 / (1.6**i)) for i in range(9)]
    control = Controller(library(FREE_RAW, *made), policy)
    control.choose(ServiceContext(nbytes=10**8, bandwidth=1e9))
    (seen,) = policy.seen
    assert 3 <= len(seen) <= 5
    assert [c.latency_s for c in seen] == sorted(c.latency_s for c in seen)
    assert "raw" in {c.profile for c in seen}
    assert len({c.profile for c in seen}) == len(seen)


def test_the_runner_up_is_among_the_candidates_even_off_the_envelope() -> None:
    policy = Recorder()
    near = profile("near", 4.9, 25e9)  # slower than "best" at every bandwidth, but not by much
    control = Controller(library(FREE_RAW, profile("best", 5.0, 26e9), near, profile("far", 9.0, 2e9)), policy)
    control.choose(ServiceContext(nbytes=10**8, bandwidth=20 * GBPS))
    assert [c.profile for c in policy.seen[0]][:2] == ["best", "near"]


@settings(max_examples=100)
@given(profiles_of, st.integers(1, 2**40), st.floats(1e5, 1e12))
def test_the_two_fastest_are_offered(made: list[tuple[float, float, float]], nbytes: int, bandwidth: float) -> None:
    profiles = [FREE_RAW, *(profile(f"p{i}", *args) for i, args in enumerate(made))]
    control = Controller(library(*profiles), analytic())
    offered = control.choose(ServiceContext(nbytes=nbytes, bandwidth=bandwidth)).candidates
    ranked = sorted(p.line(nbytes).at(1 / bandwidth) for p in control.profiles)
    assert [c.latency_s for c in offered[:2]] == pytest.approx(ranked[:2], rel=1e-9)


def test_the_lower_bound_of_quality_decides() -> None:
    control = Controller(library(FREE_RAW, profile("p", 4.0, 1e12, lower=0.98)), analytic(), min_quality=0.99)
    refused = control.choose(ServiceContext(nbytes=MIB, bandwidth=1e6))
    assert refused.profile != "p"
    assert ("p", "quality 0.98 (lower bound) is below 0.99") in refused.rejected
    taken = control.choose(ServiceContext(nbytes=MIB, bandwidth=1e6, min_quality=0.98))
    assert (taken.profile, taken.candidates[0].quality) == ("p", 0.98)


def test_quality_is_that_of_the_workload() -> None:
    records = {
        w: QualityRecord(value=1, lower=q, upper=1, metric="m", samples=3) for w, q in (("code", 0.5), ("chat", 1))
    }
    control = Controller(library(FREE_RAW, profile("p", 4.0, 1e12, quality=records)), analytic())
    picked = {w: control.choose(ServiceContext(MIB, w, 1e6)) for w in ("code", "chat", "math")}
    assert {w: d.profile for w, d in picked.items()} == {"code": "lossless", "chat": "p", "math": "lossless"}
    assert "no quality record for workload 'math'" in dict(picked["math"].rejected)["p"]


def test_an_unprofiled_profile_needs_leave() -> None:
    made = library(FREE_RAW, profile("p", 4.0, 1e12, lower=None))
    context = ServiceContext(nbytes=MIB, bandwidth=1e6)
    assert "allow_unprofiled" in dict(Controller(made, analytic()).choose(context).rejected)["p"]
    assert Controller(made, analytic(), allow_unprofiled=["p"]).choose(context).profile == "p"


def test_leave_does_not_lower_the_floor_for_what_was_measured() -> None:
    made = library(FREE_RAW, profile("p", 4.0, 1e12, lower=0.5))
    control = Controller(made, analytic(), allow_unprofiled=["p"])
    assert control.choose(ServiceContext(nbytes=MIB, bandwidth=1e6)).profile == "lossless"


def test_records_of_another_model_do_not_count() -> None:
    made = library(FREE_RAW, profile("p", 4.0, 1e12), fingerprint="that")
    context = ServiceContext(nbytes=MIB, bandwidth=1e6)
    refused = Controller(made, analytic(), fingerprint="this").choose(context)
    assert refused.profile == "lossless"
    assert "another model" in dict(refused.rejected)["p"]
    assert Controller(made, analytic(), fingerprint="that").choose(context).profile == "p"


def test_a_profile_that_lacks_an_artefact_is_refused() -> None:
    digest = Artefacts().add(b"basis")
    made = library(FREE_RAW, profile("p", 4.0, 1e12, artefacts=(digest,)))
    context = ServiceContext(nbytes=MIB, bandwidth=1e6)
    assert digest[:16] in dict(Controller(made, analytic()).choose(context).rejected)["p"]
    whole = made.with_artefacts(Artefacts({digest: b"basis"}))
    assert Controller(whole, analytic()).choose(context).profile == "p"


def test_what_the_peer_cannot_decode_is_refused_but_raw_always_goes() -> None:
    context = ServiceContext(nbytes=56 * MIB, bandwidth=5 * GBPS, acceptable=frozenset({"fast5"}))
    decision = three().choose(context)
    assert decision.profile == "fast5"
    assert ("slow9", "the peer cannot decode it") in decision.rejected
    nothing = three().choose(replace(context, acceptable=frozenset()))
    assert [c.profile for c in nothing.candidates] == ["raw"]


def test_a_store_refuses_profiles_that_depend_on_the_prompt() -> None:
    recent = PipelineSpec(planes={"*": RAW_CHAIN}, recent_tokens=64)
    control = Controller(library(FREE_RAW, profile("p", 4.0, 1e12, pipeline=recent)), analytic())
    context = ServiceContext(nbytes=MIB, bandwidth=1e6)
    assert control.choose(context).profile == "p"
    assert control.choose(replace(context, intent="store")).profile == "lossless"


def test_nothing_meets_the_slo_so_the_least_violating_goes() -> None:
    context = ServiceContext(nbytes=56 * MIB, bandwidth=5 * GBPS, slo_s=0.001)
    decision = three().choose(context)
    assert decision.profile == "slow9"
    assert "no profile meets the SLO, least violating" in decision.reason
    assert "misses the SLO" in decision.explain()
    assert three().choose(replace(context, slo_s=1.0)).reason == "fastest"


def test_a_policy_that_misses_the_slo_by_choice_is_reported() -> None:
    control = Controller(library(FREE_RAW, profile("p", 8.0, 1e11)), Static(Static.Config(profile="raw")))
    decision = control.choose(ServiceContext(nbytes=56 * MIB, bandwidth=5 * GBPS, slo_s=0.05))
    assert (decision.profile, decision.reason) == ("raw", "static; misses the SLO")


@pytest.mark.parametrize("value", [float("nan"), 7, -0.5, None])
def test_a_quality_floor_that_is_none_is_refused_at_the_start(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"min_quality: .* is no quality; give a number from 0"):
        Controller(None, analytic(), min_quality=value)


def test_without_a_library_only_exact_profiles_and_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    module._say_no_library.cache_clear()
    with caplog.at_level(logging.WARNING, logger="kvserve_core"):
        controls = [Controller(None, analytic()) for _ in range(3)]
    assert [p.name for p in controls[0].profiles] == ["raw", "lossless"]
    assert [r.getMessage() for r in caplog.records if "kvserve measure" in r.getMessage()] == [caplog.messages[0]]
    assert controls[0].choose(ServiceContext(nbytes=10**8, bandwidth=1e6)).profile == "lossless"
    assert controls[0].choose(ServiceContext(nbytes=10**8, bandwidth=1e12)).profile == "raw"


def test_the_self_test_serves_what_the_library_does_not_hold() -> None:
    calls: list[int] = []

    def self_test() -> list[Profile]:
        calls.append(1)
        return [built_in("raw", 1.0, Speed.of(1e9), Speed()), built_in("lossless", 1.5, Speed.of(2e9), Speed())]

    alone = {p.name: p for p in Controller(None, analytic(), self_test=self_test).profiles}
    assert alone["raw"].encode == Speed.of(1e9)
    assert alone["lossless"].cr == 1.5
    mixed = {p.name: p for p in Controller(library(FREE_RAW), analytic(), self_test=self_test).profiles}
    assert mixed["raw"] == FREE_RAW
    assert mixed["lossless"].cr == 1.5
    whole = library(RAW_PROFILE, built_in("lossless", 1.2, Speed(), Speed()))
    Controller(whole, analytic(), self_test=self_test)
    assert len(calls) == 2


def test_names_that_nothing_answers_to_are_found_at_the_start() -> None:
    made = library(FREE_RAW, profile("balanced", 4.0, 1e9))
    with pytest.raises(UnknownNameError, match="unknown profile 'blanced'; did you mean 'balanced'"):
        Controller(made, Static(Static.Config(profile="blanced")))
    with pytest.raises(UnknownNameError, match="allow_unprofiled: unknown profile 'x'"):
        Controller(made, analytic(), allow_unprofiled=["x"])


def test_explain_names_every_profile_with_its_reason() -> None:
    made = library(
        FREE_RAW,
        *(profile(f"p{i}", 2.0 + i, 40e9 / (1.6**i)) for i in range(9)),
        profile("dominated", 2.0, 1e8),
        profile("lossy", 9.0, 1e12, lower=0.9),
    )
    text = Controller(made, analytic()).choose(ServiceContext(nbytes=10**8, bandwidth=10 * GBPS, slo_s=0.01)).explain()
    for name in ("raw", "lossless", "dominated", "lossy", *(f"p{i}" for i in range(9))):
        assert text.count(f" {name}: ") == 1, text
    assert "dominated: 2.04 s; no benefit, pays below 200 Mbps" in text
    assert "slower than those above" in text
    assert "lossy: quality 0.9 (lower bound) is below 0.99" in text
    assert "10 Gbps, SLO 10 ms" in text


def test_a_decision_can_be_pickled_and_still_explains_itself() -> None:
    decision = three().choose(ServiceContext(nbytes=56 * MIB, bandwidth=5 * GBPS))
    data = pickle.dumps(decision)
    assert len(data) < 2000, "the menu must not travel with it"
    assert pickle.loads(data) == decision
    assert "* slow9: " in pickle.loads(data).explain()


def test_kinds_of_request_are_bounded() -> None:
    control = three()
    for i in range(module.MAX_MENUS + 50):
        control.choose(ServiceContext(nbytes=MIB, workload=f"w{i}"))
    assert len(control._menus) == module.MAX_MENUS


def test_a_workload_that_others_stand_in_for_is_said_once_and_explained(caplog: pytest.LogCaptureFixture) -> None:
    control = three()
    for floor in (None, 0.5):
        decision = control.choose(ServiceContext(nbytes=MIB, workload="cdoe", min_quality=floor))
    note = "workload 'cdoe' was not measured and is judged by the records of 'default'"
    assert note in decision.explain()
    assert [note in text for text in caplog.messages] == [True]
    assert "was not measured" not in control.choose(ServiceContext(nbytes=MIB)).explain()
    for i in range(2 * MAX_NOTES):
        control.choose(ServiceContext(nbytes=MIB, workload=f"w{i}"))
    assert len(caplog.messages) == MAX_NOTES, "clients may name any number"


def test_nothing_stands_in_on_another_model_or_where_nothing_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    other = Controller(library(profile("p", 4.0, 1e9)), analytic(), fingerprint="another")
    for control in (other, Controller(library(FREE_RAW), analytic())):
        assert "was not measured" not in control.choose(ServiceContext(nbytes=MIB, workload="cdoe")).explain()
    assert caplog.messages == []


def test_a_workload_without_end_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"workload: a name of 100000 characters; expected at most 1024"):
        three().choose(ServiceContext(nbytes=MIB, workload="w" * 100_000))


def test_many_threads_choose_while_others_observe() -> None:
    control = three()

    def work(seed: int) -> int:
        for i in range(300):
            context = ServiceContext(nbytes=(seed + 1) * (i + 1) * 10**4, bandwidth=GBPS, workload=f"w{i % 7}")
            decision = control.choose(context)
            seconds = 0.01 * (1 + (i * seed) % 5)
            control.observe(decision, Outcome("t", decision.profile, 10**7, 10**6, seconds, seconds, seconds))
        return i + 1

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [300] * 4
