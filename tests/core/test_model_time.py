"""T_model, the deadline, and whether to load a prefix or to compute it anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from controller_cases import FREE_RAW, GBPS, MIB, Recorder, analytic, library, profile, three
from kvserve_core.controller import Controller
from kvserve_core.errors import ConfigError, UnknownNameError
from kvserve_core.latency import Speed
from kvserve_core.library import Profile, QualityRecord
from kvserve_core.model_time import ModelTime
from kvserve_core.policy import Candidate, Choice, Outcome, ServiceContext
from kvserve_core.profile import RAW_CHAIN, PipelineSpec

BPT = 57344
"""Bytes of KV per token."""


def context(cached: int, **more: Any) -> ServiceContext:
    return ServiceContext(nbytes=cached * BPT, bandwidth=GBPS, **more)


def test_t_model_is_queue_and_prefill_as_they_were_seen() -> None:
    model = ModelTime()
    assert model.seconds(1000) == 0.0
    assert model.prefill_s(1000) is None
    for _ in range(3):
        assert model.observe_prefill(1000, 0.1, queue_s=0.02)
    assert model.seconds(2000) == pytest.approx(0.22)
    assert model.prefill_s(2000) == pytest.approx(0.2)


def test_recent_prefills_count_most() -> None:
    model = ModelTime()
    for seconds in (*[0.1] * 50, *[0.2] * 50):
        model.observe_prefill(1000, seconds)
    assert model.seconds(1000) == pytest.approx(0.2, rel=0.01)


def test_the_first_prefills_count_alike() -> None:
    model = ModelTime()
    for seconds in (0.1, 0.3):
        model.observe_prefill(1000, seconds)
    assert model.seconds(1000) == pytest.approx(0.2)


@pytest.mark.parametrize(
    "report",
    [
        *((0, 1.0), (1000, 0.0), (1000, float("nan")), (1000, 1.0, -1.0), (1000, 1e9), (None, 1.0), (1000, "1s")),
        *((1000, 1.0, None), (1000, 1.0, float("nan"))),
    ],
)
def test_a_prefill_that_cannot_be_is_counted_and_ignored(report: tuple[Any, ...]) -> None:
    control = three()
    control.observe_prefill(*report)
    assert control.model.prefill_s_per_token is None
    assert control.refused_outcomes == 1
    assert not control.model.observe_decode(0, 1.0)


def test_tokens_become_t_model_and_what_has_passed_shortens_the_deadline() -> None:
    control = three()
    control.observe_prefill(1000, 0.1, queue_s=0.05)
    asked = context(1000, tokens=1000, slo_s=1.0, elapsed_s=0.3, model_s=0.01)
    decision = control.choose(asked)
    assert decision.context.model_s == pytest.approx(0.16)
    assert decision.context.slo_s == pytest.approx(0.7)
    same = control.choose(context(1000, model_s=0.16, slo_s=0.7))
    assert [c.latency_s for c in decision.candidates] == pytest.approx([c.latency_s for c in same.candidates])
    assert control.choose(decision.context).context == decision.context


def test_time_that_has_passed_alone_decides_whether_the_slo_is_met() -> None:
    control = three()
    asked = context(1000, slo_s=1.0)
    assert control.choose(asked).reason == "fastest"
    assert "least violating" in control.choose(replace(asked, elapsed_s=0.99)).reason


def test_tokens_to_generate_count_for_the_job_and_not_for_the_first_token() -> None:
    control = three()
    control.observe_decode(100, 2.0)
    control.observe_decode(100, -1.0)
    assert control.refused_outcomes == 1
    asked = context(1000, tokens=0, output_tokens=50, slo_s=0.5)
    assert control.choose(asked).reason == "fastest"
    decision = control.choose(replace(asked, slo_kind="jct"))
    assert decision.context.model_s == pytest.approx(1.0)
    assert "least violating" in decision.reason


def test_tokens_to_generate_count_where_t_model_is_said_too() -> None:
    control = three()
    control.observe_decode(100, 2.0)
    asked = context(1000, output_tokens=1000, slo_s=5.0, slo_kind="jct", model_s=0.1)
    decision = control.choose(asked)
    assert decision.context.model_s == pytest.approx(20.1)
    assert "least violating" in decision.reason
    assert control.choose(decision.context).context == decision.context, "they count once"
    assert control.choose(replace(asked, slo_kind="ttft")).context.model_s == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("field", "value"),
    [("tokens", -1), ("tokens", float("nan")), ("tokens", "many"), ("output_tokens", -1), ("slo_kind", "tpot")],
)
def test_a_reckoning_that_cannot_be_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        three().choose(replace(context(1000, tokens=10), **{field: value}))
    assert caught.value.path == field


def test_the_policy_sees_the_deadline_that_is_left() -> None:
    policy = Recorder()
    control = Controller(library(FREE_RAW), policy)
    assert control.choose(context(10, slo_s=1.0, elapsed_s=0.4)).context.slo_s == pytest.approx(0.6)


class Keeper(Recorder):
    """Picks the fastest, and keeps what it was told."""

    def choose(self, context: ServiceContext, candidates: Sequence[Candidate]) -> Choice:
        return Choice(0, "fastest")


# -- load or recompute -------------------------------------------------------------------------------------------------


def loader(fixed_s: float = 0.01, s_per_token: float = 1e-4) -> Controller:
    """A profile of 4x that costs 10 ms a fetch, and a prefill of 10,000 tokens/s."""
    control = Controller(library(profile("p", 4.0, 1e12, fixed_s=fixed_s)), analytic())
    control.observe_prefill(1000, 1000 * s_per_token, queue_s=5.0)
    return control


def test_a_prefix_is_loaded_from_the_length_at_which_that_is_faster() -> None:
    control = loader(s_per_token=2e-4)
    chosen = control.decide_load(10_000, context(10_000), profile="p")
    assert chosen.action == "load"
    limit = chosen.pays_from
    assert 50 < limit < 1000
    for tokens, action in ((int(limit) - 2, "recompute"), (int(limit) + 2, "load")):
        found = control.decide_load(tokens, context(tokens), profile="p")
        assert found.action == action
        assert found.pays_from == pytest.approx(limit)
        assert (found.load_s < found.recompute_s) == (action == "load")


def test_what_is_stored_need_not_be_encoded_again() -> None:
    control = loader()
    stored, encoded = (control.decide_load(4096, context(4096), profile=p) for p in ("p", None))
    assert encoded.load.profile == "p"
    assert encoded.load_s - stored.load_s == pytest.approx(0.01 + 4096 * BPT / 1e12)
    assert stored.load_s == pytest.approx(0.01 + 4096 * BPT / 1e12 + 4096 * BPT / 4 / GBPS)
    assert stored.recompute_s == pytest.approx(0.4096), "the queue is common to both"


def test_a_link_too_slow_never_pays() -> None:
    found = loader(s_per_token=1e-6).decide_load(4096, context(4096))
    assert (found.action, found.pays_from) == ("recompute", inf)
    assert "computing it anew" in found.reason


def test_until_a_prefill_was_observed_it_loads() -> None:
    found = three().decide_load(4096, context(4096))
    assert (found.action, found.recompute_s) == ("load", None)
    assert "no prefill" in found.reason


def test_no_tokens_are_no_load() -> None:
    assert loader().decide_load(0, context(0)).action == "recompute"


class Unasked(Recorder):
    """Fails who asks it."""

    def choose(self, context: ServiceContext, candidates: Sequence[Candidate]) -> Choice:
        raise AssertionError("a policy is for requests")


def test_whether_to_load_is_not_asked_of_the_policy() -> None:
    control = Controller(library(FREE_RAW, profile("p", 4.0, 1e12)), Unasked())
    control.observe_prefill(1000, 0.1)
    stored, encoded = (control.decide_load(4096, context(4096), profile=p) for p in ("raw", None))
    assert (stored.load.reason, encoded.load.profile, control.policy_failures) == ("fastest", "p", 0)
    assert stored.load_s == pytest.approx(4096 * BPT / GBPS)


def test_a_load_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="tokens"):
        loader().decide_load(-1, context(1))
    with pytest.raises(UnknownNameError, match="unknown profile 'q'"):
        loader().decide_load(1, context(1), profile="q")


def test_what_may_not_serve_a_request_is_not_loaded() -> None:
    control = loader(s_per_token=1.0)
    assert control.decide_load(4096, context(4096), profile="p").action == "load"
    found = control.decide_load(4096, context(4096, acceptable=frozenset({"raw"})), profile="p")
    assert (found.action, found.load_s, found.pays_from, found.recompute_s) == ("recompute", inf, inf, 4096.0)
    assert found.reason == "it may not be loaded: p: the peer cannot decode it"
    assert control.decide_load(4096, context(4096, acceptable=frozenset({"p"})), profile="p").action == "load"
    assert control.decide_load(4096, context(4096, acceptable=frozenset()), profile="raw").action == "load"
    lossy = Controller(library(profile("q", 4.0, 1e12, lower=0.98)), analytic())
    assert "below 0.99" in lossy.decide_load(4096, context(4096), profile="q").reason
    assert lossy.decide_load(4096, context(4096, min_quality=0.9), profile="q").action == "load"


def test_nobody_waits_while_a_store_is_written() -> None:
    """Encoding takes ten times as long as sending raw, decoding nothing: for a reader it is faster all the same."""
    slow = Profile(
        name="slow",
        pipeline=PipelineSpec(planes={"*": RAW_CHAIN}),
        cr=8.0,
        encode=Speed.of(GBPS / 10),
        decode=Speed(1e-3, 0.0),
        quality={"default": QualityRecord(value=1, lower=1, upper=1, metric="m", samples=3)},
    )
    policy = Keeper()
    control = Controller(library(FREE_RAW, slow), policy)
    asked = ServiceContext(nbytes=10**8, bandwidth=GBPS, model_s=0.5)
    assert control.choose(asked).profile == "raw"
    decision = control.choose(replace(asked, intent="store"))
    first = decision.candidates[0]
    assert (first.profile, first.encode_s) == ("slow", pytest.approx(8.0))
    assert first.latency_s == pytest.approx(0.5 + first.transfer_s + first.decode_s)
    took = Outcome("t", "slow", 10**8, 10**8 // 8, encode_s=8.0, transfer_s=0.1, decode_s=1e-3, total_s=0.11)
    control.observe(decision, took)
    (told,) = policy.outcomes
    assert told.spent_s == 0.11
    assert told.expected_s < 1.0


@pytest.mark.parametrize("chunk_bytes", [None, 2**20])
def test_the_fastest_to_read_is_the_optimum_over_all_profiles(chunk_bytes: float | None) -> None:
    profiles = [profile(f"p{i}", 1.3 + i, 4e9 / (i + 1), fixed_s=1e-3 * i) for i in range(9)]
    control = Controller(library(FREE_RAW, *profiles), analytic(), chunk_bytes=chunk_bytes)
    form = replace(control.form, stored=True)
    for gbps in (0.1, 1, 10, 100, 1000):
        asked = ServiceContext(nbytes=10**8, bandwidth=gbps * GBPS, intent="store")
        best = min(
            form.seconds(p.encode.seconds(10**8), 10**8 / p.cr / (gbps * GBPS), p.decode.seconds(10**8), 10**8)
            for p in control.profiles
        )
        assert control.choose(asked).candidates[0].latency_s == pytest.approx(best)


def test_a_store_reckons_with_the_link_that_it_will_be_read_over() -> None:
    control = three(prior_bandwidth=5000 * GBPS, priors={"archive": 5 * GBPS})
    asked = ServiceContext(nbytes=56 * MIB, intent="store")
    assert control.choose(asked).profile == "raw"
    decision = control.choose(replace(asked, link="archive"))
    assert (decision.profile, decision.bandwidth) == ("slow9", 5 * GBPS)
