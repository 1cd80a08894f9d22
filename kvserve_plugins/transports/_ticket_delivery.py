"""One fetch on the consumer's side where bodies do not come through the socket: tickets do."""

from __future__ import annotations

import zmq

from kvserve_core.errors import FrameError
from kvserve_plugins.transports import _tcp_messages as msg
from kvserve_plugins.transports._tcp_delivery import TcpDelivery


class TicketDelivery(TcpDelivery):
    """As ``tcp``'s; pieces are whole segments, and credit goes back for whole ones, so that the producer can count."""

    def _here(self) -> bool:
        """Whether the next message is a ticket that has come already."""
        if len(self._seen) >= self._count:
            return False
        with self._lock:
            if not self._closed and not self._backlog:
                self._drain()
        return bool(self._backlog) and len(self._backlog[0]) == 2

    def _give_back(self, nbytes: int) -> None:
        """For the next segments in order, all of them: that is how the producer knows which have arrived."""
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
