"""Goodput per link, learned from real fetches. A configured prior only serves until the first of them.

The estimate is bytes over seconds of decayed sums: a mean of 1/B weighted by bytes, so that a short transfer counts
for little, and by age, so that an old one does. Two corrections:

* What every fetch costs whatever its size (round trips, start-up) is no part of B. Where sizes differ enough to tell,
  it is the intercept of a least-squares line of seconds over bytes, and is taken off: B is then above the plain mean.
* A fetch far from what was expected is an outlier, or the link has changed. Alone it counts within bounds; two running
  in one direction replace the past. (A windowed maximum, as in BBR, keeps a lucky fetch and is late on a fall.)

Fetches that overlap share a link, so each saw a part of it: what all got while any was running, over what each got, is
how many ran at a time. Who knows how many run now gets the part that one more will have.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Literal

import msgspec
from msgspec.structs import replace

from kvserve_core.errors import ConfigError

PRIOR_WEIGHT = 0.02
"""The prior counts as this share of the first real fetch: wrong by 10x, it is 9 % off after two."""
MIN_BYTES = 64 * 1024
"""Below this a transfer measures the round trip, not the link."""
MAX_LINKS = 1024
MAX_BYTES = 2**50
MAX_SECONDS = 86400.0
"""A fetch of more than a PiB or a day is a broken report."""
SLOWEST, FASTEST = 1e3, 1e14
"""Bytes/s that a link can have; estimates stay within."""
OVERHEAD_S = 6e-3
"""What one fetch may cost whatever its size, at most."""
SURPRISE = 2.0
"""A fetch this many times as slow or as fast as expected (beyond the overhead) may mean that the link has changed."""
OFF, RUN = 1.1, 8
"""This many running that are this many times off, all in one direction, replace the past too, whatever its weight."""
ENOUGH = 0.5
"""Fetches, by their decayed weight, from which there is an expectation that one can be far from."""
TELLING = 2.5
"""Fetches, by their decayed weight, from which a line through them is more than noise."""
MIN_SPREAD = 0.25
"""Squared coefficient of variation of the sizes from which the overhead can be told from the bandwidth."""

STALE_S = 60.0
"""Without a fetch for this long, an estimate begins to go back to the prior,"""
STALE_HALF_LIFE_S = 600.0
"""by half, as a logarithm, in this time."""

Surprise = Literal["", "slow", "fast"]


class Goodput(msgspec.Struct, frozen=True, gc=False):
    """Decayed sums over the fetches of one link at ``time_s``.

    fetches: their number. squares, products: of bytes, and of bytes with seconds. prior_bytes, prior_s: what the
    prior counts for. busy_s: seconds in which at least one fetch was on the link, until ``until_s``. run: how many
    fetches in a row were off, below 0 when they were fast. surprise, last_bytes, last_seconds: the latest fetch, where
    it was far from what was expected.
    """

    time_s: float
    fetches: float = 0.0
    nbytes: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0
    prior_bytes: float = 0.0
    prior_s: float = 0.0
    busy_s: float = 0.0
    until_s: float = float("-inf")
    run: int = 0
    surprise: Surprise = ""
    last_bytes: float = 0.0
    last_seconds: float = 0.0

    @property
    def overhead_s(self) -> float:
        """Seconds of a fetch that do not depend on its size: 0 unless sizes differ enough to tell."""
        spread = self.squares * self.fetches - self.nbytes**2
        if self.fetches < TELLING or spread < MIN_SPREAD * self.nbytes**2:
            return 0.0
        slope = (self.products * self.fetches - self.nbytes * self.seconds) / spread
        return min(max(0.0, (self.seconds - slope * self.nbytes) / self.fetches), OVERHEAD_S) if slope > 0 else 0.0

    @property
    def bytes_per_s(self) -> float:
        """The estimate of B."""
        return self._rate(self.overhead_s)

    def expected_s(self, nbytes: float) -> float:
        """What a fetch of so many bytes should take."""
        overhead_s = self.overhead_s
        return overhead_s + nbytes / self._rate(overhead_s)

    def _rate(self, overhead_s: float) -> float:
        nbytes = self.nbytes + self.prior_bytes
        seconds = self.seconds + self.prior_s - overhead_s * self.fetches
        return max(SLOWEST, nbytes / max(seconds, nbytes / FASTEST))

    @property
    def sharing(self) -> float:
        """How many fetches were on the link at a time while there were any; 1 where nothing overlapped."""
        return max(1.0, self.seconds / self.busy_s) if self.busy_s > 0 else 1.0

    def add(self, nbytes: float, seconds: float, now: float, half_life_s: float) -> Goodput:
        """With one more fetch; what was known fades by half every ``half_life_s``."""
        busy_s = min(seconds, max(0.0, now - self.until_s))
        return self._added(nbytes, seconds, busy_s, self._faded(now, half_life_s))

    def _added(self, nbytes: float, seconds: float, busy_s: float, known: Goodput) -> Goodput:
        if known.fetches < ENOUGH:
            return known._with(nbytes, seconds, busy_s)
        expected = known.expected_s(nbytes)
        run = _run(self.run, _surprise(seconds, expected, OFF))
        if abs(run) >= RUN:
            return Goodput(known.time_s, until_s=known.until_s)._with(nbytes, seconds, seconds / self.sharing)
        surprise = _surprise(seconds, expected, SURPRISE) if run else ""
        if surprise and surprise == self.surprise:
            both = Goodput(known.time_s, until_s=known.until_s)
            both = both._with(self.last_bytes, self.last_seconds, self.last_seconds / self.sharing)
            return both._with(nbytes, seconds, seconds / self.sharing)
        if surprise:
            counted = min(seconds, SURPRISE * expected + OVERHEAD_S)
            known = known._with(nbytes, counted, busy_s * counted / seconds)
            return replace(known, run=run, surprise=surprise, last_bytes=nbytes, last_seconds=seconds)
        known = known._with(nbytes, seconds, busy_s, run)
        if self.surprise and nbytes < OVERHEAD_S * known.bytes_per_s:  # too short to deny that the link has changed
            return replace(known, surprise=self.surprise, last_bytes=self.last_bytes, last_seconds=self.last_seconds)
        return known

    def _faded(self, now: float, half_life_s: float) -> Goodput:
        kept = 0.5 ** (max(0.0, now - self.time_s) / half_life_s)
        return Goodput(
            now,
            kept * self.fetches,
            kept * self.nbytes,
            kept * self.seconds,
            kept * self.squares,
            kept * self.products,
            kept * self.prior_bytes,
            kept * self.prior_s,
            kept * self.busy_s,
            max(now, self.until_s),
        )

    def _with(self, nbytes: float, seconds: float, busy_s: float, run: int = 0) -> Goodput:
        return replace(
            self,
            fetches=self.fetches + 1,
            nbytes=self.nbytes + nbytes,
            seconds=self.seconds + seconds,
            squares=self.squares + nbytes * nbytes,
            products=self.products + nbytes * seconds,
            busy_s=self.busy_s + busy_s,
            run=run,
        )


def _surprise(seconds: float, expected: float, times: float) -> Surprise:
    if seconds > times * expected + OVERHEAD_S:
        return "slow"
    return "fast" if seconds < expected / times else ""


def _run(run: int, off: Surprise) -> int:
    if off == "slow":
        return max(run, 0) + 1
    return min(run, 0) - 1 if off == "fast" else 0


def from_prior(prior: float, nbytes: float, now: float) -> Goodput:
    """The prior (bytes/s) as a small part of a fetch of ``nbytes``."""
    share = PRIOR_WEIGHT * nbytes
    return Goodput(now, prior_bytes=share, prior_s=share / prior)


class BandwidthEstimator:
    """Estimates of B in bytes/s for a bounded number of links. Thread-safe; ``estimate`` takes no lock."""

    def __init__(
        self,
        prior: float,
        *,
        half_life_s: float = 5.0,
        min_bytes: int = MIN_BYTES,
        max_links: int = MAX_LINKS,
        priors: Mapping[str, float] | None = None,
        stale_s: float = STALE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for each in (prior, *(priors or {}).values()):
            if not 0 < each < float("inf"):
                raise ConfigError(f"prior bandwidth {each!r} must be above 0 and finite, for example '10Gbps'")
        self.prior = prior
        self._priors = dict(priors or {})
        self._stale_s = stale_s
        self._half_life_s = half_life_s
        self._min_bytes = min_bytes
        self._max_links = max_links
        self._clock = clock
        self._links: OrderedDict[str, Goodput] = OrderedDict()
        self._rates: dict[str, tuple[float, float, float]] = {}
        self._probed: set[str] = set()
        self._lock = threading.Lock()

    def prior_of(self, link: str) -> float:
        """Bytes/s that are configured for a link."""
        return self._priors.get(link, self.prior)

    def estimate(self, link: str = "default", active: int | None = None, now: float | None = None) -> float:
        """Bytes/s that one more fetch gets; the prior where nothing was fetched yet.

        active: fetches on the link now, with which it will share; None: as many as there were of late. now: by the
        clock, asked where it is not given. A link that was not used for ``stale_s`` goes back to its prior.
        """
        known = self._rates.get(link)
        if known is None:
            return self.prior_of(link)
        rate, sharing, seen_s = known
        if active is not None:
            rate *= sharing / (1.0 + active)
        idle_s = (self._clock() if now is None else now) - seen_s - self._stale_s
        if idle_s <= 0:
            return rate
        prior = self.prior_of(link)
        return float(prior * (rate / prior) ** (0.5 ** (idle_s / STALE_HALF_LIFE_S)))

    def stale(self) -> list[str]:
        """Links that were not used for ``stale_s``: those with a prior of their own, and those used before."""
        oldest_s = self._clock() - self._stale_s
        known = self._rates.copy()
        return [link for link in {**self._priors, **known} if link not in known or known[link][2] < oldest_s]

    def probe(self, link: str, send: Callable[[str], tuple[int, float]]) -> float:
        """Measure a link that was not used for ``stale_s``; the estimate of it then, in bytes/s.

        For an adapter's idle moments, ``for link in links.stale(): links.probe(link, send)``; nothing here calls it.
        send: moves at least ``min_bytes`` over the link, and says how many and in how many seconds. What it raises
        comes through, and nothing is learned. A link that is used, or being probed by another thread, is left alone.

        Raises:
            ConfigError: too little was sent to say anything.
        """
        with self._lock:
            known = self._rates.get(link)
            fresh = known is not None and self._clock() - known[2] <= self._stale_s
            if fresh or link in self._probed:
                return self.estimate(link)
            self._probed.add(link)
        try:
            nbytes, seconds = send(link)
        finally:
            self._probed.discard(link)
        if nbytes < self._min_bytes:
            raise ConfigError(f"a probe of {nbytes} bytes says nothing; send {self._min_bytes} or more", link)
        self.observe(link, nbytes, seconds)
        return self.estimate(link)

    def observe(self, link: str, nbytes: int, seconds: float) -> None:
        """One fetch: bytes on the wire and the seconds they took. Latency-bound and impossible ones are ignored."""
        if not (self._min_bytes <= nbytes <= MAX_BYTES and 0 < seconds <= MAX_SECONDS):
            return
        seconds = max(seconds, nbytes / FASTEST)
        with self._lock:
            now = self._clock()
            known = self._links.pop(link, None) or from_prior(self.prior_of(link), nbytes, now)
            self._links[link] = known = known.add(nbytes, seconds, now, self._half_life_s)
            self._rates[link] = (known.bytes_per_s, known.sharing, now)
            while len(self._links) > self._max_links:
                oldest, _ = self._links.popitem(last=False)
                del self._rates[oldest]

    def __len__(self) -> int:
        return len(self._links)
