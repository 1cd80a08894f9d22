"""Offers under leases: what is published, until when, and which shares have released it. Used by memory and tcp."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Literal

from kvserve_core.errors import LeaseLost, PeerLost, TransportError
from kvserve_core.policy import Outcome
from kvserve_core.transport import Released, SegmentSource
from kvserve_plugins.transports._reports import plausible

MAX_LEASE_S = 24 * 3600.0
"""A consumer may not hold a producer's memory longer than this with one renewal."""
MAX_SHARES = 4096
WITHDRAWN_KEPT = 256
"""Withdrawn keys whose reason is remembered, for consumers whose fetch was under way to an offer that ended."""
log = logging.getLogger(__name__)
Ended = Literal["released", "expired", "withdrawn"]


class Offer:
    """One published key. ``ended`` says how it ended, None while it is on offer."""

    def __init__(self, key: str, source: SegmentSource, lease_s: float, clock: Callable[[], float]) -> None:
        self.key, self.source, self._lease_s, self._clock = key, source, lease_s, clock
        self.expires = clock() + lease_s
        self.count = 0
        """How many shares there are, as the first of them says."""
        self.shares: set[int] = set()
        self.reports: list[Outcome] = []
        self.ended: Ended | None = None
        self.reason = ""

    def used(self) -> None:
        """A consumer took something, so the lease starts over: a slow link does not end it."""
        self.expires = max(self.expires, self._clock() + self._lease_s)

    @property
    def complete(self) -> bool:
        """Whether the source is; one that cannot say does not hold up the lease."""
        try:
            return self.source.complete
        except Exception:
            log.exception("the source of %r does not say whether it is complete", self.key)
            return True

    def close(self) -> None:
        """Close the source, which may fail for itself only."""
        try:
            self.source.close(self.reason or "released by every share")
        except Exception:
            log.exception("closing the source of %r failed", self.key)

    def failure(self) -> TransportError:
        """What a fetch of an offer that ended raises."""
        if self.ended == "withdrawn":
            return withdrawn(self.key, self.reason)
        return LeaseLost(f"the producer no longer holds {self.key!r}: {self.reason or 'released by every share'}")


class Leases:
    """All offers of one publisher. Thread-safe; a source is closed once, when its offer ends, outside the lock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._offers: dict[str, Offer] = {}
        self._ended: list[Released] = []
        self._withdrawn: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._offers)

    def add(self, key: str, source: SegmentSource, lease_s: float) -> None:
        """Offer ``source``.

        Raises:
            TransportError: the key is on offer already, or the lease is not a positive number of seconds.
        """
        lease_s = checked_lease(lease_s)
        self.expire()
        with self._lock:
            if key in self._offers:
                raise TransportError(f"{key!r} is published already; withdraw it first or use a new transfer id")
            self._offers[key] = Offer(key, source, lease_s, self._clock)
            self._withdrawn.pop(key, None)

    def get(self, key: str) -> Offer:
        """The offer; raises :class:`LeaseLost` when there is none, :class:`PeerLost` when it was withdrawn of late."""
        self.expire()
        with self._lock:
            if key in self._withdrawn:
                raise withdrawn(key, self._withdrawn[key])
            return self._get(key)

    def _get(self, key: str) -> Offer:
        offer = self._offers.get(key)
        if offer is None:
            raise LeaseLost(f"the producer does not hold {key!r}: never published, released, or its lease ran out")
        return offer

    def renew(self, key: str, lease_s: float) -> None:
        """Let the lease end ``lease_s`` from now; never sooner than it would have."""
        lease_s = checked_lease(lease_s)
        self.expire()
        with self._lock:
            offer = self._get(key)
            offer.expires = max(offer.expires, self._clock() + lease_s)

    def release(self, key: str, share: tuple[int, int], report: Outcome | None) -> None:
        """Share ``i`` of ``n`` is done. Repeats and unknown keys change nothing, absurd reports are dropped.

        Raises:
            TransportError: no such share, or another number of shares than the first one gave.
        """
        index, count = share
        if not 0 <= index < count <= MAX_SHARES:
            raise TransportError(
                f"share {index} of {count} does not exist; shares are numbered from 0, at most {MAX_SHARES}"
            )
        with self._lock:
            offer = self._offers.get(key)
            if offer is None or index in offer.shares:
                return
            if offer.count not in (0, count):
                raise TransportError(f"share {index} of {count}, but {key!r} is shared by {offer.count}")
            offer.count = count
            offer.shares.add(index)
            offer.reports += plausible(report)
            done = len(offer.shares) == count
        if done:
            self._end(key, "released", "")

    def withdraw(self, key: str, reason: str) -> None:
        """Stop offering ``key``, if it is on offer."""
        self._end(key, "withdrawn", reason)

    def withdraw_all(self, reason: str) -> None:
        """Stop offering everything."""
        for key in list(self._offers):
            self._end(key, "withdrawn", reason)

    def expire(self) -> float:
        """End what ran out; returns when the next lease ends, on the clock, or infinity."""
        now = self._clock()
        with self._lock:
            for offer in self._offers.values():
                if not offer.complete:  # its producer is still at work and ends it, if need be
                    offer.used()
            late = [o.key for o in self._offers.values() if o.expires <= now]
            upcoming = min((o.expires for o in self._offers.values() if o.expires > now), default=float("inf"))
        for key in late:
            self._end(key, "expired", "its lease ran out", only_after=now)
        return upcoming

    def poll(self) -> list[Released]:
        """What ended since the last call."""
        self.expire()
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def _end(self, key: str, how: Ended, reason: str, only_after: float = float("inf")) -> None:
        with self._lock:
            offer = self._offers.get(key)
            if offer is None or offer.expires > only_after:  # renewed in the meantime
                return
            del self._offers[key]
            offer.reason, offer.ended = reason, how
            if how == "withdrawn":
                self._withdrawn[key] = reason
                if len(self._withdrawn) > WITHDRAWN_KEPT:
                    self._withdrawn.popitem(last=False)
            self._ended.append(Released(key, reason, tuple(offer.reports), offer.source))
        offer.close()


def withdrawn(key: str, reason: str) -> PeerLost:
    """What a fetch of a withdrawn key raises."""
    return PeerLost(f"the producer stopped offering {key!r}: {reason}")


def checked_lease(lease_s: float) -> float:
    """``lease_s``, at most a day.

    Raises:
        TransportError: it is not a positive number (NaN included).
    """
    if not lease_s > 0:
        raise TransportError(f"a lease of {lease_s} s is over before it starts; give a positive number of seconds")
    return min(lease_s, MAX_LEASE_S)
