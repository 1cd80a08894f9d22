"""The pipelined form of eq. 1, for one profile and for many, and the choice against brute force."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller_cases import FREE_RAW, GBPS, Recorder, analytic, library, profile, three
from kvserve_core.controller import Controller
from kvserve_core.errors import ConfigError
from kvserve_core.overlap import Form
from kvserve_core.policy import Outcome, ServiceContext

Costs = tuple[float, float, float]
"""Seconds of encoding, of decoding, wire bytes per original byte."""
seconds = st.one_of(st.just(0.0), st.floats(1e-6, 10.0))
costs_of = st.lists(st.tuples(seconds, seconds, st.floats(0.02, 2.0)), min_size=1, max_size=20)


def simulated(encode_s: float, transfer_s: float, decode_s: float, chunks: int) -> float:
    """When the last of equal chunks leaves the third of three stages, each of which takes one chunk at a time."""
    free = [0.0, 0.0, 0.0]
    for _ in range(chunks):
        ready = 0.0
        for stage, whole in enumerate((encode_s, transfer_s, decode_s)):
            ready = free[stage] = max(ready, free[stage]) + whole / chunks
    return free[-1]


@given(seconds, seconds, seconds, st.integers(1, 40))
def test_the_form_is_a_pipeline_of_equal_chunks(encode: float, transfer: float, decode: float, chunks: int) -> None:
    found = Form(1e6).seconds(encode, transfer, decode, chunks * 1e6)
    assert found == pytest.approx(simulated(encode, transfer, decode, chunks), abs=1e-12)


def test_without_chunks_or_with_one_the_stages_follow_each_other() -> None:
    assert Form().seconds(1.0, 2.0, 3.0, 10**9) == 6.0
    assert Form(1e9).seconds(1.0, 2.0, 3.0, 10**9) == Form(1e9).seconds(1.0, 2.0, 3.0, 10) == 6.0
    assert Form(1e6).seconds(1.0, 2.0, 3.0, 10**9) == pytest.approx(3.003)


def test_what_never_ends_is_infinite_and_no_less() -> None:
    assert Form(1e6).seconds(1.0, float("inf"), 2.0, 1e12) == float("inf")


@given(costs_of, st.floats(1e-4, 1e3), st.one_of(st.none(), st.floats(1e5, 1e9)))
def test_many_at_once_are_the_form_and_its_slope(costs: list[Costs], raw_s: float, chunk: float | None) -> None:
    form, nbytes = Form(chunk), 1e8
    columns = np.array([(wire, encode, 0.0, 0.0, decode / nbytes) for encode, decode, wire in costs]).T
    found, slopes = form.lines(columns, nbytes, raw_s)
    for i, (encode, decode, wire) in enumerate(costs):
        at = [form.seconds(encode, wire * raw_s * more, decode, nbytes) for more in (1.0, 1.0 + 1e-6)]
        assert found[i] == pytest.approx(at[0], rel=1e-9)
        if abs(wire * raw_s - max(encode, decode)) > 1e-3 * wire * raw_s:  # not at the bend
            assert slopes[i] * 1e-6 * raw_s == pytest.approx(at[1] - at[0], rel=1e-2, abs=1e-12 * at[0])


def test_the_bend_is_where_the_link_becomes_the_slowest_stage() -> None:
    columns, form = np.array([[0.5], [1.0], [0.0], [0.2], [0.0]]), Form(1e7)
    for raw_s, slope in ((1.9, 0.05), (2.1, 0.5)):
        assert form.lines(columns, 1e8, raw_s)[1] == pytest.approx(slope)


def test_overlap_makes_compression_pay_on_faster_links() -> None:
    made = library(FREE_RAW, profile("p", 4.0, 4e9))
    context = ServiceContext(nbytes=10**9, bandwidth=16 * GBPS)
    assert Controller(made, analytic()).choose(context).profile == "raw"
    decision = Controller(made, analytic(), chunk_bytes=2**22).choose(context)
    assert decision.profile == "p"
    best = decision.candidates[0]
    assert best.latency_s == pytest.approx(0.25, rel=0.05)
    assert best.encode_s == best.decode_s == pytest.approx(0.25)
    assert best.transfer_s == pytest.approx(0.125)


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.floats(0.5, 30), st.floats(1e8, 1e12), st.floats(0, 0.01)), max_size=30),
    st.integers(1, 2**40),
    st.floats(1e5, 1e12),
)
def test_the_overlapped_choice_is_the_optimum_over_all_profiles(
    made: list[tuple[float, float, float]], nbytes: int, bandwidth: float
) -> None:
    profiles = [FREE_RAW, *(profile(f"p{i}", *args) for i, args in enumerate(made))]
    control = Controller(library(*profiles), analytic(), chunk_bytes=2**20)
    context = ServiceContext(nbytes=nbytes, bandwidth=bandwidth)
    decision = control.choose(context)
    best = min(control.estimate(p, decision).latency_s for p in control.feasible(context))
    assert decision.candidates[0].latency_s <= best * (1 + 1e-9)


def test_explain_shows_overlapped_times() -> None:
    text = three(chunk_bytes=2**20).choose(ServiceContext(nbytes=10**8, bandwidth=GBPS)).explain()
    assert "lossless: " in text
    assert "pays below" not in text


def test_what_was_spent_on_an_overlapped_transfer_is_the_consumers_total() -> None:
    policy = Recorder()
    control = Controller(library(FREE_RAW, profile("p", 10.0, 4e9)), policy, chunk_bytes=2**20)
    decision = control.choose(ServiceContext(nbytes=10**8, bandwidth=GBPS))
    given = Outcome("t", decision.profile, 10**8, 10**7, 0.1, 0.2, 0.1, total_s=0.25)
    control.observe(decision, given)
    control.observe(decision, replace(given, total_s=0.0))
    assert given.spent_s == 0.0, "what was handed in stays as it is"
    total, parts = policy.outcomes
    assert replace(total, spent_s=0.0, expected_s=0.0) == given
    assert total.spent_s == 0.25
    assert parts.spent_s == pytest.approx(0.2 + 0.2 / (10**8 / 2**20))


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "4MiB"])
def test_a_chunk_that_is_none_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match=r"chunk_bytes: .* is no size of a chunk"):
        three(chunk_bytes=value)
