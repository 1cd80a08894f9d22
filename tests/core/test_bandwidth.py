"""The goodput estimator: a prior is only a prior, age and bytes weigh, links are bounded."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve_core.bandwidth import HALF_LIFE_S, MAX_LINKS, MIN_BYTES, BandwidthEstimator
from kvserve_core.errors import ConfigError
from kvserve_core.goodput import FASTEST, SLOWEST


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
    links = BandwidthEstimator(1e9, clock=clock)
    for _ in range(100):
        fetch(links, 1e9)
    clock.now += HALF_LIFE_S * 20
    fetch(links, 1e8)
    assert links.estimate("a") == pytest.approx(1e8, rel=0.001)


def test_one_half_life_halves_the_weight() -> None:
    clock = Clock()
    links = BandwidthEstimator(1e9, clock=clock)
    fetch(links, 1e9, 10**9)
    clock.now += HALF_LIFE_S
    links.observe("a", 10**9, 2.0)
    assert links.estimate("a") == pytest.approx((0.51 + 1.0) * 1e9 / (0.51 + 2.0))


def test_a_clock_that_stands_still_or_a_bad_report_does_no_harm() -> None:
    links = BandwidthEstimator(1e9, clock=Clock())
    for nbytes, seconds in (
        *((0, 1.0), (10**9, 0.0), (10**9, -1.0), (-5, 1.0), (2**62, 1.0)),
        *((10**9, s) for s in (float("inf"), float("nan"), 10**400, 1e9)),
    ):
        links.observe("a", nbytes, seconds)
    assert links.estimate("a") == 1e9
    assert len(links) == 0


def test_links_are_bounded_and_the_longest_unused_goes_first() -> None:
    links = BandwidthEstimator(1e9)
    for link in ("a", "b", *(f"l{i}" for i in range(MAX_LINKS - 2)), "a", "c"):
        fetch(links, 1e8, link=link)
    assert len(links) == MAX_LINKS
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


@pytest.mark.parametrize("prior", [0.0, -1.0, float("inf"), float("nan"), "10Gbps", None])
def test_a_prior_that_is_no_bandwidth_is_refused(prior: Any) -> None:
    with pytest.raises(ConfigError, match="prior bandwidth"):
        BandwidthEstimator(prior)


MIB = 2**20
MIXED = [MIB, 2 * MIB, 8 * MIB, 64 * MIB]
LARGE = [16 * MIB, 56 * MIB, 200 * MIB]


class Link:
    """A link with a cost per fetch of 1 to 5 ms whatever its size, and noise; its clock runs with its fetches."""

    def __init__(self, bytes_per_s: float, prior: float, seed: int, noise: float = 0.05) -> None:
        self.bytes_per_s, self._noise = bytes_per_s, noise
        self._random, self._clock = random.Random(seed), Clock()
        self.links = BandwidthEstimator(prior, clock=self._clock)

    def fetch(self, sizes: Sequence[int], times: float = 1.0) -> float:
        nbytes = self._random.choice(sizes)
        seconds = self._random.uniform(1e-3, 5e-3) + nbytes / self.bytes_per_s
        seconds *= self._random.lognormvariate(0.0, self._noise) * times
        self._clock.now += seconds
        self.links.observe("a", nbytes, seconds)
        return self.links.estimate("a") / self.bytes_per_s


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("truth", [1e8, 6e8, 1.25e9])
def test_what_each_fetch_costs_is_not_taken_for_a_slow_link(truth: float, seed: int) -> None:
    link = Link(truth, 10 * truth, seed)
    found = [link.fetch(MIXED) for _ in range(24)]
    assert 0.85 < found[-1] < 1.15


@pytest.mark.parametrize("seed", range(20))
def test_a_link_of_100_gbps_is_not_taken_for_one_of_50(seed: int) -> None:
    link = Link(12.5e9, 1.25e9, seed, noise=0.02)
    found = [link.fetch(MIXED) for _ in range(40)]
    assert 0.6 < found[-1] < 1.6


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("truth", "change"), [(1e8, 0.1), (1e9, 0.1), (1e7, 10.0), (1e8, 10.0)])
def test_a_link_that_becomes_ten_times_as_slow_or_fast_is_followed_within_three(
    truth: float, change: float, seed: int
) -> None:
    link = Link(truth, truth, seed)
    for _ in range(30):
        link.fetch(LARGE)
    link.bytes_per_s *= change
    assert 0.6 < [link.fetch(LARGE) for _ in range(3)][-1] < 1.3


@pytest.mark.parametrize("times", [30.0, 0.001])
def test_one_fetch_far_off_is_no_change_of_the_link(times: float) -> None:
    link = Link(1e9, 1e9, seed=3)
    for _ in range(10):
        link.fetch(LARGE)
    link.fetch([56 * MIB], times)
    assert 0.7 < link.fetch([56 * MIB]) < 1.3


def test_short_fetches_after_long_ones_do_not_lower_the_estimate() -> None:
    link = Link(1.25e9, 1e9, seed=5)
    for _ in range(10):
        link.fetch(LARGE)
    assert all(0.8 < link.fetch([MIB]) < 1.25 for _ in range(50))


def test_a_short_fetch_between_does_not_hide_that_the_link_has_changed() -> None:
    link = Link(1e9, 1e9, seed=6)
    for _ in range(10):
        link.fetch(LARGE)
    link.bytes_per_s /= 10
    found = [link.fetch([size]) for size in (64 * MIB, MIB // 2, 64 * MIB)]
    assert found[-1] == pytest.approx(1.0, rel=0.2)


@pytest.mark.parametrize("seconds", [1e-9, 1.0, 86400.0])
def test_two_fetches_outweigh_one_of_a_pebibyte(seconds: float) -> None:
    links = BandwidthEstimator(1e9, clock=Clock())
    links.observe("a", 2**50, seconds)
    for _ in range(2):
        fetch(links, 1e9, 10**9)
    assert links.estimate("a") == pytest.approx(1e9)


def test_estimates_stay_within_what_a_link_can_be() -> None:
    links = BandwidthEstimator(1e9, clock=Clock())
    links.observe("fast", 2**40, 5e-324)
    links.observe("slow", MIN_BYTES, 86400.0)
    links.observe("slow", MIN_BYTES, 86400.0)
    assert links.estimate("fast") <= FASTEST
    assert links.estimate("slow") == SLOWEST


def test_a_link_that_was_idle_for_a_year_starts_afresh() -> None:
    clock = Clock()
    links = BandwidthEstimator(1e9, clock=clock)
    fetch(links, 1e9)
    clock.now += 3e7
    fetch(links, 1e7)
    assert links.estimate("a") == pytest.approx(1e7)


def test_each_link_may_have_its_own_prior() -> None:
    links = BandwidthEstimator(1e9, priors={"disk": 3e8})
    assert (links.estimate("disk"), links.estimate("net")) == (3e8, 1e9)
    with pytest.raises(ConfigError, match="prior bandwidth -1"):
        BandwidthEstimator(1e9, priors={"disk": -1})


def test_an_estimate_goes_back_to_the_prior_when_nobody_uses_the_link() -> None:
    clock = Clock()
    links = BandwidthEstimator(1e8, clock=clock)
    for _ in range(20):
        fetch(links, 1e10)
    learned = links.estimate("a")
    clock.now += 60.0
    assert links.estimate("a") == learned
    clock.now += 600.0
    assert links.estimate("a") == pytest.approx((learned * 1e8) ** 0.5), "half, as a logarithm"
    clock.now += 1e5
    assert links.estimate("a") == pytest.approx(1e8)
    fetch(links, 1e10)
    assert links.estimate("a") == pytest.approx(1e10, rel=0.2)


def test_an_estimate_is_of_all_that_is_known_whoever_asked_before() -> None:
    asked, silent = (BandwidthEstimator(1e9, clock=Clock()) for _ in range(2))
    for rate in (1e9, 3e8, 3e8, 5e7, 5e7):
        for links in (asked, silent):
            fetch(links, rate)
        assert asked.estimate("a") > 0.0
    assert asked.estimate("a") == silent.estimate("a") < 1e8


def test_many_fetches_a_little_off_outweigh_any_bytes() -> None:
    links = BandwidthEstimator(1e9, clock=Clock())
    for _ in range(2):
        links.observe("a", 2**45, 2**45 / 1e9)
    for _ in range(8):
        fetch(links, 6e8, 10**8)
    assert links.estimate("a") == pytest.approx(6e8)


def test_a_name_that_nobody_gave_a_link_is_not_kept() -> None:
    links = BandwidthEstimator(1e9)
    fetch(links, 1e8, link="x" * 100_000)
    assert len(links) == 0
    assert links.estimate("x" * 100_000) == 1e9
