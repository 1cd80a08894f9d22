"""One fetch on the consumer's side where bodies lie in shared memory: as ``tcp``'s, with tickets for bodies."""

from __future__ import annotations

from collections.abc import Callable

import zmq

from kvserve_core.errors import FrameError, PeerLost
from kvserve_core.transport import Selection
from kvserve_core.wire import Sealed
from kvserve_plugins.transports import _tcp_messages as msg
from kvserve_plugins.transports._lending import Memory, Place, Ticket, read_ticket
from kvserve_plugins.transports._tcp_delivery import TcpDelivery
from kvserve_plugins.transports._tcp_link import Link


class LentDelivery(TcpDelivery):
    """Copies each body as its ticket comes, hashes it where it lies, and gives its place back."""

    def __init__(
        self,
        link: Link,
        key: str,
        want: Selection,
        deadline: float,
        window: int,
        on_end: Callable[[Link], None],
        memory: Memory,
    ) -> None:
        self._memory = memory
        self._handle = b""
        super().__init__(link, key, want, deadline, window, on_end)

    def _segments(self) -> list[Sealed]:
        """All whose tickets are here already, at least one: copied and hashed together."""
        try:
            lent = [self._ticket()]
            while self._more():
                lent.append(self._ticket())
        except PeerLost:
            self._memory.forget(self._handle)  # a mapping would keep a dead producer's memory
            raise
        first = lent[0][1]
        if any((t.handle, t.nbytes) != (first.handle, first.nbytes) for _, t in lent):
            raise FrameError("tickets of one fetch name several memories", "segment")
        self._handle = first.handle
        places = [Place(ticket.at, piece.size) for piece, ticket in lent]
        copies = self._memory.take(first.handle, first.nbytes, places)
        for piece, _ in lent:
            self._give_back(piece.size + msg.OVERHEAD)
        return [Sealed(p.index, p.head, body, h) for (p, _), (body, h) in zip(lent, copies, strict=True)]

    def _ticket(self) -> tuple[msg.Piece, Ticket]:
        piece, data = self._piece()
        self._admit(piece)
        return piece, read_ticket(data, piece.size, f"segment {piece.index}")

    def _more(self) -> bool:
        """Whether the next message is a ticket that is here."""
        if len(self._seen) >= self._count:
            return False
        with self._lock:
            if not self._closed and not self._backlog:
                self._drain()
        return bool(self._backlog) and len(self._backlog[0]) == 2

    def _give_back(self, nbytes: int) -> None:
        """Segment by segment, in order: that is how the producer knows which places are free."""
        self._link.send(msg.Credit(0, nbytes))
        self._room += nbytes

    def _accept(self, piece: msg.Piece, body: memoryview) -> None:
        self._nbytes += len(piece.head) + piece.size

    def _weight(self, parts: list[zmq.Frame]) -> int:
        if len(parts) < 2:
            return 0
        try:
            reply = msg.decode_reply(parts[0].buffer)
        except FrameError:  # told when its turn comes
            return 0
        return len(reply.head) + reply.size if isinstance(reply, msg.Piece) else sum(map(len, parts[1:]))
