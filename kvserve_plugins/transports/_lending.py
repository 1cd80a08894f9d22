"""Bodies of segments in memory that a consumer on the same host opens: lent until it says that it has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec
from torch import Tensor

from kvserve_core.bodies import Body
from kvserve_core.errors import FrameError, KVServeError, TransportError
from kvserve_core.units import format_bytes
from kvserve_plugins.transports import _tcp_messages as msg
from kvserve_plugins.transports._carrier import Carrier, Cut
from kvserve_plugins.transports._slots import Slots
from kvserve_plugins.transports._tcp_stream import Lent, Stream


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """Where a body lies: ``at`` in memory of ``nbytes`` bytes that ``handle`` opens."""

    handle: bytes
    nbytes: int
    at: int


class Place(NamedTuple):
    """``size`` bytes from ``at`` on."""

    at: int
    size: int


class Memory(Protocol):
    """Memory that two processes of a host can share. Copies are complete on return. Thread-safe."""

    def allocate(self, nbytes: int, like: Body) -> tuple[Tensor, bytes]:
        """u8 memory where ``like`` lies, and what opens it elsewhere."""

    def free(self, room: Tensor) -> None:
        """Of :meth:`allocate`."""

    def put(self, room: Tensor, body: Body) -> None:
        """Copy a body into a part of such memory."""

    def take(self, handle: bytes, nbytes: int, places: Sequence[Place]) -> list[tuple[Tensor, bytes]]:
        """Copies out of another process's memory of ``nbytes``, each with the hashes of its pieces.

        Raises:
            TransportError: it cannot be opened here.
        """

    def forget(self, handle: bytes) -> None:
        """Close another process's memory: it is gone."""

    def close(self) -> None:
        """Close all of them."""


class Lender(Carrier):
    """The producer's side: copies bodies into its memory as credit allows, and sends tickets.

    nbytes: of that memory, for all fetches together; allocated with the first of them.
    """

    on_device = True

    def __init__(self, memory: Memory, nbytes: int) -> None:
        self._memory, self.slots = memory, Slots(nbytes)
        self._room: Tensor | None = None
        self._handle = b""
        self._refused: KVServeError | None = None

    def cut(self, stream: Stream) -> Cut | None:
        """A whole segment, if there is a place for it."""
        sealed = stream.outbox[0]
        size = len(sealed.body)
        if size > self.slots.nbytes:
            stream.error = TransportError(
                f"a segment of {format_bytes(size)} does not fit in 'staging' of {format_bytes(self.slots.nbytes)};"
                " raise it, or use smaller segments"
            )
            return None
        at = self.slots.take(size)
        if at is None:
            return None
        if not self._lay(stream, sealed.body, at):
            return None
        stream.lent.append(Lent(at, size + msg.OVERHEAD))
        stream.credit -= size + msg.OVERHEAD
        piece = msg.Piece(stream.number, sealed.index, 0, size, bytes(sealed.head))
        ticket = msgspec.msgpack.encode(Ticket(self._handle, self.slots.nbytes, at))
        return Cut((msg.encode(piece), ticket), len(sealed.head) + size, True)

    def _lay(self, stream: Stream, body: Body, at: int) -> bool:
        """Copy a body to its place. What goes wrong there fails this fetch, not the thread that serves all."""
        try:
            self._memory.put(self._open(body)[at : at + len(body)], body)
        except Exception as error:  # noqa: BLE001  # a GPU without free memory, say
            self.slots.give(at)
            reason = f"lending a segment failed: {type(error).__name__}: {error}"
            stream.error = error if isinstance(error, KVServeError) else TransportError(reason)
            return False
        return True

    def _open(self, like: Body) -> Tensor:
        """Its memory, allocated once; where memory cannot be shared that is not tried with every segment anew."""
        if self._refused is not None:
            raise self._refused
        if self._room is None:
            try:
                self._room, self._handle = self._memory.allocate(self.slots.nbytes, like)
            except KVServeError as error:
                self._refused = error
                raise
        return self._room

    def acknowledged(self, stream: Stream, nbytes: int) -> None:
        """Consumers say it for whole segments, in order."""
        while stream.lent and nbytes >= stream.lent[0].counts:
            lent = stream.lent.popleft()
            nbytes -= lent.counts
            self.slots.give(lent.at)

    def dropped(self, stream: Stream) -> None:
        """Its places are free: a consumer that still reads sees a digest that does not match."""
        while stream.lent:
            self.slots.give(stream.lent.popleft().at)

    def close(self) -> None:
        """Free the memory."""
        if self._room is not None:
            self._memory.free(self._room)
            self._room = None


def read_ticket(data: memoryview, size: int, where: str) -> Ticket:
    """What the producer says.

    Raises:
        FrameError: malformed, or a place outside its memory.
    """
    try:
        ticket = msgspec.msgpack.decode(data, type=Ticket)
    except (msgspec.MsgspecError, ValueError) as error:
        raise FrameError(f"a malformed ticket: {error}", where) from None
    if not 0 <= ticket.at <= ticket.nbytes - size:
        raise FrameError(f"{size} bytes at {ticket.at} of memory of {ticket.nbytes}", where)
    return ticket
