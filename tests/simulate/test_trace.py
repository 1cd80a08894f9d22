"""Traces: the integral of a bandwidth and its inverse, and the files they come from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve_core.errors import ConfigError
from kvserve_core.simulate.trace import Trace, constant, read_traces

STEPS = st.lists(st.tuples(st.floats(0.01, 10), st.floats(0.5, 100)), min_size=1, max_size=8)


def stepped(steps: list[tuple[float, float]]) -> Trace:
    times = [0.0, *np.cumsum([span for span, _ in steps])[:-1].tolist()]
    return Trace(times, [rate for _, rate in steps])


@given(STEPS, st.floats(0, 200))
def test_when_is_the_inverse_of_carried(steps: list[tuple[float, float]], time_s: float) -> None:
    trace = stepped(steps)
    assert trace.when(trace.carried(time_s)) == pytest.approx(time_s, rel=1e-9, abs=1e-9)


@given(STEPS, st.lists(st.floats(0, 200), min_size=1))
def test_many_at_once_are_the_same(steps: list[tuple[float, float]], times: list[float]) -> None:
    trace = stepped(steps)
    carried = [trace.carried(t) for t in times]
    assert trace.carried_all(np.array(times)).tolist() == pytest.approx(carried, rel=1e-9, abs=1e-6)
    assert trace.when_all(np.array(carried)).tolist() == pytest.approx(times, rel=1e-9, abs=1e-6)


def test_steps_and_their_repetition() -> None:
    trace = Trace([0, 10], [5.0, 1.0])  # the last step lasts as long as the one before
    assert trace.period_s == 20
    assert [trace.rate(t) for t in (0, 9.9, 10, 19.9, 20, 31)] == [5, 5, 1, 1, 5, 1]
    assert [trace.carried(t) for t in (0, 4, 10, 15, 20, 22)] == [0, 20, 50, 55, 60, 70]
    assert [trace.when(b) for b in (0, 20, 50, 55, 60, 70)] == [0, 4, 10, 15, 20, 22]


def test_nothing_gets_through_an_outage() -> None:
    trace = Trace([0, 1, 2], [10.0, 0.0, 10.0])
    assert trace.when(10) == 1  # the last byte before it
    assert trace.when(10.5) == pytest.approx(2.05)
    assert Trace([0, 1], [10.0, 0.0]).when(10) == 1  # an outage at the end of a round
    assert Trace([0, 1], [10.0, 0.0]).when(15) == pytest.approx(2.5)


def test_a_constant_trace() -> None:
    assert constant(4.0).carried(2.5) == 10
    assert constant(4.0).when(10) == 2.5


@pytest.mark.parametrize(
    ("times", "rates", "message"),
    [
        ([], [], "at least one"),
        ([0, 1], [1.0], "as many times as rates"),
        ([1, 2], [1.0, 1.0], "begin at 0"),
        ([0, 2, 2], [1.0, 1.0, 1.0], "and rise"),
        ([0], [-1.0], "must be 0 or from 0.001 to 1e\\+15 bytes/s"),
        ([0], [float("inf")], "must be 0 or from"),
        ([0, 1], [0.0, 0.0], "not all 0"),
    ],
)
def test_what_is_no_trace(times: list[float], rates: list[float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Trace(times, rates)


@pytest.mark.parametrize(
    "text",
    [
        "time_s,bandwidth\n0,8Gbps\n1,2e9\n",
        "time_s,bandwidth_gbps,other\n0,8,x\n1,16,y\n",
        "time_s,bandwidth_mbps\n0,8000\n1,16000\n",
    ],
)
def test_units_of_a_file(text: str) -> None:
    trace = read_traces(text)["default"]
    assert [trace.rate(0), trace.rate(1)] == [1e9, 2e9]


def test_several_links_in_a_file() -> None:
    found = read_traces("time_s,bandwidth,link\n0,8Gbps,a\n0,16Gbps,b\n5,24Gbps,a\n")
    assert {name: trace.rate(7) for name, trace in found.items()} == {"a": 3e9, "b": 2e9}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("time_s,speed\n0,1\n", "f.csv: needs the columns 'time_s' and one of bandwidth"),
        ("time_s,bandwidth\n", "has no rows"),
        ("time_s,bandwidth\n0,8Gbps\nx,8Gbps\n", "f.csv: line 3: .*'x'"),
        ("time_s,bandwidth\n0,quick\n", "line 2: bandwidth 'quick' is not understood"),
        ("time_s,bandwidth_gbps\n0\n", "line 2"),
        ("time_s,bandwidth\n5,8Gbps\n", "f.csv: the times of a trace must begin at 0"),
    ],
)
def test_what_is_wrong_with_a_file(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_traces(text, "f.csv")
