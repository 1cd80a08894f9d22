"""The producer's side of ``tcp``: one I/O thread that serves all consumers."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from kvserve_core.errors import FrameError, KVServeError, TransportError
from kvserve_core.transport import Selection
from kvserve_core.wire import pack_header
from kvserve_plugins.transports import _tcp_messages as msg
from kvserve_plugins.transports._carrier import Carrier
from kvserve_plugins.transports._leases import Leases
from kvserve_plugins.transports._pacing import Pacer
from kvserve_plugins.transports._serving import failed_source, select
from kvserve_plugins.transports._tcp_faults import Faults
from kvserve_plugins.transports._tcp_keys import Doorkeeper, secure_server
from kvserve_plugins.transports._tcp_sender import REST_S, TICK_S, Sender
from kvserve_plugins.transports._tcp_stream import Pullers, Stream

MAX_TIMEOUT_S = 3600.0
FAREWELL_MS = 200
"""How long closing waits for last messages: consumers in flight should hear why they fail."""
_BATCH = 64
_RECEIVE_S = 0.02
"""Requests are taken for this long at a time, so that large ones of some do not stop what is sent to others."""
_PULLERS = 2


class Waker:
    """Interrupts a poll from other threads; many calls cost one byte."""

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        self._set = False

    def fileno(self) -> int:
        """For the poller."""
        return self._read.fileno()

    def __call__(self) -> None:
        """Wake the loop."""
        if not self._set:
            self._set = True
            with contextlib.suppress(OSError):  # full: awake already; closed: no loop any more
                self._write.send(b"\0")

    def clear(self) -> None:
        """Called by the loop when it is awake, before it looks for work."""
        with contextlib.suppress(BlockingIOError):
            self._read.recv(4096)
        self._set = False

    def close(self) -> None:
        """Free both ends."""
        self._read.close()
        self._write.close()


class Server:
    """Binds at once and serves ``leases`` until closed.

    What a consumer can make this side hold is bounded by connection: streams, credit, queued answers, the size of a
    request. The parts of a request that never ends are not: ZeroMQ gathers them before it says that any came. With
    CURVE keys only their holders come that far.

    Raises:
        TransportError: the address cannot be bound.
    """

    def __init__(
        self,
        bind: str,
        port: int,
        key_dir: Path | None,
        pacer: Pacer,
        faults: Faults,
        leases: Leases,
        beat_s: float,
        carrier: Carrier,
    ) -> None:
        self._leases = leases
        self._carrier = carrier
        self._context = zmq.Context()
        self._door: Doorkeeper | None = None
        try:
            self._socket = self._listen(bind, port, key_dir, beat_s)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self.malformed = 0
        self.wake = Waker()
        self._closing = False
        self._leases_due = 0.0
        self._pullers = Pullers(self.wake, _PULLERS)
        self._sender = Sender(self._socket, self._pullers, pacer, faults, self._carrier)
        self._thread = threading.Thread(target=self._run, name="kvserve-tcp-io", daemon=True)
        self._thread.start()

    def _listen(self, bind: str, port: int, key_dir: Path | None, beat_s: float) -> zmq.Socket[bytes]:
        router = self._context.socket(zmq.ROUTER)
        router.linger = FAREWELL_MS
        router.maxmsgsize = msg.MAX_REQUEST
        router.router_mandatory = True  # a consumer that left is an error here, not a silent loss
        router.sndhwm = msg.MAX_QUEUED  # segments are bounded by credit; this is for answers that nobody reads
        router.heartbeat_ivl, router.heartbeat_timeout = int(beat_s * 1000), int(beat_s * 3000)
        router.ipv6 = ":" in bind
        if key_dir is not None:
            self._door = Doorkeeper(self._context, key_dir)
            secure_server(router, key_dir)
        host = f"[{bind}]" if ":" in bind else bind
        try:
            router.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            raise TransportError(
                f"cannot listen on {host}:{port}: {error}; set transport.tcp.bind to an address of this machine"
                " and transport.tcp.port to a free port, or 0"
            ) from error
        return router

    def close(self) -> None:
        """Stop the threads and free the port. The leases must be withdrawn already."""
        self._closing = True
        self.wake()
        self._thread.join()
        self._pullers.close()
        self._carrier.close()
        self.wake.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self.wake.fileno(), zmq.POLLIN)
        if self._door:
            poller.register(self._door.socket, zmq.POLLIN)
        wait_s = 0.0
        while not self._closing:
            events = _polled(poller, wait_s)
            if self.wake.fileno() in events:
                self.wake.clear()
            if self._door and self._door.socket in events:
                self._door.answer()
            if self._socket in events:
                self._receive()
            self._expire()
            self._sender.watch()
            self._carrier.watch(self._sender.reply)
            wait_s = min(self._sender.advance(), TICK_S if len(self._leases) else REST_S)
        self._sender.advance()  # tells those in flight
        if self._door:
            self._door.socket.close(0)
        self._socket.close()
        self._context.term()

    def _expire(self) -> None:
        now = time.monotonic()
        if now >= self._leases_due:
            upcoming = self._leases.expire()
            self._leases_due = min(upcoming, now + TICK_S) if len(self._leases) else 0.0

    def _receive(self) -> None:
        until = time.monotonic() + _RECEIVE_S
        for _ in range(_BATCH):
            if time.monotonic() > until:
                return
            try:
                owner, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                request = _request(parts)
            except FrameError as error:  # its stream is unknown; kvserve's consumers only have number 0
                self.malformed += 1
                self._sender.reply(owner, [msg.encode(msg.to_failed(0, error))])
                continue
            try:
                self._handle(owner, request)
            except KVServeError:
                self.malformed += 1

    def _handle(self, owner: bytes, request: msg.Request) -> None:
        match request:
            case msg.Fetch():
                self._answer(owner, request, lambda: self._open(owner, request))
            case msg.Renew():
                self._answer(owner, request, lambda: self._renew(owner, request))
            case msg.Release():
                self._leases.release(request.key, request.share, request.report)
            case msg.Credit():
                self._sender.grant((owner, request.stream), request.nbytes)
            case msg.Cancel():
                self._sender.cancel((owner, request.stream))
            case msg.Join() | msg.Take() | msg.Leave():
                self._answer(owner, request, lambda: self._carrier.handle(owner, request, self._sender.reply))

    def _answer(self, owner: bytes, request: msg.Request, act: Callable[[], None]) -> None:
        stream, what = getattr(request, "stream", 0), getattr(request, "key", type(request).__name__)
        try:
            act()
        except KVServeError as error:
            failed = msg.to_failed(stream, error)
        except BaseException as error:  # noqa: BLE001  # a source that breaks fails its own transfer only
            failed = msg.to_failed(stream, failed_source(what, error))
        else:
            return
        self._sender.reply(owner, [msg.encode(failed)])

    def _open(self, owner: bytes, fetch: msg.Fetch) -> None:
        if (owner, fetch.stream) in self._sender or not fetch.timeout_s > 0:
            raise FrameError(f"stream {fetch.stream} is in use, or a timeout of {fetch.timeout_s} s")
        self._sender.make_room(owner)
        offer = self._leases.get(fetch.key)
        header = offer.source.header
        indices = select(header, offer.source.plan, Selection(fetch.regions, fetch.peer))
        timeout_s = min(fetch.timeout_s, MAX_TIMEOUT_S)
        stream = Stream(owner, fetch.stream, offer, indices, timeout_s, self._carrier.on_device)
        stream.credit = min(fetch.credit, msg.MAX_WINDOW)
        if self._sender.reply(owner, [msg.encode(msg.Opened(fetch.stream, len(indices))), pack_header(header)]):
            self._sender.add(stream)

    def _renew(self, owner: bytes, renew: msg.Renew) -> None:
        self._leases.renew(renew.key, renew.lease_s)
        self._sender.reply(owner, [msg.encode(msg.Done(renew.stream))])


def _polled(poller: zmq.Poller, wait_s: float) -> dict[object, int]:
    """What happened within ``wait_s``. A poll counts whole milliseconds, in which a fast link sends tens of MB, so the
    rest of one is slept."""
    whole_ms = int(wait_s * 1000)
    events = dict(poller.poll(whole_ms))
    rest_s = wait_s - whole_ms / 1000
    if not events and rest_s > 0:
        time.sleep(rest_s)
        events = dict(poller.poll(0))
    return events


def _request(parts: list[bytes]) -> msg.Request:
    if len(parts) != 1:
        raise FrameError(f"a request of {len(parts)} parts, expected 1")
    return msg.decode_request(parts[0])
