"""One fetch on the consumer's side of ``tcp``: pieces back into segments, credit, and time on the link."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch
import zmq

from kvserve_core.errors import FrameError, KVServeError, PeerLost
from kvserve_core.payload import as_bytes
from kvserve_core.transport import DeliveryStats, Selection
from kvserve_core.wire import MAX_SEGMENT_BYTES, FrameHeader, Sealed, unpack_header
from kvserve_plugins.transports import _tcp_messages as msg
from kvserve_plugins.transports._pacing import MIN_PIECE
from kvserve_plugins.transports._selection import check_size
from kvserve_plugins.transports._serving import cancelled, checked_key, timed_out
from kvserve_plugins.transports._tcp_link import Link

SEGMENT_EXTRA = 192
"""A frame is at most its original bytes and this much for every segment."""
LEAST_S = 1e-6
"""On the link, for any delivery: one faster than can be told is no delivery without a link."""
BRIEF_S = 1e-4
"""Away for less, messages are taken one by one, so that the memory of one serves the next."""


class LinkClock:
    """Time the link was busy, told apart from time its user was away while everything had arrived already.

    Away time counts in full while more was under way when the user came back. Where nothing was, the link became
    idle at an unknown moment in between, and what arrived is charged at the rate seen so far.
    """

    def __init__(self, now: float) -> None:
        self.seconds = 0.0
        self.since, self._nbytes = now, 0

    def blocked(self, now: float, nbytes: int) -> None:
        """Waited for the link until ``now``; ``nbytes`` came."""
        self.seconds += now - self.since
        self.since = now
        self._nbytes += nbytes

    def away(self, now: float, nbytes: int, more: bool) -> None:
        """Back at ``now``; ``nbytes`` had come, and ``more`` was still under way."""
        gap = now - self.since
        if not more and self._nbytes:
            gap = min(gap, nbytes * self.seconds / self._nbytes)
        self.seconds += gap
        self.since = now
        self._nbytes += nbytes


class TcpDelivery:
    """Iterate in one thread; ``close`` may come from any. ``on_end`` gets the link back when it is clean.

    Raises:
        As :meth:`kvserve_core.transport.Transport.fetch`, from the constructor and while iterating.
    """

    def __init__(
        self, link: Link, key: str, want: Selection, deadline: float, window: int, on_end: Callable[[Link], None]
    ) -> None:
        self._link, self._key, self._deadline, self._window, self._on_end = link, key, deadline, window, on_end
        self._lock = threading.Lock()
        self._closed = self._ended = self._freed = False
        self._started = time.monotonic()
        self._clock = LinkClock(self._started)
        self._backlog: deque[list[zmq.Frame]] = deque()
        self._waited_s, self._nbytes, self._spent = 0.0, 0, 0
        self._latency_s = 0.0
        self._room, self._taken = window, 0
        self._seen: set[int] = set()
        timeout_s = max(deadline - self._started, 1e-3)
        try:
            check_size(want.regions)
            link.send(msg.Fetch(0, checked_key(key), want.regions, want.peer, window, timeout_s))
            self.header, self._count = self._open()
            self._latency_s = time.monotonic() - self._started
        except BaseException:
            self.close()
            raise
        self._limit = self.header.raw_bytes + SEGMENT_EXTRA * self.header.num_segments

    @property
    def stats(self) -> DeliveryStats:
        """Bytes and seconds so far."""
        seconds = max(self._clock.seconds, self._waited_s + self._latency_s + LEAST_S)
        return DeliveryStats(self._nbytes, seconds, self._waited_s, self._latency_s)

    def _open(self) -> tuple[FrameHeader, int]:
        parts = self._next()
        match self._reply(parts):
            case msg.Opened(count=count) if len(parts) == 2:
                self._nbytes += len(parts[1])
                return unpack_header(parts[1].bytes), count
            case msg.Failed() as failed:
                raise self._failed(failed)
            case other:
                raise FrameError(f"{self._link.peer} answered with {type(other).__name__}, expected a header")

    def __iter__(self) -> Iterator[Sealed]:
        try:
            while self._left():
                yield from self._segments()
            self._finish()
        finally:
            self.close()

    def _left(self) -> bool:
        """Whether segments are still to come."""
        return len(self._seen) < self._count

    def _segments(self) -> Iterable[Sealed]:
        """The next segments, at least one."""
        yield self._segment()

    def _segment(self) -> Sealed:
        """The next segment; one that fits in a message is not copied."""
        piece, body = self._piece()
        self._admit(piece)
        parts, room = [body], self._pinned(piece.size) if len(body) < piece.size else None
        got = len(body)
        if room is not None:
            room[:got] = body
        if got < min(piece.size, MIN_PIECE):
            raise FrameError(f"a first piece of {got} bytes, of {piece.size}", f"segment {piece.index}")
        while got < piece.size:
            following, body = self._piece()
            if len(body) != min(len(parts[0]), piece.size - got):  # many small ones would cost more than they bring
                raise FrameError(f"a piece of {len(body)} bytes after one of {len(parts[0])}", f"segment {piece.index}")
            if following != msg.Piece(piece.stream, piece.index, got, piece.size, b""):
                raise FrameError("pieces of a segment do not follow each other", f"segment {piece.index}")
            if room is None:
                parts.append(body)
            else:
                room[got : got + len(body)] = body
            got += len(body)
        if got != piece.size:
            raise FrameError(f"{got} bytes came, {piece.size} were announced", f"segment {piece.index}")
        if room is not None:
            return Sealed(piece.index, piece.head, room)
        return Sealed(piece.index, piece.head, parts[0] if len(parts) == 1 else b"".join(parts))

    @staticmethod
    def _pinned(nbytes: int) -> memoryview | None:
        """Memory for a segment where this process uses a GPU: kept by torch, so its pages are there already, and
        copied from at the full rate of the bus."""
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch does not annotate it
            return None
        return as_bytes(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))

    def _admit(self, piece: msg.Piece) -> None:
        self._spent += len(piece.head) + piece.size
        where = f"segment {piece.index}"
        if piece.offset or piece.index >= self.header.num_segments or piece.index in self._seen:
            raise FrameError("comes twice, in part, or is not of this frame", where)
        if self._spent > self._limit or piece.size > MAX_SEGMENT_BYTES:
            raise FrameError(f"{self._spent} bytes so far, the header allows {self._limit}", where)
        self._seen.add(piece.index)

    def _piece(self) -> tuple[msg.Piece, memoryview]:
        if time.monotonic() > self._deadline:  # a producer that sends on and on never makes the link wait
            raise timed_out(self._link.peer, self._key, time.monotonic() - self._started)
        parts = self._next()
        match self._reply(parts):
            case msg.Piece() as piece if len(parts) == 2:
                body = parts[1].buffer
                if not len(body) and piece.size:
                    raise FrameError("an empty piece", f"segment {piece.index}")
                self._accept(piece, body)
                return piece, body
            case msg.Failed() as failed:
                raise self._failed(failed)
            case msg.End():
                self._ended = True
                raise PeerLost(
                    f"{self._link.peer} ended {self._key!r} after {len(self._seen)} of {self._count} segments"
                )
            case other:
                raise FrameError(f"{self._link.peer} sent {type(other).__name__}, expected a segment")

    def _accept(self, piece: msg.Piece, body: memoryview) -> None:
        self._nbytes += len(piece.head) + len(body)
        self._grant(len(body) + msg.OVERHEAD)

    def _finish(self) -> None:
        parts = self._next()
        match self._reply(parts):
            case msg.End(waited_s=waited_s):
                self._ended = True
                self._waited_s = max(0.0, min(waited_s, self._clock.seconds))
            case msg.Failed() as failed:
                raise self._failed(failed)
            case other:
                raise FrameError(f"{self._link.peer} sent {type(other).__name__} after the last segment")

    def _failed(self, failed: msg.Failed) -> KVServeError:
        self._ended = True
        return msg.to_error(failed, self._link.peer)

    @staticmethod
    def _reply(parts: list[zmq.Frame]) -> msg.Reply:
        return msg.decode_reply(parts[0].buffer)

    def _grant(self, nbytes: int) -> None:
        """Give credit back in steps of a quarter window, as segments are taken."""
        self._taken += nbytes
        if self._taken >= self._window // 4:
            self._link.send(msg.Credit(0, self._taken))
            self._room += self._taken
            self._taken = 0

    def _next(self) -> list[zmq.Frame]:
        while not self._backlog:
            with self._lock:
                if self._closed:
                    raise cancelled(self._key)
                if time.monotonic() - self._clock.since < BRIEF_S or not self._drain():
                    parts = self._link.wait(self._deadline, self._key, self._started)
                    self._clock.blocked(time.monotonic(), self._came(parts) if parts else 0)
        return self._backlog.popleft()

    def _drain(self) -> bool:
        """Take in all that came while the user was away."""
        came = 0
        while parts := self._link.ready():
            came += self._came(parts)
        if self._backlog:
            last = len(self._backlog[-1]) == 1  # End or Failed
            starved = self._room < 2 * msg.PIECE_BYTES
            self._clock.away(time.monotonic(), came, not last and not starved)
        return bool(self._backlog)

    def _came(self, parts: list[zmq.Frame]) -> int:
        """Note a message that arrived; returns its payload bytes."""
        if len(parts) == 1 and parts[0].buffer == msg.BEAT:
            return 0
        nbytes = self._weight(parts)
        self._room -= nbytes + msg.OVERHEAD
        self._backlog.append(parts)
        return nbytes

    def _weight(self, parts: list[zmq.Frame]) -> int:
        """Payload bytes of a message."""
        return sum(map(len, parts[1:]))

    def close(self) -> None:
        """Stop early: tells the producer, and frees the link."""
        self._closed = True
        with self._lock:
            if self._freed:
                return
            self._freed = True
            if self._ended and not self._backlog:
                self._on_end(self._link)
            else:
                self._link.cancel()
