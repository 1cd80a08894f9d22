"""Eq. 1, Theorem 6.1 and Theorem 6.2 against brute force; exact arithmetic where it can be had."""

from __future__ import annotations

import itertools
from fractions import Fraction
from math import inf
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve_core.latency import (
    Line,
    Speed,
    critical_bandwidth,
    crossing,
    latency_line,
    lower_envelope,
    threshold,
)

MIB = 2**20
small = st.integers(0, 6)
"""Few values, so that parallel, equal, dominated and flat lines and common crossings are frequent."""
lines_of = st.lists(st.builds(Line, small.map(Fraction), small.map(Fraction)), min_size=1, max_size=12)
fast = st.floats(1e-6, 1e3)
float_lines = st.lists(st.builds(Line, fast, fast), min_size=1, max_size=50)


def test_eq1_adds_model_encode_transfer_and_decode() -> None:
    line = latency_line(100.0, 4.0, Speed(1.0, 0.01), Speed(2.0, 0.02), model_s=5.0)
    assert line == Line(5.0 + (1.0 + 1.0) + (2.0 + 2.0), 25.0)
    assert line.at(0.5) == pytest.approx(11.0 + 12.5)


def test_raw_and_compressed_latency_of_56_mib_at_5_gbps() -> None:
    """1024 tokens of a 7B model: raw needs 94 ms of transfer, which 8.62x compression cuts to 10.9 ms."""
    x = 1 / 0.625e9
    raw = latency_line(56 * MIB, 1.0, Speed(), Speed(), 0.005)
    packed = latency_line(56 * MIB, 8.62, Speed.of(20e9), Speed.of(20e9), 0.005)
    assert raw.at(x) == pytest.approx(0.0989524, rel=1e-5)
    assert packed.at(x) == pytest.approx(0.005 + 56 * MIB * (2 / 20e9 + x / 8.62), rel=1e-12)


def test_speed_is_fixed_cost_plus_slope() -> None:
    assert Speed.of(4e9, fixed_s=0.5).seconds(2e9) == pytest.approx(1.0)


@given(cr=st.floats(1.01, 100), rate=st.floats(1e6, 1e12), nbytes=st.floats(1e3, 1e12))
def test_threshold_without_fixed_cost_is_theorem_6_1(cr: float, rate: float, nbytes: float) -> None:
    raw = latency_line(nbytes, 1.0, Speed(), Speed())
    packed = latency_line(nbytes, cr, Speed.of(rate), Speed())
    assert threshold(packed, raw) == pytest.approx(critical_bandwidth(cr, rate), rel=1e-6)


def test_threshold_at_its_limits() -> None:
    raw = Line(1.0, 10.0)
    assert threshold(Line(1.0, 5.0), raw) == inf, "compression that costs nothing always pays"
    assert threshold(Line(0.5, 10.0), raw) == inf, "as many bytes, but cheaper"
    assert threshold(Line(2.0, 10.0), raw) == 0.0, "sends no less and costs more"
    assert threshold(Line(0.5, 12.0), raw) == 0.0, "sends more: there is no bandwidth below which it wins"
    assert threshold(raw, raw) == 0.0, "no gain is not a gain"
    assert critical_bandwidth(1.0, 1e9) == critical_bandwidth(0.5, 1e9) == 0.0
    assert critical_bandwidth(2.0, inf) == inf


@given(lines_of.filter(lambda lines: len(lines) > 1), st.fractions(Fraction(1, 50), 50))
def test_threshold_is_where_a_line_begins_to_win(lines: list[Line], x: Fraction) -> None:
    line, base = lines[:2]
    limit = threshold(line, base)
    if line.slope < base.slope:
        assert (1 / x < limit) == (line.at(x) < base.at(x))


@given(lines_of, st.lists(st.fractions(0, 50), max_size=20))
def test_envelope_is_the_exact_minimum_everywhere(lines: list[Line], points: list[Fraction]) -> None:
    envelope = lower_envelope(lines)
    between = [(a + b) / 2 for a, b in zip(envelope.breaks, envelope.breaks[1:], strict=False)]
    for x in [Fraction(0), *points, *envelope.breaks, *between]:
        assert lines[envelope.best(x)].at(x) == min(line.at(x) for line in lines)


@given(lines_of)
def test_envelope_is_minimal_ordered_and_breaks_at_crossings(lines: list[Line]) -> None:
    envelope = lower_envelope(lines)
    chosen = [lines[i] for i in envelope.order]
    assert len(envelope.breaks) == len(chosen) - 1
    assert list(envelope.breaks) == [crossing(a, b) for a, b in itertools.pairwise(chosen)]
    assert all(a < b for a, b in zip((0, *envelope.breaks), envelope.breaks, strict=False))
    assert all(a.slope > b.slope for a, b in itertools.pairwise(chosen))


@given(float_lines, st.lists(st.floats(0, 1e6), max_size=30))
def test_envelope_of_floats_is_the_minimum_up_to_rounding(lines: list[Line], points: list[float]) -> None:
    envelope = lower_envelope(lines)
    for x in [0.0, *points, *envelope.breaks]:
        assert lines[envelope.best(x)].at(x) <= min(line.at(x) for line in lines) * (1 + 1e-12)


@given(lines_of, st.randoms(use_true_random=False))
def test_envelope_does_not_depend_on_order_except_between_equal_lines(lines: list[Line], random: Random) -> None:
    shuffled = random.sample(lines, len(lines))
    a, b = lower_envelope(lines), lower_envelope(shuffled)
    assert [lines[i] for i in a.order] == [shuffled[i] for i in b.order]
    assert a.breaks == b.breaks


def test_ties_go_to_the_cheaper_line_and_to_the_first_of_equals() -> None:
    raw, packed = Line(0.0, 2.0), Line(1.0, 1.0)
    envelope = lower_envelope([packed, raw, packed, raw])
    assert envelope.order == (1, 0)
    assert envelope.breaks == (1.0,)
    assert envelope.best(1.0) == 1, "compression is used only where it is faster"
    assert envelope.best(1.0000001) == 0


def test_of_parallel_lines_only_the_lowest_stays() -> None:
    assert lower_envelope([Line(3.0, 1.0), Line(2.0, 1.0), Line(4.0, 1.0)]).order == (1,)
    assert lower_envelope([Line(3.0, 0.0), Line(2.0, 0.0)]).order == (1,)


def test_a_line_that_touches_in_one_point_is_not_on_the_envelope() -> None:
    assert lower_envelope([Line(0.0, 2.0), Line(1.0, 1.0), Line(2.0, 0.0)]).order == (0, 2)


def test_empty_input_gives_an_empty_envelope() -> None:
    assert lower_envelope([]).order == ()
