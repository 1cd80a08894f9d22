"""The goodput estimator: a prior is only a prior, age and bytes weigh, links are bounded."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve_core.bandwidth import MIN_BYTES, BandwidthEstimator
from kvserve_core.errors import ConfigError


class Clock:
    """A clock that tests move."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def fetch(links: BandwidthEstimator, bytes_per_s: float, nbytes: int = 10_000_000, link: str = "a") -> None:
    links.observe(link, nbytes, nbytes / bytes_per_s)


def test_the_prior_serves_until_the_first_fetch() -> None:
    links = BandwidthEstimator(1e9)
    assert links.estimate("a") == 1e9
    fetch(links, 1e8)
    assert links.estimate("a") == pytest.approx(1e8, rel=0.2)
    assert links.estimate("b") == 1e9


@given(
    truth=st.floats(1e5, 1e11),
    wrong=st.sampled_from([0.1, 10.0]),
    sizes=st.tuples(st.integers(MIN_BYTES, 10**9), st.integers(MIN_BYTES, 10**9)),
)
def test_a_prior_wrong_by_ten_is_within_a_fifth_after_two_fetches(
    truth: float, wrong: float, sizes: tuple[int, int]
) -> None:
    links = BandwidthEstimator(truth * wrong, clock=Clock())
    for nbytes in sizes:
        fetch(links, truth, nbytes)
    assert links.estimate("a") == pytest.approx(truth, rel=0.2)


def test_small_transfers_do_not_poison_the_estimate() -> None:
    links = BandwidthEstimator(1e9, clock=Clock())
    fetch(links, 1e9)
    before = links.estimate("a")
    for _ in range(10_000):
        links.observe("a", MIN_BYTES - 1, 0.01)
    assert links.estimate("a") == before
    links.observe("a", MIN_BYTES, 0.0001)
    assert links.estimate("a") == pytest.approx(before, rel=0.01)


def test_old_fetches_fade_with_time_not_with_count() -> None:
    clock = Clock()
    links = BandwidthEstimator(1e9, half_life_s=5.0, clock=clock)
    for _ in range(100):
        fetch(links, 1e9)
    clock.now += 5 * 20
    fetch(links, 1e8)
    assert links.estimate("a") == pytest.approx(1e8, rel=0.001)


def test_one_half_life_halves_the_weight() -> None:
    clock = Clock()
    links = BandwidthEstimator(1e9, half_life_s=5.0, clock=clock)
    fetch(links, 1e9, 10**9)
    clock.now += 5.0
    links.observe("a", 10**9, 2.0)
    assert links.estimate("a") == pytest.approx((0.51 + 1.0) * 1e9 / (0.51 + 2.0))


def test_a_clock_that_stands_still_or_a_bad_report_does_no_harm() -> None:
    links = BandwidthEstimator(1e9, clock=Clock())
    for nbytes, seconds in ((0, 1.0), (10**9, 0.0), (10**9, -1.0), (-5, 1.0)):
        links.observe("a", nbytes, seconds)
    assert links.estimate("a") == 1e9
    assert len(links) == 0


def test_links_are_bounded_and_the_longest_unused_goes_first() -> None:
    links = BandwidthEstimator(1e9, max_links=2)
    for link in ("a", "b", "a", "c"):
        fetch(links, 1e8, link=link)
    assert len(links) == 2
    assert links.estimate("b") == 1e9
    assert links.estimate("a") < 2e8
    assert links.estimate("c") < 2e8


def test_concurrent_observers_lose_no_bytes() -> None:
    links = BandwidthEstimator(1e8, clock=Clock())
    threads = [threading.Thread(target=lambda: [fetch(links, 1e8) for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    links.observe("a", 2000 * 10_000_000, 0.0001)
    assert links.estimate("a") == pytest.approx(2e8, rel=1e-3), "2000 fetches and one burst of as many bytes"


@pytest.mark.parametrize("prior", [0.0, -1.0, float("inf"), float("nan")])
def test_a_prior_that_is_no_bandwidth_is_refused(prior: float) -> None:
    with pytest.raises(ConfigError, match="prior bandwidth"):
        BandwidthEstimator(prior)
