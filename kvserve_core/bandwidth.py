"""Goodput per link, learned from real fetches. A configured prior only serves until the first of them.

The estimate is bytes over seconds of decayed sums: a mean of 1/B weighted by bytes, so that a short transfer counts
for little, and by age, so that an old one does. Two corrections:

* What every fetch costs whatever its size (round trips, start-up) is no part of B. Where sizes differ enough to tell,
  it is the intercept of a least-squares line of seconds over bytes, and is taken off: B is then above the plain mean.
* A fetch far from what was expected is an outlier, or the link has changed. Alone it counts within bounds; two running
  in one direction replace the past. (A windowed maximum, as in BBR, keeps a lucky fetch and is late on a fall.)
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

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
ENOUGH = 0.5
"""Fetches, by their decayed weight, from which there is an expectation that one can be far from."""
TELLING = 2.5
"""Fetches, by their decayed weight, from which a line through them is more than noise."""
MIN_SPREAD = 0.25
"""Squared coefficient of variation of the sizes from which the overhead can be told from the bandwidth."""

Surprise = Literal["", "slow", "fast"]


@dataclass(frozen=True, slots=True)
class Goodput:
    """Decayed sums over the fetches of one link at ``time_s``.

    fetches: their number. squares, products: of bytes, and of bytes with seconds. prior_bytes, prior_s: what the
    prior counts for. surprise, last_bytes, last_seconds: the latest fetch, where it was far from what was expected.
    """

    time_s: float
    fetches: float = 0.0
    nbytes: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0
    prior_bytes: float = 0.0
    prior_s: float = 0.0
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
        nbytes = self.nbytes + self.prior_bytes
        seconds = self.seconds + self.prior_s - self.overhead_s * self.fetches
        return max(SLOWEST, nbytes / max(seconds, nbytes / FASTEST))

    def add(self, nbytes: float, seconds: float, now: float, half_life_s: float) -> Goodput:
        """With one more fetch; what was known fades by half every ``half_life_s``."""
        known = self._faded(now, half_life_s)
        if known.fetches < ENOUGH:
            return known._with(nbytes, seconds)
        expected = known.overhead_s + nbytes / known.bytes_per_s
        surprise = _surprise(seconds, expected)
        if surprise and surprise == self.surprise:
            return Goodput(now)._with(self.last_bytes, self.last_seconds)._with(nbytes, seconds)
        if surprise:
            known = known._with(nbytes, min(seconds, SURPRISE * expected + OVERHEAD_S))
            return replace(known, surprise=surprise, last_bytes=nbytes, last_seconds=seconds)
        known = known._with(nbytes, seconds)
        if nbytes < OVERHEAD_S * known.bytes_per_s:  # too short to deny that the link has changed
            return replace(known, surprise=self.surprise, last_bytes=self.last_bytes, last_seconds=self.last_seconds)
        return known

    def _faded(self, now: float, half_life_s: float) -> Goodput:
        kept = 0.5 ** (max(0.0, now - self.time_s) / half_life_s)
        sums = (self.fetches, self.nbytes, self.seconds, self.squares, self.products, self.prior_bytes, self.prior_s)
        return Goodput(now, *(kept * each for each in sums))

    def _with(self, nbytes: float, seconds: float) -> Goodput:
        return replace(
            self,
            fetches=self.fetches + 1,
            nbytes=self.nbytes + nbytes,
            seconds=self.seconds + seconds,
            squares=self.squares + nbytes * nbytes,
            products=self.products + nbytes * seconds,
        )


def _surprise(seconds: float, expected: float) -> Surprise:
    if seconds > SURPRISE * expected + OVERHEAD_S:
        return "slow"
    return "fast" if seconds < expected / SURPRISE else ""


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 < prior < float("inf"):
            raise ConfigError(f"prior bandwidth {prior!r} must be above 0 and finite, for example '10Gbps'")
        self.prior = prior
        self._half_life_s = half_life_s
        self._min_bytes = min_bytes
        self._max_links = max_links
        self._clock = clock
        self._links: OrderedDict[str, Goodput] = OrderedDict()
        self._rates: dict[str, float] = {}
        self._lock = threading.Lock()

    def estimate(self, link: str = "default") -> float:
        """Bytes/s of a link; the prior where nothing was fetched yet."""
        return self._rates.get(link, self.prior)

    def observe(self, link: str, nbytes: int, seconds: float) -> None:
        """One fetch: bytes on the wire and the seconds they took. Latency-bound and impossible ones are ignored."""
        if not (self._min_bytes <= nbytes <= MAX_BYTES and 0 < seconds <= MAX_SECONDS):
            return
        seconds = max(seconds, nbytes / FASTEST)
        with self._lock:
            now = self._clock()
            known = self._links.pop(link, None) or from_prior(self.prior, nbytes, now)
            self._links[link] = known = known.add(nbytes, seconds, now, self._half_life_s)
            self._rates[link] = known.bytes_per_s
            while len(self._links) > self._max_links:
                oldest, _ = self._links.popitem(last=False)
                del self._rates[oldest]

    def __len__(self) -> int:
        return len(self._links)
