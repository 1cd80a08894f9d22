"""Where curves of both forms of eq. 1 cross, against the formula itself over many bandwidths."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller_cases import profile
from kvserve_core.cli.explain_curves import Curve, curve, pays_below, stretches
from kvserve_core.latency import Line, lower_envelope, threshold
from kvserve_core.overlap import Form
from kvserve_core.pricing import Priced

NBYTES = 10**8
RATES = np.geomspace(1e6, 1e13, 400)
figures = st.tuples(st.floats(0.9, 30), st.floats(1e8, 1e12))
made = st.lists(figures, min_size=2, max_size=6)
forms = st.sampled_from([Form(), Form(2e8), Form(3e7), Form(1e6)])


def priced(each: list[tuple[float, float]]) -> list[Priced]:
    return [Priced(profile(f"p{i}", cr, speed)) for i, (cr, speed) in enumerate(each)]


def seconds(each: Priced, rate: float, form: Form) -> float:
    encode_s, decode_s, wire = each.costs(NBYTES)
    return form.seconds(encode_s, wire / rate, decode_s, NBYTES)


@given(made, forms)
def test_a_curve_is_the_formula(each: list[tuple[float, float]], form: Form) -> None:
    for one in priced(each):
        wanted = [seconds(one, float(rate), form) for rate in RATES]
        assert curve(one, NBYTES, form).at(1 / RATES) == pytest.approx(wanted, rel=1e-9)


@given(made, forms)
def test_the_envelope_names_the_fastest_everywhere(each: list[tuple[float, float]], form: Form) -> None:
    profiles = priced(each)
    found = stretches([curve(p, NBYTES, form) for p in profiles])
    assert found[0][1] is None
    assert all(a != b for (a, _), (b, _) in pairwise(found))
    for rate in RATES:
        name = [i for i, top in found if top is None or rate < top][-1]
        every = [seconds(p, float(rate), form) for p in profiles]
        assert every[name] <= min(every) * (1 + 1e-6)


@given(made, forms)
def test_below_the_threshold_it_always_pays_and_just_above_it_does_not(
    each: list[tuple[float, float]], form: Form
) -> None:
    base, other, *_ = priced(each)
    limit = pays_below(curve(other, NBYTES, form), curve(base, NBYTES, form))
    for rate in RATES[limit * 0.999 > RATES]:
        assert seconds(other, float(rate), form) <= seconds(base, float(rate), form) * (1 + 1e-9)
    if 1e3 < limit < 1e15:
        assert seconds(other, limit * 1.0001, form) >= seconds(base, limit * 1.0001, form) * (1 - 1e-9)


def test_in_turn_it_is_theorems_6_1_and_6_2() -> None:
    profiles = priced([(1.0, 1e12), (8.62, 12e9), (5.11, 26e9), (2.0, 1e9)])
    lines, curves = [p.line(NBYTES) for p in profiles], [curve(p, NBYTES, Form()) for p in profiles]
    for line, each in zip(lines[1:], curves[1:], strict=True):
        assert pays_below(each, curves[0]) == pytest.approx(threshold(line, lines[0]))
    envelope = lower_envelope(lines)
    found = stretches(curves)
    assert tuple(i for i, _ in found) == envelope.order
    assert [top for _, top in found[1:]] == pytest.approx([1 / x for x in envelope.breaks])


def straight(intercept: float, slope: float) -> Curve:
    return Curve(Line(intercept, slope), Line(intercept, slope))


@pytest.mark.parametrize(
    ("each", "limit"),
    [
        (straight(1, 1), 1.0),
        (straight(0, 1), inf),
        (straight(1, 2), 0.0),
        (straight(0, 2), 0.0),
        (straight(0, 3), 0.0),
        (Curve(Line(0, 0.5), Line(-3, 1)), inf),
        (Curve(Line(1, 0.5), Line(-5, 1.5)), 1.5),
    ],
)
def test_the_ends(each: Curve, limit: float) -> None:
    assert pays_below(each, straight(0, 2)) == pytest.approx(limit)
