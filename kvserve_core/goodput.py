"""What is known of one link: decayed sums over its fetches, and what they say of bandwidth, overhead and sharing.

The estimate is bytes over seconds: a mean of 1/B weighted by bytes, so that a short transfer counts for little, and by
age, so that an old one does. Two corrections:

* What every fetch costs whatever its size (round trips, start-up) is no part of B. Where sizes differ enough to tell,
  it is the intercept of a least-squares line of seconds over bytes, and is taken off: B is then above the plain mean.
* A fetch far from what was expected is an outlier, or the link has changed. Alone it counts within bounds; two running
  in one direction replace the past. (A windowed maximum, as in BBR, keeps a lucky fetch and is late on a fall.)

Fetches that overlap share a link, so each saw a part of it: what all got while any was running, over what each got, is
how many ran at a time.
"""

from __future__ import annotations

from math import inf

PRIOR_WEIGHT = 0.02
"""The prior counts as this share of the first real fetch: wrong by 10x, it is 9 % off after two."""
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
JUMP_S = 1.0
"""A clock that was set back by more than this says nothing of how fetches overlapped."""

Sums = tuple[float, float, float, float, float, float, float, float]
"""Decayed: fetches, bytes, seconds, squares of bytes, bytes x seconds; bytes and seconds that the prior counts for; and
seconds in which at least one fetch was on the link."""


class Goodput:
    """What is known of a link at ``time_s``. Changed in place: whoever adds holds the lock of the estimator.

    Readers hold none: ``sums`` and ``rate``, the estimate of B in bytes/s, are replaced as a whole.

    until_s: the end of the latest fetch. run: how many fetches in a row were off, below 0 when they were fast.
    surprise, last: the latest fetch (bytes, seconds), where it was far from what was expected: "slow" or "fast".
    """

    __slots__ = ("_overhead_s", "last", "rate", "run", "sums", "surprise", "time_s", "until_s")

    def __init__(self, now: float, prior: float, nbytes: float) -> None:
        """The prior (bytes/s) counts as a small part of a fetch of ``nbytes``."""
        share = PRIOR_WEIGHT * nbytes
        self.sums: Sums = (0.0, 0.0, 0.0, 0.0, 0.0, share, share / prior, 0.0)
        self.time_s, self.until_s = now, -inf
        self.run = 0
        self.surprise = ""
        self.last = (0.0, 0.0)
        self._overhead_s, self.rate = _line(self.sums)

    def add(self, nbytes: float, seconds: float, now: float, half_life_s: float) -> None:
        """One more fetch; what was known fades by half every ``half_life_s``.

        The usual fetch is worked out here in one go: this is done for every report.
        """
        fetches, total, all_s, squares, products, prior_bytes, prior_s, busy_s = before = self.sums
        alone_s = now - self.until_s
        if alone_s >= 0.0:
            self.until_s = now
            if alone_s > seconds:
                alone_s = seconds
        else:
            alone_s = self._late(alone_s, seconds, now)
        age_s, self.time_s = now - self.time_s, now
        kept = 0.5 ** (age_s / half_life_s) if age_s > 0.0 else 1.0
        run, surprise, expected = 0, "", 0.0
        fetches *= kept
        if fetches >= ENOUGH:
            overhead_s, rate = self._overhead_s, self.rate  # all have faded alike, so the line is where it was
            if overhead_s and fetches < TELLING:  # but there are too few left to tell one
                overhead_s, rate = _line((fetches, *before[1:]))
            expected = overhead_s + nbytes / rate
            if seconds > OFF * expected + OVERHEAD_S:
                run = self.run + 1 if self.run > 0 else 1
                surprise = "slow" if seconds > SURPRISE * expected + OVERHEAD_S else ""
            elif seconds * OFF < expected:
                run = self.run - 1 if self.run < 0 else -1
                surprise = "fast" if seconds * SURPRISE < expected else ""
        else:
            self.surprise = ""
        self.run = run
        if surprise or not -RUN < run < RUN:
            self.sums = sums = self._unlike(nbytes, seconds, alone_s, kept, expected, surprise)
        else:
            self.sums = sums = (  # as ``_with``, without its call
                fetches + 1.0,
                total * kept + nbytes,
                all_s * kept + seconds,
                squares * kept + nbytes * nbytes,
                products * kept + nbytes * seconds,
                prior_bytes * kept,
                prior_s * kept,
                busy_s * kept + alone_s,
            )
        self._overhead_s, self.rate = _line(sums)
        if self.surprise and not surprise and nbytes >= OVERHEAD_S * self.rate:  # so long that nothing has changed
            self.surprise = ""

    def _late(self, alone_s: float, seconds: float, now: float) -> float:
        """Seconds in which a fetch was alone that ended before one that was told earlier: none of them."""
        if alone_s > -JUMP_S:
            return 0.0
        self.until_s = now  # the clock was set back, and what it said of the last fetch means nothing now
        return seconds

    def _unlike(
        self, nbytes: float, seconds: float, alone_s: float, kept: float, expected: float, surprise: str
    ) -> Sums:
        """With a fetch that is far off, or the last of a run: within bounds, or in place of the past."""
        again, full = surprise == self.surprise, not -RUN < self.run < RUN
        if not (again or full):
            self.surprise, self.last = surprise, (nbytes, seconds)
            counted = min(seconds, SURPRISE * expected + OVERHEAD_S)
            return _with(self.sums, kept, nbytes, counted, alone_s * counted / seconds)
        shared, past, (last_bytes, last_s) = sharing(self.sums), NOTHING, self.last
        if not full:
            past = _with(NOTHING, 1.0, last_bytes, last_s, last_s / shared)
        self.run, self.surprise = 0, ""
        return _with(past, 1.0, nbytes, seconds, seconds / shared)


NOTHING: Sums = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def _with(sums: Sums, kept: float, nbytes: float, seconds: float, alone_s: float) -> Sums:
    """What is kept of the sums, and one more fetch."""
    fetches, total, all_s, squares, products, prior_bytes, prior_s, busy_s = sums
    return (
        fetches * kept + 1.0,
        total * kept + nbytes,
        all_s * kept + seconds,
        squares * kept + nbytes * nbytes,
        products * kept + nbytes * seconds,
        prior_bytes * kept,
        prior_s * kept,
        busy_s * kept + alone_s,
    )


def _line(sums: Sums) -> tuple[float, float]:
    """Seconds of a fetch that do not depend on its size, 0 unless sizes differ enough to tell; and B in bytes/s."""
    fetches, nbytes, seconds, squares, products, prior_bytes, prior_s, _ = sums
    square, overhead_s = nbytes * nbytes, 0.0
    spread = squares * fetches - square
    if fetches >= TELLING and spread >= MIN_SPREAD * square:
        slope = (products * fetches - nbytes * seconds) / spread
        if slope > 0.0:
            each_s = (seconds - slope * nbytes) / fetches
            overhead_s = 0.0 if each_s < 0.0 else each_s if each_s < OVERHEAD_S else OVERHEAD_S
    nbytes += prior_bytes
    seconds += prior_s - overhead_s * fetches
    least_s = nbytes / FASTEST
    rate = nbytes / (seconds if seconds > least_s else least_s)
    return overhead_s, rate if rate > SLOWEST else SLOWEST


def sharing(sums: Sums) -> float:
    """How many fetches were on the link at a time while there were any; 1 where nothing overlapped."""
    all_s, busy_s = sums[2], sums[7]
    return max(1.0, all_s / busy_s) if busy_s > 0.0 else 1.0
