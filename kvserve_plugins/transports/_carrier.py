"""How the body of a segment gets to a consumer: in the messages themselves, or beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from kvserve_core.bodies import host_bytes
from kvserve_core.errors import FrameError
from kvserve_core.wire import Buffer
from kvserve_plugins.transports import _tcp_messages as msg
from kvserve_plugins.transports._tcp_stream import Stream

Answer: TypeAlias = Callable[[bytes, Sequence[Buffer]], bool]
"""Sends a connection a message; False when it is gone."""


class Cut(NamedTuple):
    """What to send next of a stream. nbytes: what it counts for on the link. last: it ends its segment."""

    parts: Sequence[Buffer]
    nbytes: int
    last: bool


class Carrier(Protocol):
    """Asked by the I/O thread only. ``on_device``: whether it wants bodies where they were encoded."""

    on_device: bool

    def cut(self, stream: Stream) -> Cut | None:
        """Take the next piece off the first segment of the outbox, and credit with it; None: not now."""

    def acknowledged(self, stream: Stream, nbytes: int) -> None:
        """The consumer has this much more of what was sent."""

    def dropped(self, stream: Stream) -> None:
        """The stream ended, whatever of it the consumer has."""

    def handle(self, owner: bytes, request: msg.Join | msg.Take | msg.Leave, answer: Answer) -> None:
        """A request about bodies that go beside the connection; here none do."""
        raise FrameError(f"a {type(request).__name__}, but bodies go through the connection here")

    def watch(self, answer: Answer) -> None:
        """Called often, to see who is still there."""

    def close(self) -> None:
        """No stream is left."""


class InBand(Carrier):
    """Bodies go through the socket, in pieces of at most ``piece_bytes``."""

    on_device = False

    def __init__(self, piece_bytes: int) -> None:
        self._piece = piece_bytes

    def cut(self, stream: Stream) -> Cut:
        """The next piece."""
        sealed, offset = stream.outbox[0], stream.offset
        whole = host_bytes(sealed.body)
        body = whole if len(whole) <= self._piece else memoryview(whole)[offset : offset + self._piece]
        head = b"" if offset else bytes(sealed.head)
        stream.offset += len(body)
        stream.credit -= len(body) + msg.OVERHEAD
        piece = msg.encode(msg.Piece(stream.number, sealed.index, offset, len(whole), head))
        return Cut((piece, body), len(head) + len(body), stream.offset >= len(whole))

    def acknowledged(self, stream: Stream, nbytes: int) -> None:
        """Nothing is held."""

    def dropped(self, stream: Stream) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing is held."""
