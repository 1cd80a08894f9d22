"""The controller: what is feasible, what is fastest, what it learns, and how it explains itself."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve_core import controller as module
from kvserve_core.artefacts import Artefacts
from kvserve_core.component import ComponentConfig
from kvserve_core.controller import Controller
from kvserve_core.errors import ConfigError, UnknownNameError
from kvserve_core.latency import Speed
from kvserve_core.library import RAW_PROFILE, Profile, ProfileLibrary, QualityRecord, built_in
from kvserve_core.policy import Candidate, Choice, Decision, Outcome, Policy, ServiceContext
from kvserve_core.profile import RAW_CHAIN, PipelineSpec
from kvserve_plugins.policies.analytic import Analytic
from kvserve_plugins.policies.static import Static

MIB = 2**20
GBPS = 1e9 / 8
FREE_RAW = built_in("raw", 1.0, Speed(), Speed())


class Clock:
    """A clock that tests move."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Recorder(Policy):
    """Picks the last candidate and keeps what it was shown."""

    def __init__(self) -> None:
        super().__init__(ComponentConfig())
        self.seen: list[Sequence[Candidate]] = []
        self.outcomes: list[Outcome] = []

    def choose(self, context: ServiceContext, candidates: Sequence[Candidate]) -> Choice:
        self.seen.append(candidates)
        return Choice(len(candidates) - 1, "last")

    def observe(self, decision: Decision, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


def analytic() -> Analytic:
    return Analytic(Analytic.Config())


def profile(name: str, cr: float, rate: float, fixed_s: float = 0.0, lower: float | None = 1.0, **more: Any) -> Profile:
    quality = {} if lower is None else {"default": QualityRecord(value=1, lower=lower, upper=1, metric="m", samples=3)}
    speed = Speed.of(rate, fixed_s)
    pipeline = more.pop("pipeline", PipelineSpec(planes={"*": RAW_CHAIN}))
    fields = {"quality": quality} | more
    return Profile(name=name, pipeline=pipeline, cr=cr, encode=speed, decode=speed, **fields)


def library(*profiles: Profile, fingerprint: str = "f") -> ProfileLibrary:
    return ProfileLibrary(model_id="m", fingerprint=fingerprint, device="d", created="now", profiles=profiles)


def three(**more: Any) -> Controller:
    """Free raw, a fast profile at 5x and a slow one at 9x: the shape of a 5, 25 and 150 Gbps replay."""
    made = library(FREE_RAW, profile("slow9", 8.62, 12e9), profile("fast5", 5.11, 26e9))
    return Controller(made, analytic(), **more)


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
        assert best * (1 - 1e-9) <= decision.candidates[0].latency_s <= best * 1.011


def test_candidates_are_the_optimum_its_neighbours_and_raw_fastest_first() -> None:
    policy = Recorder()
    made = [profile(f"p{i}", 2.0 + i, 40e9 / (1.6**i)) for i in range(9)]
    control = Controller(library(FREE_RAW, *made), policy)
    control.choose(ServiceContext(nbytes=10**8, bandwidth=1e9))
    (seen,) = policy.seen
    assert 3 <= len(seen) <= 4
    assert [c.latency_s for c in seen] == sorted(c.latency_s for c in seen)
    assert "raw" in {c.profile for c in seen}
    assert len({c.profile for c in seen}) == len(seen)


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


NAN, INF, HUGE = float("nan"), float("inf"), 10**400
REFUSED: dict[str, list[Any]] = {
    "bandwidth": [0.0, -1.0, NAN, HUGE, "fast"],
    "nbytes": [-1, NAN, INF, HUGE, 10**5000, None, 2**62],
    "model_s": [-1.0, NAN, INF, HUGE, None],
    "slo_s": [NAN, HUGE, -INF, "2s"],
    "min_quality": [NAN, -0.1, 7, "high"],
    "intent": ["stroe", None],
}


@pytest.mark.parametrize(
    ("field", "value"),
    [pytest.param(f, v, id=f"{f}-{i}") for f, values in REFUSED.items() for i, v in enumerate(values)],
)
def test_a_figure_that_is_none_is_refused_by_name(field: str, value: Any) -> None:
    context = replace(ServiceContext(nbytes=MIB, bandwidth=GBPS), **{field: value})
    with pytest.raises(ConfigError) as caught:
        three().choose(context)
    assert caught.value.path == field


def test_no_limit_and_a_budget_that_is_spent_are_figures() -> None:
    context = ServiceContext(nbytes=MIB, bandwidth=GBPS, slo_s=INF)
    assert three().choose(context).reason == "fastest"
    assert "least violating" in three().choose(replace(context, slo_s=-1.0)).reason
    assert three().choose(replace(context, bandwidth=1e-300)).profile == "slow9"


@pytest.mark.parametrize("value", [NAN, 7, -0.5, None])
def test_a_quality_floor_that_is_none_is_refused_at_the_start(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"min_quality: .* is no quality; give a number from 0"):
        Controller(None, analytic(), min_quality=value)


def test_the_estimate_of_the_link_is_used_and_learned() -> None:
    control = three(prior_bandwidth=5000 * GBPS, clock=Clock())
    context = ServiceContext(nbytes=56 * MIB, link="west")
    first = control.choose(context)
    assert (first.profile, first.bandwidth) == ("raw", 5000 * GBPS)
    for _ in range(2):
        control.observe(first, Outcome("t", "raw", 56 * MIB, 56 * MIB, transfer_s=56 * MIB / (5 * GBPS), link="west"))
    second = control.choose(context)
    assert second.profile == "slow9"
    assert second.bandwidth == pytest.approx(5 * GBPS, rel=0.2)
    assert control.choose(replace(context, link="east")).bandwidth == 5000 * GBPS


def test_a_decision_for_an_unknown_peer_learns_from_the_link_that_was_used() -> None:
    control = three(clock=Clock())
    decision = control.choose(ServiceContext(nbytes=MIB))
    control.observe(decision, Outcome("t", "raw", 10**8, 10**8, transfer_s=10.0, link="west"))
    assert control.links.estimate("default") == control.links.estimate("west") < 2e7


def test_observed_speeds_correct_the_estimate_and_the_choice() -> None:
    control = three(clock=Clock())
    context = ServiceContext(nbytes=56 * MIB, bandwidth=25 * GBPS)
    decision = control.choose(context)
    assert decision.profile == "fast5"
    slow_s = 4 * decision.candidates[0].encode_s
    for _ in range(10):
        control.observe(decision, Outcome("t", "fast5", 56 * MIB, 11 * MIB, encode_s=slow_s, decode_s=slow_s))
    assert control.choose(context).profile == "slow9"
    for _ in range(30):
        control.observe(decision, Outcome("t", "fast5", 56 * MIB, 11 * MIB, encode_s=slow_s / 4, decode_s=slow_s / 4))
    again = control.choose(context)
    assert again.profile == "fast5"
    assert again.candidates[0].encode_s == pytest.approx(slow_s / 4, rel=0.02)


def test_the_first_observation_already_counts_half() -> None:
    control = three(clock=Clock())
    context = ServiceContext(nbytes=10**8, bandwidth=GBPS)
    before = control.choose(context).candidates[0]
    control.observe(control.choose(context), Outcome("t", before.profile, 10**8, 10**7, encode_s=3 * before.encode_s))
    after = next(c for c in control.choose(context).candidates if c.profile == before.profile)
    assert after.encode_s == pytest.approx(3**0.5 * before.encode_s), "half, as a logarithm"
    assert after.decode_s == before.decode_s


def test_a_stage_said_to_be_free_takes_its_first_observation() -> None:
    control = three(clock=Clock())
    context = ServiceContext(nbytes=10**8, bandwidth=1e12)
    control.observe(control.choose(context), Outcome("t", "raw", 10**8, 10**8, decode_s=0.02))
    raw = next(c for c in control.choose(context).candidates if c.profile == "raw")
    assert (raw.encode_s, raw.decode_s) == (0.0, pytest.approx(0.02))


def test_the_ratio_follows_what_was_sent_except_for_short_requests() -> None:
    control = three(clock=Clock())
    context = ServiceContext(nbytes=10**8, bandwidth=GBPS)
    decision = control.choose(context)
    control.observe(decision, Outcome("t", "slow9", 10**4, 10**4))
    assert control.choose(context).candidates[0].cr == pytest.approx(8.62)
    for _ in range(40):
        control.observe(decision, Outcome("t", "slow9", 10**8, 10**8 // 6))
    slow9 = next(c for c in control.choose(context).candidates if c.profile == "slow9")
    assert slow9.cr == pytest.approx(6.0, rel=0.01)


def test_a_failed_transfer_teaches_the_policy_only() -> None:
    policy = Recorder()
    control = Controller(library(FREE_RAW, profile("p", 4.0, 1e9)), policy)
    decision = control.choose(ServiceContext(nbytes=10**8))
    failed = Outcome("t", "p", 10**8, 10**8, 9.0, 9.0, 9.0, ok=False, reason="PeerLost")
    control.observe(decision, failed)
    assert control.choose(ServiceContext(nbytes=10**8)).candidates == decision.candidates
    assert policy.outcomes == [failed]


def test_an_outcome_of_a_profile_that_is_not_known_here_is_no_error() -> None:
    control = three(clock=Clock())
    decision = control.choose(ServiceContext(nbytes=10**8))
    control.observe(decision, Outcome("t", "gone", 10**8, 10**7, 1.0, 1.0, 1.0))
    assert control.links.estimate("default") != decision.bandwidth


BAD_REPORTS = [
    {"transfer_s": INF},
    {"transfer_s": NAN},
    {"transfer_s": -1.0},
    {"encode_s": NAN},
    {"decode_s": NAN},
    {"decode_s": HUGE},
    {"total_s": INF},
    {"encode_s": 1e9},
    {"wire_bytes": 2**62},
    {"wire_bytes": -1},
    {"raw_bytes": 10**5000},
    {"raw_bytes": None},
    {"link": ["west"]},
]


@pytest.mark.parametrize("bad", BAD_REPORTS, ids=lambda bad: next(iter(bad)))
@pytest.mark.parametrize("name", ["raw", "slow9"])
def test_a_report_that_cannot_be_true_changes_nothing(
    bad: dict[str, Any], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    control = three(clock=Clock())
    context = ServiceContext(nbytes=10**8)
    before = control.choose(context)
    report = replace(Outcome("t", name, 10**8, 10**7, 0.01, 0.1, 0.01, 0.2), **bad)
    for _ in range(3):
        control.observe(before, report)
    assert control.choose(context) == before
    assert control.refused_outcomes == 3
    assert [r.getMessage() for r in caplog.records if "dropped a report" in r.getMessage()] == caplog.messages[-1:]
    assert next(iter(bad)) in caplog.messages[-1]


def test_a_report_that_cannot_be_true_does_not_reach_the_policy() -> None:
    policy = Recorder()
    control = Controller(library(FREE_RAW), policy)
    control.observe(control.choose(ServiceContext(nbytes=MIB)), Outcome("t", "raw", 1, 1, encode_s=NAN, ok=False))
    assert policy.outcomes == []


extreme = st.one_of(st.sampled_from([5e-324, 1e-300, 86400.0]), st.floats(1e-9, 86400.0))


@settings(max_examples=100)
@given(reports=st.lists(st.tuples(extreme, extreme, extreme, st.integers(1, 2**50)), max_size=60))
def test_twenty_good_reports_outweigh_any_that_were_wrong(reports: list[tuple[float, float, float, int]]) -> None:
    clock = Clock()
    control = three(clock=clock)
    context = ServiceContext(nbytes=10**8, bandwidth=GBPS)
    first = control.choose(context)
    good = first.candidates[0]
    assert good.profile == "slow9"
    for encode_s, transfer_s, decode_s, wire_bytes in reports:
        control.observe(first, Outcome("t", "slow9", 10**8, wire_bytes, encode_s, transfer_s, decode_s))
        control.choose(context)
    sent = round(10**8 / good.cr)
    for _ in range(20):
        control.observe(first, Outcome("t", "slow9", 10**8, sent, good.encode_s, sent / GBPS, good.decode_s))
    decision = control.choose(replace(context, bandwidth=None))
    again = next(c for c in decision.candidates if c.profile == "slow9")
    assert again.encode_s == pytest.approx(good.encode_s, rel=0.1)
    assert again.decode_s == pytest.approx(good.decode_s, rel=0.1)
    assert again.cr == pytest.approx(good.cr, rel=0.1)
    assert decision.bandwidth == pytest.approx(GBPS, rel=0.2)


def test_a_fetch_of_a_suffix_skews_neither_ratio_nor_speeds() -> None:
    control = three(clock=Clock())
    context = ServiceContext(nbytes=10**8, bandwidth=GBPS)
    first = control.choose(context)
    good = first.candidates[0]
    cell = 4 * 10**6  # the consumer asked for a hundredth of the cell that came
    report = Outcome("t", good.profile, cell // 100, round(cell / good.cr), good.encode_s, 1e-3, cell / 12e9)
    larger = replace(report, raw_bytes=2 * cell + cell // 2, wire_bytes=round(3 * cell / good.cr), decode_s=cell / 4e9)
    for _ in range(10):
        control.observe(first, report)
        control.observe(first, larger)
    again = control.choose(context).candidates[0]
    assert again.cr == good.cr
    assert again.encode_s == pytest.approx(good.encode_s)
    assert again.decode_s == pytest.approx(good.decode_s, rel=1e-3)


def excluded(clock: Clock) -> tuple[Controller, ServiceContext, float]:
    """A controller whose best profile once took ten times as long, so that it is not chosen any more."""
    control = Controller(library(FREE_RAW, profile("p", 4.0, 4e9)), analytic(), clock=clock)
    context = ServiceContext(nbytes=10**8, bandwidth=1e9)
    decision = control.choose(context)
    assert decision.profile == "p"
    encode_s = decision.candidates[0].encode_s
    for _ in range(20):
        control.observe(decision, Outcome("t", "p", 10**8, 10**8 // 4, 10 * encode_s, 0.0, 10 * encode_s))
    assert control.choose(context).profile == "raw"
    return control, context, encode_s


def test_what_a_profile_once_cost_fades_so_that_it_is_tried_again() -> None:
    clock = Clock()
    control, context, encode_s = excluded(clock)
    clock.now = module.REFRESH_S
    assert control.choose(context).profile == "raw"
    clock.now = 600.0
    again = control.choose(context)
    assert again.profile == "p"
    assert again.candidates[0].encode_s == pytest.approx(encode_s, rel=0.01)


def test_after_one_half_life_half_of_the_correction_is_left() -> None:
    clock = Clock()
    control, context, encode_s = excluded(clock)
    slow = control.profiles[-1]
    clock.now = 60.0
    control.choose(context)
    learned = control._priced[slow.name].terms[4] * 10**8
    assert learned == pytest.approx(10**0.5 * encode_s, rel=0.02), "half, as a logarithm"


def test_a_profile_that_is_still_slow_when_tried_again_is_known_to_be_at_once() -> None:
    clock = Clock()
    control, context, encode_s = excluded(clock)
    clock.now = 600.0
    decision = control.choose(context)
    assert decision.profile == "p"
    control.observe(decision, Outcome("t", "p", 10**8, 10**8 // 4, 10 * encode_s, 0.0, 10 * encode_s))
    assert control.choose(context).profile == "raw"


def test_seldom_reports_are_believed_in_full() -> None:
    clock = Clock()
    control = three(clock=clock)
    context = ServiceContext(nbytes=10**8, bandwidth=GBPS)
    decision = control.choose(context)
    good = decision.candidates[0]
    for _ in range(40):
        clock.now += 30.0
        control.observe(decision, Outcome("t", good.profile, 10**8, 10**8 // 9, 2 * good.encode_s))
    again = next(c for c in control.choose(context).candidates if c.profile == good.profile)
    assert again.encode_s == pytest.approx(2 * good.encode_s, rel=0.01)


def test_what_a_free_stage_once_cost_fades_too() -> None:
    clock = Clock()
    control = three(clock=clock)
    context = ServiceContext(nbytes=10**8, bandwidth=1e12)
    control.observe(control.choose(context), Outcome("t", "raw", 10**8, 10**8, decode_s=1.0))
    clock.now = 1200.0
    raw = next(c for c in control.choose(context).candidates if c.profile == "raw")
    assert raw.decode_s < 2e-4


class Misbehaving(Policy):
    """Answers whatever it is given; raises what is an exception."""

    def __init__(self, answer: Any) -> None:
        super().__init__(ComponentConfig())
        self.answer = answer

    def choose(self, context: ServiceContext, candidates: Sequence[Candidate]) -> Any:
        if isinstance(candidates, list):
            candidates.clear()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def observe(self, decision: Decision, outcome: Outcome) -> None:
        raise KeyError("arm")


ANSWERS = [Choice(-1, "x"), Choice(99, "x"), Choice(0, None), Choice(0.5, "x"), None, 0, (0, "x"), "raw"]  # type: ignore[arg-type]  # wrong on purpose
FAILURES = [RuntimeError("no"), RecursionError("deep"), UnknownNameError("gone")]


@pytest.mark.parametrize("answer", [*ANSWERS, *FAILURES], ids=repr)
def test_a_policy_that_fails_gives_way_to_raw(answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    control = Controller(library(FREE_RAW, profile("p", 8.0, 1e11)), Misbehaving(answer))
    for _ in range(3):
        decision = control.choose(ServiceContext(nbytes=56 * MIB, bandwidth=GBPS))
        assert decision.profile == "raw"
        assert decision.reason.startswith("policy failed: ")
        assert "p" in {c.profile for c in decision.candidates}
    assert control.policy_failures == 3
    said = [m for m in caplog.messages if "failed to choose" in m]
    assert len(said) == 1
    assert "Misbehaving" in said[0]


def test_a_policy_that_fails_to_learn_stops_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    control = Controller(library(FREE_RAW), Misbehaving(Choice(0, "x")), clock=Clock())
    decision = control.choose(ServiceContext(nbytes=10**8))
    for _ in range(2):
        control.observe(decision, Outcome("t", "raw", 10**8, 10**8, transfer_s=1.0))
    assert control.policy_failures == 2
    assert len([m for m in caplog.messages if "failed to observe" in m]) == 1
    assert control.links.estimate() == pytest.approx(1e8, rel=0.1)


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
