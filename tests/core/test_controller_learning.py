"""What a controller learns from reports, what it refuses to, and how that fades."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller_cases import FREE_RAW, GBPS, MIB, Clock, Recorder, analytic, library, profile, three
from kvserve_core.controller import Controller
from kvserve_core.costs import REFRESH_S
from kvserve_core.policy import Outcome, ServiceContext

NAN, INF, HUGE = float("nan"), float("inf"), 10**400


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
    assert decision.bandwidth == pytest.approx(GBPS, rel=0.35)  # the worst of 6000 hostile sequences left 23 %


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
    clock.now = REFRESH_S
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
