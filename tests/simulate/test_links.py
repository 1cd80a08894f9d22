"""Processor sharing in closed form, against sharing step by step."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve_core.simulate.links import PrivateLink, SharedLink
from kvserve_core.simulate.trace import Trace, constant

ARRIVALS = st.lists(st.tuples(st.floats(0, 20), st.floats(0.1, 50)), min_size=1, max_size=12)
TRACE = Trace([0, 3, 5, 6], [4.0, 20.0, 0.0, 7.0])


def ends(link: SharedLink | PrivateLink, arrivals: list[tuple[float, float]]) -> list[float]:
    """When each transfer ends, in order of ``arrivals``."""
    found = [0.0] * len(arrivals)
    waiting = sorted(range(len(arrivals)), key=lambda i: arrivals[i][0])
    while waiting or link.next_s < inf:
        if waiting and arrivals[waiting[0]][0] <= link.next_s:
            i = waiting.pop(0)
            link.join(*arrivals[i], i)
        else:
            now = link.next_s
            found[link.pop()] = now
    return found


def by_steps(trace: Trace, arrivals: list[tuple[float, float]]) -> list[float]:
    """The same by following every transfer from one change of the rate, arrival or end to the next."""
    left = {i: nbytes for i, (_, nbytes) in enumerate(arrivals)}
    found, now = [0.0] * len(arrivals), 0.0
    while left:
        active = [i for i in left if arrivals[i][0] <= now]
        changes = [t for i in left if (t := arrivals[i][0]) > now]
        period = now - now % trace.period_s
        changes += [t for n in (0, 1) for s in (0, 3, 5, 6) if (t := period + n * trace.period_s + s) > now]
        until = min(changes)
        each = trace.rate(now + 1e-12) / max(1, len(active))
        if active and each:
            until = min(until, now + min(left[i] for i in active) / each)
        for i in active:
            left[i] -= each * (until - now)
            if left[i] <= 1e-7:
                found[i] = until
                del left[i]
        now = until
    return found


@given(ARRIVALS)
def test_shared_ends_as_step_by_step(arrivals: list[tuple[float, float]]) -> None:
    assert ends(SharedLink(TRACE), arrivals) == pytest.approx(by_steps(TRACE, arrivals), abs=1e-4)


def test_two_share_and_the_second_gets_all_of_it_when_the_first_is_done() -> None:
    assert ends(SharedLink(constant(10.0)), [(0, 10), (0, 30)]) == [2.0, 4.0]
    assert ends(SharedLink(constant(10.0)), [(0, 30), (1, 5)]) == [3.5, 2.0]


def test_private_transfers_do_not_meet() -> None:
    assert ends(PrivateLink(constant(10.0)), [(0, 30), (1, 5)]) == [3.0, 1.5]


@given(ARRIVALS)
def test_a_lone_transfer_is_the_same_on_both(arrivals: list[tuple[float, float]]) -> None:
    for one in arrivals:
        assert ends(SharedLink(TRACE), [one]) == pytest.approx(ends(PrivateLink(TRACE), [one]))


def test_long_busy_periods_lose_no_digits() -> None:
    link, busy = SharedLink(constant(1e9)), 20_000
    found = ends(link, [(0.0009 * i, 1e6) for i in range(busy)])
    assert max(found) == pytest.approx(busy * 1e6 / 1e9, rel=1e-9)  # never idle, so the last ends with the work
    assert link.active == 0
