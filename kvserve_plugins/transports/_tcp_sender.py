"""What the I/O thread of ``tcp`` sends: pieces of segments in turn, as credit, rate and faults allow."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import zmq

from kvserve_core.wire import Buffer
from kvserve_plugins.transports import _tcp_messages as msg
from kvserve_plugins.transports._pacing import Pacer
from kvserve_plugins.transports._tcp_faults import Faults, corrupted
from kvserve_plugins.transports._tcp_stream import Pullers, Stream

MAX_STREAMS = 1024
TICK_S = 0.05
"""How often deadlines are looked at while nothing else happens."""
REST_S = 5.0
_BATCH = 64


class Held(NamedTuple):
    """A piece on its way, to be sent at ``due``."""

    due: float
    stream: Stream
    parts: Sequence[Buffer]


class Sender:
    """The streams being served, round robin by piece. Only the I/O thread may call it."""

    def __init__(self, socket: zmq.Socket[bytes], pullers: Pullers, pacer: Pacer, faults: Faults) -> None:
        self._socket, self._pullers, self._pacer, self._faults = socket, pullers, pacer, faults
        self._piece = pacer.piece(msg.PIECE_BYTES)
        self._streams: dict[tuple[bytes, int], Stream] = {}
        self._turn: deque[Stream] = deque()
        self._held: Held | None = None

    def __contains__(self, key: tuple[bytes, int]) -> bool:
        return key in self._streams

    @property
    def full(self) -> bool:
        """No more streams can be taken."""
        return len(self._streams) >= MAX_STREAMS

    def add(self, stream: Stream) -> None:
        """Serve a stream."""
        self._streams[stream.owner, stream.number] = stream
        self._turn.append(stream)
        self._pullers.submit(stream)

    def grant(self, key: tuple[bytes, int], nbytes: int) -> None:
        """The consumer has room for more."""
        if stream := self._streams.get(key):
            stream.credit = min(stream.credit + nbytes, msg.MAX_WINDOW)

    def cancel(self, key: tuple[bytes, int]) -> None:
        """Forget a stream."""
        if stream := self._streams.pop(key, None):
            stream.cancelled = True
            self._turn.remove(stream)

    def advance(self) -> float:
        """Send what can be sent now, a batch at most; returns the seconds until there may be more."""
        for _ in range(_BATCH):
            self._held = self._held or self._next()
            if self._held is None:
                return self._idle()
            now = time.monotonic()
            if self._held.due > now:
                return self._held.due - now
            self._transmit(self._held)
            self._held = None
        return 0.0

    def reply(self, owner: bytes, parts: Sequence[Buffer]) -> bool:
        """Send a message; False when its receiver is gone."""
        try:
            self._socket.send(owner, zmq.SNDMORE | zmq.NOBLOCK)
            for part in parts[:-1]:
                self._socket.send(part, zmq.SNDMORE)
            self._socket.send(parts[-1], copy=False)  # small ones are copied all the same
        except zmq.ZMQError:
            return False
        return True

    def _idle(self) -> float:
        self._pacer.rest()
        if not self._turn:
            return REST_S
        now = time.monotonic()
        return min((s.not_before - now for s in self._turn if s.not_before > now), default=TICK_S)

    def _next(self) -> Held | None:
        for _ in range(len(self._turn)):
            stream = self._turn[0]
            self._turn.rotate(-1)
            if error := stream.failure():
                self._finish(stream, msg.to_failed(stream.number, error))
            elif stream.finished:
                self._finish(stream, msg.End(stream.number, stream.waited_s))
            elif not stream.outbox:
                self._pullers.submit(stream)
            elif stream.credit > 0 and stream.not_before <= time.monotonic() and not self._strike(stream):
                return self._cut(stream)
        return None

    def _finish(self, stream: Stream, last: msg.Reply) -> None:
        self.reply(stream.owner, [msg.encode(last)])
        self.cancel((stream.owner, stream.number))

    def _strike(self, stream: Stream) -> bool:
        """Apply the next fault, if any, to a segment not yet begun; True when nothing of it can be sent now."""
        if stream.begun:
            return False
        stream.begin()
        fault = self._faults.next()
        if fault is None:
            return False
        if fault.action == "corrupt":
            stream.outbox[0] = corrupted(stream.outbox[0])
        elif fault.action == "delay":
            stream.not_before = time.monotonic() + fault.seconds
        elif fault.action == "drop":
            stream.pop(time.monotonic())
        return fault.action in ("delay", "drop")

    def _cut(self, stream: Stream) -> Held:
        sealed, offset = stream.outbox[0], stream.offset
        size = len(sealed.body)
        body = sealed.body if size <= self._piece else memoryview(sealed.body)[offset : offset + self._piece]
        head = b"" if offset else bytes(sealed.head)
        stream.offset += len(body)
        stream.credit -= len(body) + msg.OVERHEAD
        parts = (msg.encode(msg.Piece(stream.number, sealed.index, offset, size, head)), body)
        due = self._pacer.due(len(head) + len(body))
        if stream.offset >= size:
            stream.pop(due)
            self._pullers.submit(stream)
        return Held(due, stream, parts)

    def _transmit(self, held: Held) -> None:
        stream = held.stream
        if not stream.cancelled and not stream.offer.ended and not self.reply(stream.owner, held.parts):
            self.cancel((stream.owner, stream.number))
