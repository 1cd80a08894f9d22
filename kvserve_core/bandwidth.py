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
from kvserve_core.goodput import FASTEST, Goodput, sharing

MIN_BYTES = 64 * 1024
"""Below this a transfer measures the round trip, not the link."""
HALF_LIFE_S = 5.0
"""After which a fetch counts half."""
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
    """Estimates of B in bytes/s for a bounded number of links. Thread-safe; ``estimate`` takes no lock.

    lock: for the others, where they are to share somebody else's.
    """

    def __init__(
        self,
        prior: float,
        *,
        priors: Mapping[str, float] | None = None,
        stale_s: float = STALE_S,
        clock: Callable[[], float] = time.monotonic,
        lock: threading.Lock | None = None,
    ) -> None:
        for each in (prior, *(priors or {}).values()):
            if not isinstance(each, (int, float)) or not 0 < each < float("inf"):
                raise ConfigError(f"prior bandwidth {each!r:.40} must be bytes/s above 0 and finite, such as 1.25e9")
        self.prior = prior
        self._priors = dict(priors or {})
        self._stale_s = stale_s
        self._clock = clock
        self._links: OrderedDict[str, Goodput] = OrderedDict()
        self._probed: set[str] = set()
        self._lock = lock or threading.Lock()

    def prior_of(self, link: str) -> float:
        """Bytes/s that are configured for a link."""
        return self._priors.get(link, self.prior)

    def estimate(self, link: str = "default", active: int | None = None, now: float | None = None) -> float:
        """Bytes/s that one more fetch gets; its part of the prior where nothing was fetched yet.

        active: fetches on the link now, with which it will share; None: as many as there were of late. now: by the
        clock, asked where it is not given. A link that was not used for ``stale_s`` goes back to its prior, but not
        while ``active`` says that it is used: one on which nothing ends is not getting faster.
        """
        known = self._links.get(link)
        if known is None:
            return self.prior_of(link) / (1.0 + (active or 0.0))
        rate = known.rate
        if active is not None:
            rate *= sharing(known.sums) / (1.0 + active)
            if active:
                return rate
        idle_s = (self._clock() if now is None else now) - known.time_s - self._stale_s
        if idle_s <= 0:
            return rate
        prior = self.prior_of(link)
        return float(prior * (rate / prior) ** (0.5 ** (idle_s / STALE_HALF_LIFE_S)))

    def stale(self) -> list[str]:
        """Links that were not used for ``stale_s``: those with a prior of their own, and those used before."""
        oldest_s = self._clock() - self._stale_s
        with self._lock:
            known = dict(self._links)
        return [link for link in {**self._priors, **known} if link not in known or known[link].time_s < oldest_s]

    def probe(self, link: str, send: Callable[[str], tuple[int, float]]) -> float:
        """Measure a link that was not used for ``stale_s``; the estimate of it then, in bytes/s.

        For an adapter's idle moments, ``for link in links.stale(): links.probe(link, send)``; nothing here calls it.
        send: moves at least :data:`MIN_BYTES` over the link, and says how many and in how many seconds. What it raises
        comes through, and nothing is learned. A link that is used, or being probed by another thread, is left alone.

        Raises:
            ConfigError: too little was sent to say anything, or ``send`` says what cannot be.
        """
        with self._lock:
            known = self._links.get(link)
            fresh = known is not None and self._clock() - known.time_s <= self._stale_s
            if fresh or link in self._probed:
                return self.estimate(link)
            self._probed.add(link)
        try:
            nbytes, seconds = send(link)
        finally:
            self._probed.discard(link)
        _check_probe(link, nbytes, seconds)
        self.observe(link, nbytes, seconds)
        return self.estimate(link)

    def observe(self, link: str, nbytes: float, seconds: float, now: float | None = None) -> None:
        """One fetch: bytes on the wire and the seconds they took until ``now`` (by the clock, asked if not given).

        Latency-bound and impossible ones are ignored, and links with names beyond :data:`MAX_NAME`.
        """
        with self._lock:
            self.add(link, nbytes, seconds, self._clock() if now is None else now)

    def add(self, link: str, nbytes: float, seconds: float, now: float) -> None:
        """As ``observe``, for who holds the lock."""
        if not (MIN_BYTES <= nbytes <= MAX_BYTES and 0.0 < seconds <= MAX_SECONDS):
            return
        nbytes, least_s = nbytes * 1.0, nbytes / FASTEST  # floats, for the squares of bytes are large
        known = self._links.get(link)
        if known is None:
            if len(link) > MAX_NAME:
                return
            known = self._new(link, nbytes, now)
        else:
            self._links.move_to_end(link)
        known.add(nbytes, seconds if seconds > least_s else least_s, now, HALF_LIFE_S)

    def _new(self, link: str, nbytes: float, now: float) -> Goodput:
        known = self._links[link] = Goodput(now, self.prior_of(link), nbytes)
        while len(self._links) > MAX_LINKS:
            self._links.popitem(last=False)
        return known

    def __len__(self) -> int:
        return len(self._links)


def _check_probe(link: str, nbytes: float, seconds: float) -> None:
    if not nbytes >= MIN_BYTES:
        raise ConfigError(f"a probe of {nbytes} bytes says nothing; send {MIN_BYTES} or more", link)
    if not (nbytes <= MAX_BYTES and 0 < seconds <= MAX_SECONDS):  # false for NaN too
        raise ConfigError(
            f"a probe of {nbytes} bytes in {seconds} s cannot be; expected at most {MAX_BYTES} bytes,"
            f" in more than 0 and at most {MAX_SECONDS:g} s",
            link,
        )
