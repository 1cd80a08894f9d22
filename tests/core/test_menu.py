"""What a menu offers at one point, against the whole envelope of Theorem 6.2."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller_cases import FREE_RAW, GBPS, MIB, Clock, library, profile, three
from kvserve_core.controller import Controller
from kvserve_core.costs import OVERDUE_S, REFRESH_S, Costs
from kvserve_core.latency import Line, lower_envelope
from kvserve_core.menu import KEPT_S, MAX_SIDES, Menu, neighbours
from kvserve_core.policy import Outcome, ServiceContext
from kvserve_core.pricing import Priced
from kvserve_plugins.policies.analytic import Analytic

whole = st.integers(0, 400)
lines_of = st.lists(st.tuples(whole, whole), min_size=1, max_size=30, unique=True)


@settings(max_examples=300)
@given(lines_of, st.floats(0.01, 100.0))
def test_neighbours_are_those_of_the_lower_envelope(given: list[tuple[int, int]], x: float) -> None:
    lines = [Line(float(a), float(b)) for a, b in given]
    envelope = lower_envelope(lines)
    place = envelope.position(x)
    if min((abs(x / b - 1) for b in envelope.breaks), default=1.0) < 1e-6:
        return  # at a crossing two lines are the lowest
    latency, slope = np.array([line.at(x) for line in lines]), np.array([line.slope for line in lines])
    above, below = neighbours(latency, slope, envelope.order[place], x)
    for found, wanted in ((below, place - 1), (above, place + 1)):
        if 0 <= wanted < len(envelope.order):
            _meets_at(lines, envelope.order[place], found, envelope.breaks[min(place, wanted)])
        else:
            assert found == envelope.order[place]


def _meets_at(lines: list[Line], best: int, found: int, x: float) -> None:
    """``found`` crosses ``best`` where the envelope breaks: it is the neighbour, or touches it there."""
    assert found != best
    assert lines[found].at(x) == pytest.approx(lines[best].at(x), rel=1e-6, abs=1e-6)


def test_a_line_that_may_not_serve_is_no_neighbour() -> None:
    latency, slope = np.array([1.0, 1.1, np.inf, 1.2]), np.array([0.5, 0.4, 0.3, 0.9])
    assert neighbours(latency, slope, 0, 1.0) == (1, 3)


def test_what_touches_the_axis_only_is_no_neighbour() -> None:
    latency, slope = np.array([1.0, 1.5]), np.array([1.0, 1.5])
    assert neighbours(latency, slope, 0, 1.0) == (0, 0)


def test_a_refused_profile_is_never_offered_however_fast() -> None:
    control = three()
    context = ServiceContext(nbytes=56 * MIB, bandwidth=5 * GBPS, acceptable=frozenset({"fast5"}))
    assert {c.profile for c in control.choose(context).candidates} == {"raw", "fast5"}


def test_neighbours_are_kept_for_a_while_and_then_follow_the_costs() -> None:
    clock = Clock()
    control = Controller(
        library(FREE_RAW, profile("p", 4.0, 4e9), profile("q", 5.0, 3e9), profile("r", 8.0, 1e9)),
        Analytic(Analytic.Config()),
        clock=clock,
    )
    context = ServiceContext(nbytes=10**8, bandwidth=GBPS / 10)
    made = control.choose(context)
    names = [c.profile for c in made.candidates]
    assert names == ["r", "q", "raw"]
    for _ in range(20):
        control.observe(made, Outcome("t", "q", 10**8, 2 * 10**7, encode_s=9.0, decode_s=9.0))
    assert {c.profile for c in control.choose(context).candidates} == {"r", "p", "q", "raw"}, "the runner-up is exact"
    clock.now += KEPT_S
    assert {c.profile for c in control.choose(context).candidates} == {"r", "p", "raw"}


def test_what_is_remembered_of_neighbours_is_bounded() -> None:
    every = [Priced(profile(f"p{i}", 1.2 + i, 40e9 / 1.5**i)) for i in range(40)]
    menu = Menu(Costs(every), [(p, 1.0) for p in every], (), ())
    for power in range(50):
        for tenth in range(1, 400):
            menu.near(2.0**power, 10.0 ** (12 - tenth / 40), 0.0)
            assert len(menu._beside) <= MAX_SIDES
    assert len(menu._beside) > 100


def test_costs_fade_one_profile_a_decision_and_all_that_are_overdue() -> None:
    clock = Clock()
    control = three(clock=clock)
    context = ServiceContext(nbytes=10**8, bandwidth=GBPS)
    made = control.choose(context)
    for name, cr in (("fast5", 5.11), ("slow9", 8.62)):
        took = 10 * next(p for p in control.profiles if p.name == name).encode.seconds(10**8)
        control.observe(made, Outcome("t", name, 10**8, round(10**8 / cr), encode_s=took))
    slow = {p.profile.name: p.terms for p in control.feasible(context)}

    def moved() -> set[str]:
        return {p.profile.name for p in control.feasible(context) if p.terms[3:5] != slow[p.profile.name][3:5]}

    clock.now = REFRESH_S
    control.choose(context)
    assert moved() == {"fast5"}
    control.choose(context)
    assert moved() == {"fast5", "slow9"}
    slow = {p.profile.name: p.terms for p in control.feasible(context)}
    clock.now += REFRESH_S + OVERDUE_S
    control.choose(context)
    assert moved() == {"fast5", "slow9"}
