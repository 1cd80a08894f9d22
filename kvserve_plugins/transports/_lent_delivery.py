"""One fetch on the consumer's side where bodies lie in shared memory: as ``tcp``'s, with tickets for bodies."""

from __future__ import annotations

from collections.abc import Callable

from kvserve_core.errors import FrameError, PeerLost
from kvserve_core.transport import Selection
from kvserve_core.wire import Sealed
from kvserve_plugins.transports import _tcp_messages as msg
from kvserve_plugins.transports._lending import Memory, Place, Ticket, read_ticket
from kvserve_plugins.transports._tcp_link import Link
from kvserve_plugins.transports._ticket_delivery import TicketDelivery


class LentDelivery(TicketDelivery):
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
            while self._here():
                lent.append(self._ticket())
        except PeerLost:
            if not self._ended:  # the producer is gone, not only what it offered: a mapping would keep its memory
                self._memory.forget(self._handle)
            raise
        first = lent[0][1]
        if any((t.handle, t.nbytes) != (first.handle, first.nbytes) for _, t in lent):
            raise FrameError("tickets of one fetch name several memories", "segment")
        self._handle = first.handle
        places = [Place(ticket.at, piece.size) for piece, ticket in lent]
        copies = self._memory.take(first.handle, first.nbytes, places)
        self._give_back(sum(piece.size + msg.OVERHEAD for piece, _ in lent))
        return [Sealed(p.index, p.head, body, h) for (p, _), (body, h) in zip(lent, copies, strict=True)]

    def _ticket(self) -> tuple[msg.Piece, Ticket]:
        piece, data = self._piece()
        self._admit(piece)
        return piece, read_ticket(data, piece.size, f"segment {piece.index}")
