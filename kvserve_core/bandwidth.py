"""Goodput per link, learned from real fetches. A configured prior only serves until the first of them.

The estimate is the ratio of decayed sums, bytes over seconds: a mean of 1/B weighted by bytes, so that a short
transfer counts for little, and by age, so that an old one does.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvserve_core.errors import ConfigError

PRIOR_WEIGHT = 0.02
"""The prior counts as this share of the first real fetch: wrong by 10x, it is 9 % off after two."""
MIN_BYTES = 64 * 1024
"""Below this a transfer measures the round trip, not the link."""
MAX_LINKS = 1024


@dataclass(frozen=True, slots=True)
class Goodput:
    """Decayed sums of one link at ``time_s``. Drop detection and overlap would be other implementations of ``add``."""

    nbytes: float
    seconds: float
    time_s: float

    @property
    def bytes_per_s(self) -> float:
        """The estimate of B."""
        return self.nbytes / self.seconds

    def add(self, nbytes: float, seconds: float, now: float, half_life_s: float) -> Goodput:
        """With one more fetch; what was known fades by half every ``half_life_s``."""
        kept = 0.5 ** (max(0.0, now - self.time_s) / half_life_s)
        return Goodput(self.nbytes * kept + nbytes, self.seconds * kept + seconds, now)


def from_prior(prior: float, nbytes: float, now: float) -> Goodput:
    """The prior (bytes/s) as a small part of a fetch of ``nbytes``."""
    share = PRIOR_WEIGHT * nbytes
    return Goodput(share, share / prior, now)


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
        """One fetch: bytes on the wire and the seconds they took. Latency-bound ones are ignored."""
        if nbytes < self._min_bytes or seconds <= 0:
            return
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
