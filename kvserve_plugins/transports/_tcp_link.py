"""A consumer's connection to one producer, and the pool that keeps idle ones open."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import threading
import time
import weakref
from collections import OrderedDict
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvserve_core.errors import PeerLost, TransferCancelled, TransportError
from kvserve_plugins.transports import _tcp_messages as msg
from kvserve_plugins.transports._serving import timed_out
from kvserve_plugins.transports._tcp_address import Address
from kvserve_plugins.transports._tcp_keys import secure_client

_LINGER_MS = 500
"""How long a last message (a release, a cancel) may still be sent while a link closes."""
_LOOK_S = 0.02
"""How often a waiting consumer looks whether the connection broke or it was closed."""
_QUEUED = 1024
_IDLE_PER_PEER = 8
_IDLE_PEERS = 16
_DOWN_S = 10.0
"""How long an address to which no connection came up is refused at once: its fetches would keep all threads waiting."""
_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class Link:
    """One socket and its monitor. Used by one thread at a time; does not reconnect, so that a loss is noticed.

    down: gets the address, with the time until which it is not to be tried again, when no connection came up within
    three beats.
    """

    def __init__(self, address: Address, key_dir: Path | None, beat_s: float, down: dict[Address, float]) -> None:
        self.peer = f"the producer at {address.zmq}"
        self._address, self._down, self._up_by = address, down, time.monotonic() + 3 * beat_s
        self._secure = key_dir is not None
        self._connected = self._up = False
        self.stopped = False
        """The transport was closed; set from any thread."""
        self._patience_ms = -1
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        try:
            self._set_up(address, key_dir, beat_s)
        except BaseException:
            self._socket.close(0)
            raise

    def _set_up(self, address: Address, key_dir: Path | None, beat_s: float) -> None:
        socket = self._socket
        socket.reconnect_ivl = -1
        socket.maxmsgsize, socket.rcvhwm = msg.MAX_REPLY, _QUEUED
        socket.heartbeat_ivl, socket.heartbeat_timeout = int(beat_s * 1000), int(beat_s * 3000)
        socket.ipv6 = ":" in address.host
        if key_dir is not None:
            secure_client(socket, key_dir)
        self._monitor = socket.get_monitor_socket(
            _LOST | _REFUSED | zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        )
        try:
            socket.connect(address.zmq)
        except zmq.ZMQError as error:
            self._monitor.close(0)
            raise TransportError(f"cannot connect to {address.zmq!r}: {error}; check the locator's address") from error

    def send(self, request: msg.Request) -> None:
        """Queue a message; never blocks.

        Raises:
            PeerLost: the connection broke or was refused. TransportError: the message cannot be sent as it is.
            TransferCancelled: it was closed from another thread.
        """
        try:
            data = msg.encode(request)
        except (UnicodeEncodeError, OverflowError, TypeError) as error:
            raise TransportError(f"a {type(request).__name__} that cannot be sent: {error}") from error
        if len(data) > msg.MAX_REQUEST:
            raise TransportError(f"a {type(request).__name__} of {len(data)} bytes; at most {msg.MAX_REQUEST} are read")
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            stuck = PeerLost(f"{self.peer} takes no more messages; it is stuck or gone{self._hint()}")
            raise self.lost() or stuck from None
        except zmq.ZMQError as error:
            if error.errno != zmq.ENOTSOCK:
                raise
            raise TransferCancelled(f"the connection to {self.peer} was closed here") from None

    def ready(self) -> list[zmq.Frame] | None:
        """The next message if it is here already."""
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None

    def wait(self, deadline: float, key: str, started: float) -> list[zmq.Frame] | None:
        """The next message, or None after a moment, so that the caller can see whether it was closed.

        Raises:
            TransferTimeout: nothing by ``deadline``. PeerLost: the connection broke, was refused or never came up.
            TransferCancelled: the transport was closed here.
        """
        if self.stopped:
            raise TransferCancelled(f"waiting for {key!r} ended: this 'tcp' transport was closed")
        left = deadline - time.monotonic()
        self._patience(math.ceil(1000 * max(0.0, min(left, _LOOK_S))))
        try:
            return self._socket.recv_multipart(copy=False)
        except zmq.Again:
            pass
        if lost := self.lost():
            parts = self.ready()  # what came before the loss counts
            if parts is None:
                raise lost
            return parts
        if not self._up and time.monotonic() > self._up_by:
            self._down[self._address] = time.monotonic() + _DOWN_S
            raise _unreachable(self._address)
        if left <= 0:
            raise timed_out(self.peer + self._hint(), key, time.monotonic() - started)
        return None

    def _patience(self, ms: int) -> None:
        if ms != self._patience_ms:
            self._socket.rcvtimeo = self._patience_ms = ms

    def lost(self) -> PeerLost | None:
        """Why the connection is gone, if the monitor says so since the last look."""
        lost = None
        while lost is None and self._monitor.poll(0):
            lost = self._look()
        return lost

    def _hint(self) -> str:
        if self._up:
            return ""
        return " (the connection never came up: check address, firewall and, with CURVE, the keys)"

    def _look(self) -> PeerLost | None:
        event = int(recv_monitor_message(self._monitor)["event"])
        if event in (zmq.EVENT_CONNECTED, zmq.EVENT_HANDSHAKE_SUCCEEDED):
            self._connected, self._up = True, event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            return None
        if self._up:
            return PeerLost(f"{self.peer} closed the connection or died")
        if event & _REFUSED or self._secure or self._connected:  # whichever side saw the mismatch first
            return PeerLost(
                f"{self.peer} refused the connection; check that transport.tcp.key_dir holds matching keys on both"
                " sides, that both sides set it or neither does, and that the address is a producer's"
            )
        return PeerLost(f"{self.peer} cannot be reached: nothing listens there")

    def alive(self) -> bool:
        """Whether an idle link can be used again: still connected, and nothing unexpected in it."""
        return self.lost() is None and self.ready() is None

    def cancel(self) -> None:
        """Tell the producer that nothing more is wanted, and close."""
        with contextlib.suppress(PeerLost):
            self.send(msg.Cancel(0))
        self.close()

    def close(self) -> None:
        """Free both sockets; queued messages have a moment to leave."""
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(_LINGER_MS)


class Links:
    """Idle links by address, those last used last. A forked child starts with none and leaves its parent's alone."""

    def __init__(self, key_dir: Path | None, beat_s: float) -> None:
        self._key_dir, self._beat_s = key_dir, beat_s
        self._lock = threading.Lock()
        self._idle: OrderedDict[Address, list[Link]] = OrderedDict()
        self._parents: dict[Address, list[Link]] = {}
        self._down: dict[Address, float] = {}
        self._busy: weakref.WeakSet[Link] = weakref.WeakSet()
        self._pid = os.getpid()
        self._closed = False

    def take(self, address: Address) -> Link:
        """A link nobody else uses; hand it back with :meth:`give`, or close it.

        Raises:
            PeerLost: no connection to this address came up lately.
        """
        self._check_down(address)
        while link := self._pop(address):
            if link.alive():
                break
            link.close()
        else:
            self._sweep()
            link = Link(address, self._key_dir, self._beat_s, self._down)
        with self._lock:
            self._busy.add(link)
            link.stopped = self._closed
        return link

    def _check_down(self, address: Address) -> None:
        until_s = self._down.get(address)
        if until_s is None:
            return
        if time.monotonic() < until_s:
            raise _unreachable(address)
        self._down.pop(address, None)

    def _sweep(self) -> None:
        """Close what leads to producers that are gone; done whenever the number of links would grow."""
        with self._lock:
            idle = [(address, link) for address, links in self._idle.items() for link in links]
            dead = [(address, link) for address, link in idle if not link.alive()]
            for address, link in dead:
                self._idle[address].remove(link)
                if not self._idle[address]:
                    del self._idle[address]
        for _, link in dead:
            link.close()

    def _pop(self, address: Address) -> Link | None:
        with self._lock:
            if self._closed:
                raise TransportError("this 'tcp' transport is closed; create a new one")
            if self._pid != os.getpid():
                self._parents = self._idle  # kept: dropping them would close the parent's sockets
                self._idle, self._pid = OrderedDict(), os.getpid()
            idle = self._idle.get(address)
            return idle.pop() if idle else None

    def give(self, address: Address, link: Link) -> None:
        """Keep a link for later; no reply may be outstanding on it."""
        surplus = [link]
        with self._lock:
            self._busy.discard(link)
            idle = self._idle.setdefault(address, [])
            self._idle.move_to_end(address)
            if not self._closed and len(idle) < _IDLE_PER_PEER:
                idle.append(surplus.pop())
            if len(self._idle) > _IDLE_PEERS:
                surplus += self._idle.popitem(last=False)[1]
        for link in surplus:
            link.close()

    def close(self) -> None:
        """Close all idle links; who waits on one in use is told at once, and closes it."""
        with self._lock:
            idle, self._idle, self._closed = self._idle, OrderedDict(), True
            for link in self._busy:
                link.stopped = True
        for link in itertools.chain.from_iterable(idle.values()):
            link.close()


def _unreachable(address: Address) -> PeerLost:
    return PeerLost(
        f"no connection to the producer at {address.zmq} comes up: check address, firewall and, with CURVE, the keys"
    )
