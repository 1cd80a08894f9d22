"""What a transport and a store implement. Transports carry sealed segments and know nothing of their contents.

Pull: the producer publishes a source of segments under a transfer id; a consumer fetches the regions it lacks and
releases with a report. Deadlines are absolute times of ``time.monotonic()``; only durations cross machines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

import msgspec

from kvserve_core.bodies import host_bytes, piece_hashes
from kvserve_core.component import ComponentConfig
from kvserve_core.peer import PeerInfo
from kvserve_core.policy import Outcome
from kvserve_core.spec import Region, Shard
from kvserve_core.wire import FrameHeader, Sealed

if TYPE_CHECKING:
    from torch import Tensor


class Endpoint(msgspec.Struct, frozen=True):
    """Where one producer rank publishes: ``tcp://10.0.0.5:5555``, ``file:///var/kv``, ``memory://name``."""

    address: str
    shard: Shard


class Locator(msgspec.Struct, frozen=True):
    """All a consumer needs to find a transfer; plain JSON, travels in the router's ``kv_transfer_params``."""

    transfer_id: str
    num_tokens: int
    endpoints: tuple[Endpoint, ...]
    profile: str


@dataclass(frozen=True)
class Selection:
    """What a consumer wants. Served as the smallest covering set of whole segments."""

    regions: tuple[Region, ...]
    peer: PeerInfo


class SegmentSource(Protocol):
    """What is published: a producer of segments, not bytes. Called from the transport's threads."""

    @property
    def header(self) -> FrameHeader:
        """Complete before publish."""

    @property
    def plan(self) -> Sequence[Region]:
        """The region of every segment, by index."""

    @property
    def complete(self) -> bool:
        """Whether every segment is encoded; a lease counts from then, or from the last sign of a consumer."""

    def get(self, index: int, deadline: float) -> Sealed:
        """The segment; waits until it is encoded.

        Raises:
            TransferTimeout: it was not ready by ``deadline``.
            PeerLost: the source was closed.
        """

    def close(self, reason: str) -> None:
        """No more segments; waiting ``get`` calls raise."""


@dataclass(frozen=True)
class DeliveryStats:
    """What a delivery cost so far.

    nbytes: header and segments as received. seconds: from the request to the last byte, without the time in which
    the link had nothing left to bring because the consumer was busy elsewhere. waited_s: the part of seconds in which
    the producer's host gave the link nothing, as it was still encoding. latency_s: the part until the header came, a
    round trip that says nothing of the link's rate. ``link_s`` is what remains: time on the link.
    """

    nbytes: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0
    latency_s: float = 0.0

    @property
    def link_s(self) -> float:
        """Seconds in which the link was busy with these bytes."""
        return max(0.0, self.seconds - self.waited_s - self.latency_s)


class Delivery(Protocol):
    """One answer to a fetch: the header first, then the covering segments in the order they become ready."""

    @property
    def header(self) -> FrameHeader:
        """Already received and checked."""

    @property
    def stats(self) -> DeliveryStats:
        """Bytes and seconds so far; final once iteration ended."""

    def __iter__(self) -> Iterator[Sealed]:
        """Sealed segments; verification is the session's. Raises the typed transport errors."""

    def close(self) -> None:
        """Stop early; safe to call twice."""


@dataclass(frozen=True)
class Released:
    """A published transfer that ended: released by every share (``reason == ""``), expired or failed.

    ``source`` is what was published: a key may be on offer again by the time this is polled.
    """

    key: str
    reason: str
    reports: tuple[Outcome, ...] = ()
    source: SegmentSource | None = None


class Transport(ABC):
    """Both ends of a way to move segments. One object may publish and fetch; all methods are thread-safe.

    staging: with ``host`` bodies of segments lie on the host, with ``device`` on the GPU that encoded them.
    hashes_on_device: :meth:`piece_hashes` works where bodies lie, so that a GPU hashes those that go to the host, too.
    persistent: objects outlive the publisher.
    """

    Config: ClassVar[type[ComponentConfig]] = ComponentConfig
    staging: ClassVar[Literal["host", "device"]] = "host"
    hashes_on_device: ClassVar[bool] = False
    persistent: ClassVar[bool] = False
    config: ComponentConfig

    def __init__(self, config: ComponentConfig) -> None:
        self.config = config

    @property
    @abstractmethod
    def address(self) -> str:
        """Where this object publishes; binds on first use, so that a fetching side opens no port."""

    @abstractmethod
    def publish(self, key: str, source: SegmentSource, lease_s: float) -> str:
        """Offer ``source`` under ``key`` until released by every share or the lease ends; returns the address.

        A lease does not end while the source is incomplete, and starts over whenever a consumer takes a segment.

        Raises:
            TransportError: the key is taken, or there is no room (:class:`StoreFull`).
        """

    @abstractmethod
    def fetch(self, address: str, key: str, want: Selection, deadline: float) -> Delivery:
        """Ask the endpoint at ``address`` for the segments that cover ``want``.

        Raises:
            TransferTimeout: no answer by ``deadline``. LeaseLost: the key is not (or no longer) there.
            PeerLost: the peer closed. Unacceptable: this peer cannot decode what was published.
        """

    @abstractmethod
    def renew(self, address: str, key: str, lease_s: float) -> None:
        """Extend the lease; raises :class:`LeaseLost` when it is already gone."""

    @abstractmethod
    def release(self, address: str, key: str, share: tuple[int, int], report: Outcome | None) -> None:
        """Consumer ``i`` of ``n`` is done with ``key``; the producer frees it once all n are. Never raises for a
        key that is gone."""

    def piece_hashes(self, bodies: Sequence[Tensor]) -> Sequence[bytes]:
        """Of bodies on a device, for their digests: see :func:`kvserve_core.bodies.piece_hashes`. These are complete on
        return. Here they are copied to the host; where ``hashes_on_device``, they are hashed where they lie."""
        return [piece_hashes(host_bytes(body)) for body in bodies]

    def withdraw(self, key: str, reason: str) -> None:
        """Producer side: stop offering ``key``; fetches in flight fail with ``reason``."""

    def poll(self) -> Sequence[Released]:
        """Producer side: what ended since the last call. Never blocks."""
        return ()

    def close(self) -> None:
        """Free sockets, threads and temporary files; safe to call twice."""


class Store(Transport):
    """A persistent transport: publish writes the whole frame, then makes it visible at once (atomic)."""

    persistent: ClassVar[bool] = True

    @abstractmethod
    def contains(self, keys: Sequence[str]) -> int:
        """How many leading keys are present. Reads no payload."""
