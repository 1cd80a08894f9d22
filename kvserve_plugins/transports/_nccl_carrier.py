"""The producer's side of ``nccl``: tickets through the socket, bodies when a consumer says that it receives them."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvserve_core.bodies import Body
from kvserve_core.errors import FrameError, KVServeError, PeerLost, TransportError
from kvserve_core.wire import MAX_SEGMENT_BYTES
from kvserve_plugins.transports import _tcp_messages as msg
from kvserve_plugins.transports._carrier import Answer, Carrier, Cut
from kvserve_plugins.transports._nccl_channel import LOOK_S, Backend, Channel
from kvserve_plugins.transports._tcp_stream import Lent, Stream

TOKEN_BYTES = 16
MAX_JOBS = 64
"""Batches that one consumer may have asked for and not received."""
MAX_TAKE_BYTES = 2**32
UNUSED_S = 5.0
"""A pair that was used since gives way to no other."""


@dataclass
class Pair:
    """A consumer, by the connection on which it joined."""

    channel: Channel
    used: float
    beaten: float


@dataclass
class Waiting:
    """Bodies whose tickets went out, until their consumer takes them."""

    stream: Stream
    token: bytes = field(default_factory=lambda: os.urandom(TOKEN_BYTES))
    bodies: deque[Body] = field(default_factory=deque)


class PairCarrier(Carrier):
    """Whatever a consumer asks for on its pair is sent, in that order: where a fetch has ended meanwhile, zeros.

    A fetch that ends, here or there, so leaves nothing behind that the other side would wait for. bind: where the other
    side reaches this one. most: pairs at a time; each takes memory of the GPU. beat_s: how often an idle consumer is
    looked for.
    """

    def __init__(self, backend: Backend, bind: str, most: int, beat_s: float) -> None:
        self.on_device = backend.on_device
        self._backend, self._bind, self._most, self._beat_s = backend, bind, most, beat_s
        self.pairs: dict[bytes, Pair] = {}
        self._waiting: dict[Stream, Waiting] = {}
        self._tokens: dict[bytes, Waiting] = {}
        self._ending: list[Channel] = []
        self._looked = 0.0

    def cut(self, stream: Stream) -> Cut:
        """A ticket for a whole segment."""
        sealed = stream.outbox[0]
        waiting = self._waiting.get(stream)
        if waiting is None:
            waiting = self._waiting[stream] = Waiting(stream)
            self._tokens[waiting.token] = waiting
        size = len(sealed.body)
        waiting.bodies.append(sealed.body)
        stream.lent.append(Lent(0, msg.OVERHEAD))
        stream.credit -= msg.OVERHEAD  # a body comes when it is taken, so that its bytes need no credit
        piece = msg.Piece(stream.number, sealed.index, 0, size, bytes(sealed.head))
        return Cut((msg.encode(piece), waiting.token), len(sealed.head) + size, True)

    def acknowledged(self, stream: Stream, nbytes: int) -> None:
        """Consumers say it segment by segment, in order."""
        while stream.lent and nbytes >= stream.lent[0].counts:
            nbytes -= stream.lent.popleft().counts

    def dropped(self, stream: Stream) -> None:
        """What was taken goes on its way; the rest is forgotten."""
        stream.lent.clear()
        if waiting := self._waiting.pop(stream, None):
            del self._tokens[waiting.token]

    def handle(self, owner: bytes, request: msg.Join | msg.Take | msg.Leave, answer: Answer) -> None:
        """See :class:`Carrier`."""
        match request:
            case msg.Join():
                self._join(owner, request, answer)
            case msg.Take():
                self._take(owner, request, answer)
            case msg.Leave():
                self._end(owner, PeerLost("the consumer left"))

    def _join(self, owner: bytes, join: msg.Join, answer: Answer) -> None:
        if join.backend != self._backend.name:
            raise TransportError(
                f"the consumer's backend is {join.backend!r}, the producer's {self._backend.name!r}; set"
                " transport.nccl.backend alike"
            )
        if join.device and join.device == self._backend.device():
            raise TransportError("both sides use the same GPU, and NCCL needs two; use 'cuda_ipc' within one")
        if owner in self.pairs:
            raise FrameError("this connection has joined already")
        self._make_room(answer)
        invite, connect = self._backend.host(self._bind)
        if answer(owner, [msg.encode(msg.Joined(join.stream, invite))]):
            now = time.monotonic()
            self.pairs[owner] = Pair(Channel(connect), now, now)

    def _make_room(self, answer: Answer) -> None:
        now = time.monotonic()
        while len(self.pairs) >= self._most:
            unused = [o for o, p in self.pairs.items() if not p.channel.unfinished and now - p.used > UNUSED_S]
            if not unused:
                raise TransportError(f"{self._most} consumers are joined already; raise transport.nccl.max_pairs")
            longest = min(unused, key=lambda o: self.pairs[o].used)
            self._fail(longest, PeerLost("the pair gave way to another consumer's"), answer)

    def _take(self, owner: bytes, take: msg.Take, answer: Answer) -> None:
        pair = self.pairs.get(owner)
        if pair is None:
            raise PeerLost("this connection has not joined, or its pair is gone")
        try:
            waiting = self._tokens.get(take.token)
            bodies = _taken(waiting, take.sizes) if waiting else _filler(take.sizes)
            if pair.channel.unfinished >= MAX_JOBS:
                raise FrameError(f"{MAX_JOBS} batches are on their way to this consumer already")
            pair.channel.submit(bodies)
        except KVServeError as error:  # nothing of this batch comes, so that the order is lost
            self._end(owner, error)
            raise
        pair.used = time.monotonic()
        if waiting:
            waiting.stream.offer.used()
            answer(waiting.stream.owner, [msg.encode(msg.Going(waiting.stream.number))])

    def watch(self, answer: Answer) -> None:
        """Tell consumers whose pair failed, and look for those that say nothing."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        for owner, pair in list(self.pairs.items()):
            if pair.channel.error is not None:
                self._fail(owner, pair.channel.error, answer)
            elif now - pair.beaten > self._beat_s:
                pair.beaten = now
                if not answer(owner, [msg.BEAT]):
                    self._end(owner, PeerLost("the consumer is gone"))

    def _fail(self, owner: bytes, error: KVServeError, answer: Answer) -> None:
        answer(owner, [msg.encode(msg.to_failed(0, error))])
        self._end(owner, error)

    def _end(self, owner: bytes, error: KVServeError) -> None:
        if pair := self.pairs.pop(owner, None):
            pair.channel.fail(error)
            self._ending = [c for c in self._ending if not c.gone] + [pair.channel]

    def close(self) -> None:
        """End all pairs."""
        for owner in list(self.pairs):
            self._end(owner, PeerLost("the producer's transport was closed"))
        for channel in self._ending:
            channel.close()


def _taken(waiting: Waiting, sizes: Sequence[int]) -> list[Body]:
    """The next bodies of a fetch.

    Raises:
        FrameError: they are not of these sizes.
    """
    known = [len(body) for body, _ in zip(waiting.bodies, sizes, strict=False)]
    if known != list(sizes):
        raise FrameError(f"a Take of bodies of {list(sizes)[:8]} bytes, and the next are of {known[:8]}")
    return [waiting.bodies.popleft() for _ in sizes]


def _filler(sizes: Sequence[int]) -> list[int]:
    """As many bytes, which the consumer does not look at.

    Raises:
        FrameError: more than any Take can be for.
    """
    if sum(sizes) > MAX_TAKE_BYTES or max(sizes, default=0) > MAX_SEGMENT_BYTES:
        raise FrameError(f"a Take of {sum(sizes)} bytes, at most {MAX_TAKE_BYTES} go at a time")
    return list(sizes)


def read_token(data: memoryview, where: str) -> bytes:
    """A ticket.

    Raises:
        FrameError: it is no such thing.
    """
    if len(data) != TOKEN_BYTES:
        raise FrameError(f"a ticket of {len(data)} bytes, expected {TOKEN_BYTES}", where)
    return bytes(data)
