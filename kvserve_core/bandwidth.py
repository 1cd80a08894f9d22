"""Goodput per link, learned from real fetches. A configured prior only serves until the first of them.

How an estimate is made is in :mod:`~kvserve_core.goodput`. Here is one for each link, a bounded number of them, and
what is answered about a link that nobody has used for a while. Who knows how many fetches run on a link now gets the
part that one more will have.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping

from kvserve_core.errors import ConfigError
from kvserve_core.goodput import FASTEST, Goodput, Sums, bytes_per_s, sharing

MIN_BYTES = 64 * 1024
"""Below this a transfer measures the round trip, not the link."""
MAX_LINKS = 1024
MAX_BYTES = 2**50
MAX_SECONDS = 86400.0
"""A fetch of more than a PiB or a day is a broken report."""
MAX_NAME = 1024
"""Characters of a link's name; a longer one is of nobody's configuration, and is not kept."""
STALE_S = 60.0
"""Without a fetch for this long, an estimate begins to go back to the prior,"""
STALE_HALF_LIFE_S = 600.0
"""by half, as a logarithm, in this time."""


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
        self._seen: dict[str, tuple[Sums, float]] = {}
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
        known = self._seen.get(link)
        if known is None:
            return self.prior_of(link)
        sums, seen_s = known
        rate = bytes_per_s(sums)
        if active is not None:
            rate *= sharing(sums) / (1.0 + active)
        idle_s = (self._clock() if now is None else now) - seen_s - self._stale_s
        if idle_s <= 0:
            return rate
        prior = self.prior_of(link)
        return float(prior * (rate / prior) ** (0.5 ** (idle_s / STALE_HALF_LIFE_S)))

    def stale(self) -> list[str]:
        """Links that were not used for ``stale_s``: those with a prior of their own, and those used before."""
        oldest_s = self._clock() - self._stale_s
        known = self._seen.copy()
        return [link for link in {**self._priors, **known} if link not in known or known[link][1] < oldest_s]

    def probe(self, link: str, send: Callable[[str], tuple[int, float]]) -> float:
        """Measure a link that was not used for ``stale_s``; the estimate of it then, in bytes/s.

        For an adapter's idle moments, ``for link in links.stale(): links.probe(link, send)``; nothing here calls it.
        send: moves at least ``min_bytes`` over the link, and says how many and in how many seconds. What it raises
        comes through, and nothing is learned. A link that is used, or being probed by another thread, is left alone.

        Raises:
            ConfigError: too little was sent to say anything.
        """
        with self._lock:
            known = self._seen.get(link)
            fresh = known is not None and self._clock() - known[1] <= self._stale_s
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

    def observe(self, link: str, nbytes: float, seconds: float, now: float | None = None) -> None:
        """One fetch: bytes on the wire and the seconds they took until ``now`` (by the clock, asked if not given).

        Latency-bound and impossible ones are ignored, and links with names beyond :data:`MAX_NAME`.
        """
        if not (self._min_bytes <= nbytes <= MAX_BYTES and 0 < seconds <= MAX_SECONDS) or len(link) > MAX_NAME:
            return
        nbytes, least_s = float(nbytes), nbytes / FASTEST
        if seconds < least_s:
            seconds = least_s
        with self._lock:
            if now is None:
                now = self._clock()
            known = self._links.get(link)
            if known is None:
                known = self._new(link, nbytes, now)
            else:
                self._links.move_to_end(link)
            known.add(nbytes, seconds, now, self._half_life_s)
            self._seen[link] = (known.sums, now)

    def _new(self, link: str, nbytes: float, now: float) -> Goodput:
        known = self._links[link] = Goodput(now, self.prior_of(link), nbytes)
        while len(self._links) > self._max_links:
            oldest, _ = self._links.popitem(last=False)
            del self._seen[oldest]
        return known

    def __len__(self) -> int:
        return len(self._links)
