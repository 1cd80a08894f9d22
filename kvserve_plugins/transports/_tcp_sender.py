"""What the I/O thread of ``tcp`` sends: pieces of segments in turn, as credit, rate and faults allow."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import zmq

from kvserve_core.errors import FrameError, KVServeError, TransferTimeout
from kvserve_core.wire import Buffer
from kvserve_plugins.transports import _tcp_messages as msg
from kvserve_plugins.transports._carrier import Carrier
from kvserve_plugins.transports._pacing import Pacer
from kvserve_plugins.transports._tcp_faults import Faults, corrupted
from kvserve_plugins.transports._tcp_stream import Pullers, Stream

MAX_STREAMS = 1024
MAX_PER_OWNER = 4
"""Of one connection; a kvserve consumer has one fetch at a time on each."""
BEAT_S = 5.0
"""How often the consumer of a fetch that waits is looked for."""
STARVED_S = 300.0
"""A fetch without credit for this long is given up: its consumer takes nothing."""
EVICT_S = 5.0
"""The same while there is no room for others."""
TICK_S = 0.05
"""How often deadlines are looked at while nothing else happens."""
REST_S = 5.0
_BATCH = 64


class Held(NamedTuple):
    """A piece on its way, to be sent at ``due``. nbytes: what it was booked for."""

    due: float
    stream: Stream
    parts: Sequence[Buffer]
    nbytes: int


class Sender:
    """The streams being served, round robin by piece. Only the I/O thread may call it."""

    def __init__(
        self, socket: zmq.Socket[bytes], pullers: Pullers, pacer: Pacer, faults: Faults, carrier: Carrier
    ) -> None:
        self._socket, self._pullers, self._pacer, self._faults = socket, pullers, pacer, faults
        self._carrier = carrier
        self._streams: dict[tuple[bytes, int], Stream] = {}
        self._turn: deque[Stream] = deque()
        self._held: Held | None = None
        self._watch_due = 0.0
        self.unsent = 0

    def __contains__(self, key: tuple[bytes, int]) -> bool:
        return key in self._streams

    def __len__(self) -> int:
        return len(self._streams)

    def make_room(self, owner: bytes) -> None:
        """See that one more stream of ``owner`` can be taken, if need be instead of one that takes nothing.

        Raises:
            FrameError: there are too many.
        """
        if sum(o == owner for o, _ in self._streams) >= MAX_PER_OWNER:
            raise FrameError(f"{MAX_PER_OWNER} fetches are under way on this connection; open another one")
        if len(self._streams) < MAX_STREAMS:
            return
        starved = min((s for s in self._streams.values() if s.credit <= 0), key=_starved_since, default=None)
        if starved is None or time.monotonic() - starved.starved_since < EVICT_S:
            raise FrameError(f"{MAX_STREAMS} fetches are being served already; try again later")
        self._give_up(starved, starved_out(starved))

    def watch(self) -> None:
        """Give up streams whose consumer is gone or takes nothing; cheap to call often."""
        now = time.monotonic()
        if now < self._watch_due:
            return
        self._watch_due = now + min(BEAT_S, STARVED_S) / 5
        for stream in list(self._streams.values()):
            if stream.credit <= 0 and now - stream.starved_since > STARVED_S:
                self._give_up(stream, starved_out(stream))
            elif now - stream.beat_at > BEAT_S:
                stream.beat_at = now
                if not self.reply(stream.owner, [msg.encode(msg.Beat(stream.number))]):
                    self.cancel((stream.owner, stream.number))

    def add(self, stream: Stream) -> None:
        """Serve a stream."""
        self._streams[stream.owner, stream.number] = stream
        self._turn.append(stream)
        self._pullers.submit(stream)

    def grant(self, key: tuple[bytes, int], nbytes: int) -> None:
        """The consumer has room for more."""
        if stream := self._streams.get(key):
            stream.credit = min(stream.credit + nbytes, msg.MAX_WINDOW)
            self._carrier.acknowledged(stream, nbytes)

    def cancel(self, key: tuple[bytes, int]) -> None:
        """Forget a stream."""
        if stream := self._streams.pop(key, None):
            stream.cancelled = True
            self._turn.remove(stream)
            self._carrier.dropped(stream)

    def advance(self) -> float:
        """Send what can be sent now, a batch at most; returns the seconds until there may be more."""
        for _ in range(_BATCH):
            self._held = self._held or self._next()
            if self._held is None:
                return self._idle()
            now = time.monotonic()
            if self._held.due > now and not self._unwanted(self._held):
                return self._held.due - now
            self._transmit(self._held)
            self._held = None
        return 0.0

    def reply(self, owner: bytes, parts: Sequence[Buffer]) -> bool:
        """Send a message; False when its receiver is gone, or does not read what it was sent before."""
        try:
            self._socket.send(owner, zmq.SNDMORE | zmq.NOBLOCK)
            for part in parts[:-1]:
                self._socket.send(part, zmq.SNDMORE)
            self._socket.send(parts[-1], copy=False)  # small ones are copied all the same
        except zmq.ZMQError:
            self.unsent += 1
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
                self._give_up(stream, error)
            elif stream.finished:
                self._finish(stream, msg.End(stream.number, stream.waited_s))
            elif not stream.outbox:
                self._pullers.submit(stream)
            elif self._may_send(stream) and not self._strike(stream) and (held := self._cut(stream)):
                return held
        return None

    @staticmethod
    def _may_send(stream: Stream) -> bool:
        now = time.monotonic()
        stream.resume(now)
        return stream.credit > 0 and stream.not_before <= now

    def _give_up(self, stream: Stream, error: KVServeError) -> None:
        self._finish(stream, msg.to_failed(stream.number, error))

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

    def _cut(self, stream: Stream) -> Held | None:
        cut = self._carrier.cut(stream)
        if cut is None:
            return None
        due = self._pacer.due(cut.nbytes)
        if stream.credit <= 0:
            stream.starved_since = due
        if cut.last:
            stream.pop(due)
            self._pullers.submit(stream)
        return Held(due, stream, cut.parts, cut.nbytes)

    def _unwanted(self, held: Held) -> bool:
        """Whether nobody waits for it any more: then nobody waits for the link that it was to take, either."""
        stream = held.stream
        error = None if stream.cancelled else stream.failure()
        if error is not None:
            self._give_up(stream, error)
        if stream.cancelled:
            self._pacer.refund(held.nbytes)
        return stream.cancelled

    def _transmit(self, held: Held) -> None:
        stream = held.stream
        stream.beat_at = held.due
        if not stream.cancelled and not stream.offer.ended and not self.reply(stream.owner, held.parts):
            self.cancel((stream.owner, stream.number))


def _starved_since(stream: Stream) -> float:
    return stream.starved_since


def starved_out(stream: Stream) -> TransferTimeout:
    """What a consumer that takes nothing is told."""
    idle_s = time.monotonic() - stream.starved_since
    return TransferTimeout(f"the consumer of {stream.offer.key!r} took nothing for {idle_s:.3g} s and was given up")
