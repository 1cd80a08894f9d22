"""Fetches that overlap on a link: what one more will get, and what is no overlap."""

from __future__ import annotations

import pytest

from controller_cases import Clock
from kvserve_core.bandwidth import BandwidthEstimator


def fetch(links: BandwidthEstimator, bytes_per_s: float) -> None:
    links.observe("a", 10_000_000, 10_000_000 / bytes_per_s)


def test_a_link_on_which_nothing_ends_is_not_getting_faster() -> None:
    clock = Clock()
    links = BandwidthEstimator(1e9, clock=clock)
    for _ in range(20):
        fetch(links, 1e7)
        clock.now += 1.0
    before = links.estimate("a", active=4)
    for idle_s in (60.0, 600.0, 36000.0):
        clock.now += idle_s
        assert links.estimate("a", active=4) == before
    assert links.estimate("a", active=0) == pytest.approx(1e9), "nobody is on it: it is as good as new"


def test_who_is_first_on_record_shares_with_those_that_are_on_the_link_already() -> None:
    links = BandwidthEstimator(1e9, priors={"disk": 2e8})
    assert [links.estimate("a", active=n) for n in (0, 1, 9)] == [1e9, 5e8, 1e8]
    assert links.estimate("disk", active=3) == 5e7


def shared(count: int, capacity: float = 1e9, rounds: int = 40) -> BandwidthEstimator:
    """A link on which ``count`` fetches always run at a time, each with its part."""
    clock = Clock()
    links = BandwidthEstimator(capacity, clock=clock)
    for _ in range(rounds):
        clock.now += count * 1e7 / capacity
        for _ in range(count):
            links.observe("a", 10**7, count * 1e7 / capacity)
    return links


@pytest.mark.parametrize("count", [1, 2, 5])
def test_who_knows_how_many_fetches_run_gets_the_part_of_one_more(count: int) -> None:
    links = shared(count)
    assert links.estimate("a") == pytest.approx(1e9 / count, rel=0.05)
    for active in (0, 1, 9):
        assert links.estimate("a", active) == pytest.approx(1e9 / (1 + active), rel=0.05)


def test_fetches_that_overlap_in_part_are_told_apart_from_a_slow_link() -> None:
    clock = Clock()
    links = BandwidthEstimator(1e9, clock=clock)
    for _ in range(60):  # each begins when the one before is half done; all the while two run
        clock.now += 0.01
        links.observe("a", 10**7, 0.02)
    assert links.estimate("a", 0) == pytest.approx(1e9, rel=0.05)


def test_sharing_survives_a_change_of_the_link() -> None:
    links = shared(2)
    for _ in range(8):
        links._clock.now += 0.2  # type: ignore[attr-defined]  # the test's clock
        for _ in range(2):
            links.observe("a", 10**7, 0.2)
    assert links.estimate("a", 0) == pytest.approx(1e8, rel=0.1)


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_a_clock_that_jumps_does_not_make_fetches_overlap(jump_s: float) -> None:
    """One fetch after the other, none of them at the same time: one more gets all of the link, before and after."""
    clock = Clock()
    links = BandwidthEstimator(1e8, clock=clock)

    def one_after_the_other(count: int) -> None:
        for _ in range(count):
            clock.now += 0.1
            fetch(links, 1e8)

    one_after_the_other(20)
    clock.now += jump_s
    one_after_the_other(20)
    assert links.estimate("a", active=0) == pytest.approx(1e8, rel=0.01)


def test_reports_of_two_threads_may_come_in_the_wrong_order() -> None:
    """Two fetches at a time, reported a little late: that is not a clock that was set back."""
    links = BandwidthEstimator(1e8)
    for i in range(40):
        late = 0.001 if i % 2 else 0.0
        links.observe("a", 10**7, 0.2, 100.0 + 0.1 * i - late)
    assert links.estimate("a", active=1, now=104.0) == pytest.approx(5e7, rel=0.05)
    assert links.estimate("a", active=0, now=104.0) == pytest.approx(1e8, rel=0.05)
