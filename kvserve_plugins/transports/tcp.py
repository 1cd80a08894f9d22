"""The ``tcp`` transport."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, model_validator

from kvserve_core.component import ComponentConfig
from kvserve_core.errors import FrameError, KVServeError, TransferCancelled
from kvserve_core.policy import Outcome
from kvserve_core.transport import Delivery, Released, SegmentSource, Selection
from kvserve_core.units import Bandwidth, Duration, Size
from kvserve_plugins.transports import _tcp_messages as msg
from kvserve_plugins.transports._carrier import Carrier, InBand
from kvserve_plugins.transports._hashing import HashesOnDevice
from kvserve_plugins.transports._leases import Leases, checked_lease
from kvserve_plugins.transports._pacing import Pacer
from kvserve_plugins.transports._serving import checked_key
from kvserve_plugins.transports._tcp_address import is_host, is_loopback, is_wildcard, parse, published
from kvserve_plugins.transports._tcp_delivery import TcpDelivery
from kvserve_plugins.transports._tcp_faults import Faults, parse_faults
from kvserve_plugins.transports._tcp_keys import create_keys
from kvserve_plugins.transports._tcp_link import Link, Links
from kvserve_plugins.transports._tcp_server import Server

__all__ = ["Tcp", "create_keys"]


class Tcp(HashesOnDevice):
    """Pull over TCP with ZeroMQ: leases, flow control, CURVE keys, bandwidth limit.

    Address: ``tcp://host:port``; loopback carries the id of its machine, so that a consumer elsewhere gets an error
    that says what to set. The first ``publish`` (or ``address``) binds; a side that only fetches opens no port.
    """

    class Config(ComponentConfig):
        """Where to listen, whom to serve, how fast.

        bind, port: where a producer listens; port 0 is any free one. advertise: the host consumers should use, where
        it differs from ``bind``. key_dir: CURVE keys (see ``create_keys``), required beyond loopback unless
        ``insecure``. max_bandwidth: of everything this producer sends. window: bytes under way per fetch.
        timeout: for renewals. heartbeat: an unanswering peer is lost after three. faults: for tests only.
        """

        bind: str = "127.0.0.1"
        port: int = Field(0, ge=0, le=65535)
        advertise: str | None = None
        key_dir: Path | None = None
        insecure: bool = False
        max_bandwidth: Bandwidth | None = Field(None, gt=0)
        window: Size = Field(8 * 2**20, ge=4 * msg.PIECE_BYTES, le=msg.MAX_WINDOW)
        timeout: Duration = Field(5.0, gt=0)
        heartbeat: Duration = Field(5.0, ge=0.1, le=600)
        faults: str = ""

        @model_validator(mode="after")
        def _safe(self) -> Self:
            if not is_host(self.bind) and self.bind != "*":
                raise ValueError(f"bind = {self.bind!r} is no host; give an address of this machine, e.g. '10.0.0.5'")
            if self.advertise is not None and (not is_host(self.advertise) or is_wildcard(self.advertise)):
                raise ValueError(
                    f"advertise = {self.advertise!r} is no host that consumers can reach; give a name or an address"
                    " such as '10.0.0.5', or leave it out to use 'bind'"
                )
            if not is_loopback(self.bind) and self.key_dir is None and not self.insecure:
                raise ValueError(
                    f"bind = {self.bind!r} can be reached from other machines; set key_dir to a folder of CURVE keys,"
                    " or insecure = true on a network where everyone may read and fetch KV caches"
                )
            if is_wildcard(self.bind) and not self.advertise:
                raise ValueError(f"bind = {self.bind!r} is every interface; set advertise to one consumers can reach")
            parse_faults(self.faults)
            return self

    config: Config
    scheme: ClassVar[str] = "tcp"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._leases = Leases()
        self._links = Links(config.key_dir, config.heartbeat)
        self._server: Server | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._closing = threading.Lock()

    @property
    def address(self) -> str:
        """Where this object publishes; binds on first use.

        Raises:
            TransportError: the port cannot be bound. ConfigError: no usable keys in ``key_dir``.
        """
        c = self.config
        with self._lock:
            if self._closed:
                raise TransferCancelled("this 'tcp' transport is closed; create a new one")
            if self._server is None:
                pacer, faults = Pacer(c.max_bandwidth), Faults(c.faults)
                carrier = self._carrier(pacer)
                self._server = Server(c.bind, c.port, c.key_dir, pacer, faults, self._leases, c.heartbeat, carrier)
            return self.scheme + str(published(c.advertise or c.bind, self._server.port)).removeprefix("tcp")

    def _carrier(self, pacer: Pacer) -> Carrier:
        """What takes bodies along."""
        return InBand(pacer.piece(msg.PIECE_BYTES))

    def publish(self, key: str, source: SegmentSource, lease_s: float) -> str:
        """Offer ``source``; its segments are taken when a consumer asks for them."""
        address = self.address
        self._leases.add(checked_key(key), source, lease_s)
        self._wake()
        return address

    def fetch(self, address: str, key: str, want: Selection, deadline: float) -> Delivery:
        """Segments in the frame's order, each as soon as it is encoded and everything before it was sent.

        Raises:
            TransferTimeout, LeaseLost, PeerLost, Unacceptable: see :class:`Transport`. FrameError: malformed answer.
            TransportError: the address cannot lead to the producer, or the selection is too large.
            TransferCancelled: the transport was closed meanwhile, also while the header is awaited.
        """
        at = parse(address, self.scheme)
        return TcpDelivery(
            self._links.take(at), key, want, deadline, self.config.window, lambda link: self._links.give(at, link)
        )

    def renew(self, address: str, key: str, lease_s: float) -> None:
        """Extend a lease, here or at the producer; waits at most ``timeout`` for the answer."""
        if self._mine(address):
            self._leases.renew(key, lease_s)
            return
        at = parse(address, self.scheme)
        link = self._links.take(at)
        try:
            failed = _ask(link, msg.Renew(0, key, checked_lease(lease_s)), key, self.config.timeout)
        except BaseException:
            link.close()
            raise
        self._links.give(at, link)
        if failed is not None:
            raise failed

    def release(self, address: str, key: str, share: tuple[int, int], report: Outcome | None) -> None:
        """One share is done. Sent without waiting for an answer; a producer that is gone needs none."""
        if self._mine(address):
            self._leases.release(key, share, report)
            self._wake()
            return
        at = parse(address, self.scheme)
        link = self._links.take(at)
        try:
            link.send(msg.Release(key, share, report))
        except BaseException:
            link.close()
            raise
        self._links.give(at, link)

    def _mine(self, address: str) -> bool:
        return self._server is not None and address == self.address

    def withdraw(self, key: str, reason: str) -> None:
        """Stop offering ``key``; fetches of it fail."""
        self._leases.withdraw(key, reason)
        self._wake()

    def poll(self) -> Sequence[Released]:
        """What ended since the last call."""
        return self._leases.poll()

    def _wake(self) -> None:
        if self._server is not None:
            self._server.wake()

    def close(self) -> None:
        """Withdraw everything, and free threads, port and connections. A second call waits for the first."""
        with self._closing:
            with self._lock:
                first, self._closed = not self._closed, True
            if not first:
                return
            self._links.close()
            self._leases.withdraw_all("the transport was closed")
            if self._server is not None:
                self._server.close()


def _ask(link: Link, request: msg.Renew, key: str, timeout_s: float) -> KVServeError | None:
    """Send a request and wait; the producer's error, if any."""
    link.send(request)
    started = time.monotonic()
    parts = None
    while parts is None:
        parts = link.wait(started + timeout_s, key, started)
    match msg.decode_reply(parts[0].buffer):
        case msg.Done():
            return None
        case msg.Failed() as failed:
            return msg.to_error(failed, link.peer)
        case other:
            raise FrameError(f"{link.peer} answered with {type(other).__name__}, expected Done")
