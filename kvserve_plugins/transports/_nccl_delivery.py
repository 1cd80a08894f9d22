"""One fetch on the consumer's side of ``nccl``: tickets by the socket, bodies by the pair, two batches at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from kvserve_core.errors import FrameError
from kvserve_core.transport import Selection
from kvserve_core.wire import Sealed
from kvserve_plugins.transports import _tcp_messages as msg
from kvserve_plugins.transports._nccl_carrier import read_token
from kvserve_plugins.transports._nccl_channel import LOOK_S, Job
from kvserve_plugins.transports._nccl_pairs import Pair
from kvserve_plugins.transports._serving import cancelled, timed_out
from kvserve_plugins.transports._tcp_link import Link
from kvserve_plugins.transports._ticket_delivery import TicketDelivery

DEPTH = 2
"""Batches under way: the next comes while one is worked on."""


_GOING = msg.encode(msg.Going(0))


@dataclass
class Batch:
    """The ``number``-th Take of this fetch, counted from 1. counted: its time on the link is known."""

    number: int
    pieces: list[msg.Piece]
    job: Job
    counted: bool = False

    @property
    def nbytes(self) -> int:
        """Of bodies."""
        return sum(p.size for p in self.pieces)


class PairDelivery(TicketDelivery):
    """join: gives the pair, once the producer has accepted the fetch; leave: takes it back.

    window: bytes of bodies under way. A batch that was asked for is received, also when nobody wants it any more: the
    pair goes on with the next.
    """

    def __init__(
        self,
        link: Link,
        key: str,
        want: Selection,
        deadline: float,
        window: int,
        on_end: Callable[[Link], None],
        join: Callable[[], Pair],
        leave: Callable[[Pair], None],
    ) -> None:
        self._pair: Pair | None = None
        self._leave: Callable[[Pair], None] | None = leave
        self._batches: deque[Batch] = deque()
        self._token = b""
        self._takes = self._going = 0
        self._most = window // DEPTH
        super().__init__(link, key, want, deadline, msg.MAX_WINDOW, on_end)
        try:
            self._pair = join() if self._count else None
        except BaseException:
            self.close()
            raise
        self._clock.since = time.monotonic()  # making a pair is no time on the link

    def _left(self) -> bool:
        return bool(self._batches) or super()._left()

    def _segments(self) -> list[Sealed]:
        """Those of the oldest batch, while the next is on its way."""
        if self._pair is None:
            raise cancelled(self._key)
        self._settle()
        if not self._batches:
            self._begin(self._pair)
        if len(self._batches) < DEPTH and self._here():
            self._begin(self._pair)
        return self._arrived(self._pair, self._batches.popleft())

    def _begin(self, pair: Pair) -> None:
        """Take what is announced already, at least one segment."""
        pieces, enough = [self._ticket()], pair.batch_bytes(self._most)
        while sum(p.size for p in pieces) < enough and len(pieces) < msg.MAX_TAKE and self._here():
            pieces.append(self._ticket())
        self._takes += 1
        self._batches.append(Batch(self._takes, pieces, pair.take(self._token, [p.size for p in pieces])))

    def _ticket(self) -> msg.Piece:
        piece, data = self._piece()
        self._admit(piece)
        token = read_token(data, f"segment {piece.index}")
        if token != (self._token or token):
            raise FrameError("tickets of one fetch name several fetches", f"segment {piece.index}")
        self._token = token
        return piece

    def _arrived(self, pair: Pair, batch: Batch) -> list[Sealed]:
        while not batch.job.done.wait(LOOK_S):
            if self._closed:
                raise cancelled(self._key)
            if time.monotonic() > self._deadline:
                raise timed_out(self._link.peer, self._key, time.monotonic() - self._started)
            pair.look()
        if not batch.counted:
            self._clock.blocked(time.monotonic(), batch.nbytes)
        if batch.job.error is None:
            self._confirm(batch)
        taken = pair.taken(batch.job)
        for piece in batch.pieces:
            self._nbytes += len(piece.head) + piece.size
            self._give_back(msg.OVERHEAD)
        return [Sealed(p.index, p.head, body, h) for p, (body, h) in zip(batch.pieces, taken, strict=True)]

    def _confirm(self, batch: Batch) -> None:
        """See that these are bodies of the fetch: it had not ended when the producer sent them."""
        while self._going < batch.number:
            for parts in self._backlog:
                if len(parts) == 1 and isinstance(reply := self._reply(parts), msg.Failed):
                    raise self._failed(reply)
            with self._lock:
                if self._closed:
                    raise cancelled(self._key)
                parts_or_none = self._link.wait(self._deadline, self._key, self._started)
                self._clock.blocked(time.monotonic(), self._came(parts_or_none) if parts_or_none else 0)

    def _settle(self) -> None:
        """The user is back: until now the link was busy with what is still under way, or until that was through."""
        now = time.monotonic()
        for batch in self._batches:
            if not batch.job.done.is_set():
                self._clock.blocked(now, 0)
            elif not batch.counted:
                batch.counted = True
                self._clock.blocked(max(self._clock.since, batch.job.ended), batch.nbytes)
        self._clock.since = now

    def _came(self, parts: list[zmq.Frame]) -> int:
        if len(parts) == 1 and parts[0].buffer == _GOING:
            self._going += 1
            return 0
        return super()._came(parts)

    def _accept(self, piece: msg.Piece, body: memoryview) -> None:
        """Counted when its body is there."""

    def _weight(self, parts: list[zmq.Frame]) -> int:
        return 0

    def close(self) -> None:
        """As ``tcp``'s; the pair stays."""
        super().close()
        with self._lock:
            pair, leave, self._leave = self._pair, self._leave, None
        if pair is not None and leave is not None:
            leave(pair)
