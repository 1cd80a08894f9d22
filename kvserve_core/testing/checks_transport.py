"""Demands on transports and stores, with publisher and consumer in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvserve_core.bodies import host_bytes
from kvserve_core.errors import LeaseLost, TransportError, Unacceptable
from kvserve_core.peer import PeerInfo
from kvserve_core.policy import Outcome
from kvserve_core.spec import Region, Shard
from kvserve_core.testing.check import check
from kvserve_core.testing.subject import Subject, require
from kvserve_core.transport import Selection, Store, Transport
from kvserve_core.wire import ChainInfo, Codebook, FrameHeader, Sealed, Segment, tables

SHARD, FINGERPRINT = Shard((0, 1)), "f" * 64
READS: dict[str, tuple[int, ...]] = {"quantizer:identity": (1,), "codec:raw": (1,)}
PEER = PeerInfo((1, 1), READS, "cpu", FINGERPRINT, SHARD)
LEASE_S, PATIENCE_S = 60.0, 30.0


class Source:
    """``count`` sealed segments of ``size`` bytes: cell ``i // 2`` of layer ``i % 2``."""

    complete = True

    def __init__(self, key: str, count: int = 6, size: int = 1000) -> None:
        self.plan: Sequence[Region] = [
            Region(0, "k", (i % 2,), (0,), i // 2 * 256, i // 2 * 256 + 256) for i in range(count)
        ]
        planes, layer_blocks, head_groups = tables(self.plan)
        self.header = FrameHeader(
            transfer_id=key,
            fingerprint=FINGERPRINT,
            profile="raw",
            num_tokens=256 * (count // 2 + 1),
            num_segments=count,
            raw_bytes=count * size,
            nonce=7,
            shard=SHARD,
            chains=(ChainInfo(("quantizer:identity@1", "codec:raw@1"), "{}"),),
            planes=planes,
            layer_blocks=layer_blocks,
            head_groups=head_groups,
        )
        book = Codebook(self.header)
        self.sealed = [
            book.seal(Segment(i, at, 0, b"m", bytes((i + j) % 256 for j in range(size))))
            for i, at in enumerate(self.plan)
        ]
        self.closed: list[str] = []

    def get(self, index: int, deadline: float) -> Sealed:
        """The segment, which is always ready."""
        return self.sealed[index]

    def close(self, reason: str) -> None:
        """Note why."""
        self.closed.append(reason)

    def want(self, *indices: int, peer: PeerInfo = PEER) -> Selection:
        """The regions of these segments, or of all."""
        return Selection(tuple(self.plan[i] for i in indices) or tuple(self.plan), peer)


@contextmanager
def opened(subject: Subject) -> Iterator[Transport]:
    """An instance, closed twice in the end, which must be safe."""
    transport: Transport = subject.create()
    try:
        yield transport
    finally:
        transport.close()
        transport.close()


def deadline() -> float:
    """Far enough for any machine."""
    return time.monotonic() + PATIENCE_S


def raises(kind: type[Exception], call: Callable[[], object], what: str) -> None:
    """``call`` must raise ``kind``.

    Raises:
        CheckFailed: it raises nothing.
    """
    try:
        call()
    except kind:
        return
    require(False, f"{what} is not refused with {kind.__name__}")


def fetched(transport: Transport, address: str, key: str, want: Selection) -> dict[int, tuple[bytes, bytes]]:
    """Head and body of each segment that arrives, by index."""
    delivery = transport.fetch(address, key, want, deadline())
    return {s.index: (bytes(s.head), bytes(host_bytes(s.body))) for s in delivery}


def sent(source: Source, *indices: int) -> dict[int, tuple[bytes, bytes]]:
    """What should arrive."""
    return {
        i: (bytes(source.sealed[i].head), bytes(host_bytes(source.sealed[i].body)))
        for i in indices or range(len(source.plan))
    }


@check("transport")
def everything_arrives(subject: Subject) -> None:
    """Header and segments arrive as they were: one, many, and large ones."""
    with opened(subject) as transport:
        for count, size in ((1, 8), (6, 1000), (100, 64), (3, 2_000_000)):
            source = Source(f"check-{count}-{size}", count, size)
            key = source.header.transfer_id
            address = transport.publish(key, source, LEASE_S)
            delivery = transport.fetch(address, key, source.want(), deadline())
            require(delivery.header == source.header, "the header changed on the way")
            got = {s.index: (bytes(s.head), bytes(host_bytes(s.body))) for s in delivery}
            require(got == sent(source), f"{count} segments of {size} bytes did not arrive as they were")
            require(delivery.stats.nbytes >= count * size, f"stats count {delivery.stats.nbytes} bytes")


@check("transport")
def selections(subject: Subject) -> None:
    """A selection is served as the segments that cover it, and again for a second consumer."""
    with opened(subject) as transport:
        source = Source("check-selection")
        address = transport.publish("check-selection", source, LEASE_S)
        for chosen in ((1, 4), (0,), (1, 4)):
            got = fetched(transport, address, "check-selection", source.want(*chosen))
            require(got == sent(source, *chosen), f"asked for segments {chosen}, got {sorted(got)}")


@check("transport")
def unknown_keys(subject: Subject) -> None:
    """A key that is not there is a lost lease to fetch and to renew, and nothing to release."""
    with opened(subject) as transport:
        source = Source("check-known")
        address = transport.publish("check-known", source, LEASE_S)
        want = source.want()
        raises(LeaseLost, lambda: list(transport.fetch(address, "other", want, deadline())), "fetch of an unknown key")
        raises(LeaseLost, lambda: transport.renew(address, "other", LEASE_S), "renewal of an unknown key")
        transport.release(address, "other", (0, 1), None)


@check("transport")
def unable_peers(subject: Subject) -> None:
    """A consumer that cannot decode what was published is refused with Unacceptable."""
    with opened(subject) as transport:
        source = Source("check-peer")
        address = transport.publish("check-peer", source, LEASE_S)
        peer = PeerInfo((1, 1), {"quantizer:identity": (1,)}, "cpu", FINGERPRINT, SHARD)
        want = source.want(peer=peer)
        raises(Unacceptable, lambda: list(transport.fetch(address, "check-peer", want, deadline())), "such a peer")


@check("transport", when=lambda s: not s.stage_is(Store))
def releases(subject: Subject) -> None:
    """The last share's release frees the key, closes the source, and reports; poll never blocks."""
    with opened(subject) as transport:
        source = Source("check-release")
        address = transport.publish("check-release", source, LEASE_S)
        raises(TransportError, lambda: transport.publish("check-release", source, LEASE_S), "a key that is taken")
        report = Outcome("check-release", "raw", 100, 110, transfer_s=0.5)
        transport.release(address, "check-release", (1, 2), report)
        require(list(transport.poll()) == [], "freed before every share was released")
        transport.release(address, "check-release", (0, 2), report)
        ended = [r for r in transport.poll() if r.key == "check-release"]
        require([(r.reason, len(r.reports)) for r in ended] == [("", 2)], f"poll gave {ended}")
        require(source.closed, "the source was not closed")
        raises(LeaseLost, lambda: transport.renew(address, "check-release", LEASE_S), "renewal after the release")


@check("transport", when=lambda s: s.stage_is(Store))
def stores(subject: Subject) -> None:
    """A store counts the leading keys it holds, and serves what another instance published."""
    with opened(subject) as one, opened(subject) as other:
        source = Source("check-store")
        address = one.publish("check-store", source, LEASE_S)
        require(isinstance(other, Store) and other.contains(["check-store", "absent"]) == 1, "contains() miscounts")
        require(isinstance(other, Store) and other.contains(["absent", "check-store"]) == 0, "contains() skips a gap")
        require(
            fetched(other, address, "check-store", source.want()) == sent(source), "another instance reads other bytes"
        )
