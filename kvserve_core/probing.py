"""Measuring a link with a transport: an object of random bytes on one side, fetches of it on the other.

Both ends are the transport that serves, so what is measured is what transfers will get. No torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from kvserve_core.bandwidth import BandwidthEstimator
from kvserve_core.peer import PeerInfo
from kvserve_core.spec import SEGMENT_TOKENS, Region, Shard
from kvserve_core.transport import Selection, Transport
from kvserve_core.wire import ChainInfo, Codebook, FrameHeader, Sealed, Segment, tables

KEY = "kvserve-probe"
FINGERPRINT = "0" * 64
"""Of no model, so that nobody takes this for a cache."""
SEGMENT_BYTES = 2**20
MAX_BYTES = 2**30
LEASE_S = 3600.0
ALL = Region(0, "k", (0,), (0,), 0, MAX_BYTES // SEGMENT_BYTES * SEGMENT_TOKENS)
SHARD = Shard((0,))
PEER = PeerInfo((1, 1), {"quantizer:identity": (1,), "codec:raw": (1,)}, "cpu", FINGERPRINT, SHARD)


class ProbeSource:
    """``nbytes`` of random bytes, rounded up to whole segments, all of them ready."""

    complete = True

    def __init__(self, nbytes: int) -> None:
        count = -(-nbytes // SEGMENT_BYTES)
        self.plan: Sequence[Region] = [
            Region(0, "k", (0,), (0,), i * SEGMENT_TOKENS, (i + 1) * SEGMENT_TOKENS) for i in range(count)
        ]
        chains = (ChainInfo(("quantizer:identity@1", "codec:raw@1"), "{}"),)
        tokens, raw_bytes = count * SEGMENT_TOKENS, count * SEGMENT_BYTES
        self.header = FrameHeader(
            KEY, FINGERPRINT, "raw", tokens, count, raw_bytes, 0, SHARD, chains, *tables(self.plan)
        )
        book, body = Codebook(self.header), os.urandom(SEGMENT_BYTES)
        self._sealed = [book.seal(Segment(i, at, 0, b"", body)) for i, at in enumerate(self.plan)]

    def get(self, index: int, deadline: float) -> Sealed:
        """The segment, which is always ready."""
        del deadline
        return self._sealed[index]

    def close(self, reason: str) -> None:
        """Nothing waits."""


def over(transport: Transport, deadline_s: float) -> Callable[[str], tuple[int, float]]:
    """``send`` for :meth:`BandwidthEstimator.probe`: fetches what is offered at an address, and says how long it took.

    Bytes are as received, seconds those after the round trip that brings the header: nothing is encoded meanwhile, so
    that the link, or what feeds it, was busy in all of them. It raises the transport's errors.
    """

    def send(address: str) -> tuple[int, float]:
        delivery = transport.fetch(address, KEY, Selection((ALL,), PEER), time.monotonic() + deadline_s)
        try:
            for _ in delivery:
                pass
            return delivery.stats.nbytes, max(delivery.stats.seconds - delivery.stats.latency_s, 1e-9)
        finally:
            delivery.close()

    return send


def measure(transport: Transport, address: str, rounds: int, deadline_s: float) -> tuple[float, list[float]]:
    """Bytes/s as the controller would estimate them after so many fetches, and those of each fetch.

    Raises:
        TransportError, LeaseLost: nothing is offered there, or it stopped.
    """
    fetch = over(transport, deadline_s)
    each: list[float] = []

    def send(link: str) -> tuple[int, float]:
        nbytes, seconds = fetch(link)
        each.append(nbytes / seconds)
        return nbytes, seconds

    first = send(address)
    links = BandwidthEstimator(each[0], stale_s=0.0)
    links.observe(address, *first)
    for _ in range(rounds - 1):
        links.probe(address, send)
    return links.estimate(address), each
