"""The consumer's side of ``nccl``: pairs with producers, made when first needed and kept."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from kvserve_core.bodies import Body
from kvserve_core.errors import FrameError, KVServeError, PeerLost, TransferCancelled, TransportError
from kvserve_plugins.transports import _tcp_messages as msg
from kvserve_plugins.transports._nccl_channel import LOOK_S, Backend, Channel, Job
from kvserve_plugins.transports._serving import timed_out
from kvserve_plugins.transports._tcp_address import Address
from kvserve_plugins.transports._tcp_link import Link, Links

BATCH_S = 0.01
LEAST_BATCH = 4 * 2**20
Where: TypeAlias = tuple[Address, str]
"""A producer, and the device here."""


class Pair:
    """A channel, and the connection on which its producer is told what to send.

    All threads that fetch from this producer use it; what they ask for goes one after the other.
    """

    def __init__(self, link: Link, backend: Backend, invite: bytes, host: str) -> None:
        self._link, self._backend = link, backend
        self._lock = threading.Lock()
        self._rate, self._ended = 0.0, 0.0
        self.users = 0
        """Fetches under way; changed under the lock of the pool."""
        self.channel = Channel(backend.guest(invite, host), self._watch)

    def take(self, token: bytes, sizes: Sequence[int]) -> Job:
        """Ask for bodies, and receive them."""
        with self._lock:
            bodies = self.channel.room(sizes)
            self._link.send(msg.Take(token, tuple(sizes)))
            return self.channel.submit(bodies)

    def batch_bytes(self, most: int) -> int:
        """How much to ask for at a time: 10 ms of this link, so that decoding starts soon and asking costs little."""
        return int(min(max(self._rate * BATCH_S, LEAST_BATCH), most))

    def taken(self, job: Job) -> list[tuple[Body, bytes | None]]:
        """What a job received."""
        if job.error is not None:
            raise job.error
        spent = job.ended - max(job.begun, self._ended)
        if spent > 0:
            self._rate, self._ended = sum(body.numel() for body in job.bodies) / spent, job.ended
        return self._backend.taken(job.bodies)

    def look(self) -> None:
        """Whether the producer is there.

        Raises:
            KVServeError: what ended this pair.
        """
        self._watch(self.channel)
        if self.channel.error is not None:
            raise self.channel.error

    def _watch(self, channel: Channel) -> None:
        """From any thread; what another is just looking at need not be looked at twice."""
        if channel.error is None and self._lock.acquire(blocking=False):
            try:
                error = self._told() or self._link.lost()
            finally:
                self._lock.release()
            if error is not None:
                channel.fail(error)

    def _told(self) -> KVServeError | None:
        while parts := self._link.ready():
            try:
                reply = msg.decode_reply(parts[0].buffer)
            except FrameError as error:
                return error
            if isinstance(reply, msg.Failed):
                return msg.to_error(reply, self._link.peer)
        return None

    def close(self, error: KVServeError) -> None:
        """Tell the producer, and free everything."""
        self.channel.fail(error)
        self.channel.close()
        with self._lock:
            with contextlib.suppress(PeerLost, TransferCancelled):  # it knows
                self._link.send(msg.Leave())
            self._link.close()


class Turn:
    """Who makes a pair with one producer. users: those that do or want to."""

    def __init__(self) -> None:
        self.lock, self.users = threading.Lock(), 0


class PairPool:
    """At most ``most`` pairs; the least recently used one without a fetch gives way.

    A forked child starts with none and leaves its parent's alone.
    """

    def __init__(self, links: Links, backend: Callable[[], Backend], most: int) -> None:
        self._links, self._backend, self._most = links, backend, most
        self._lock = threading.Lock()
        self._pairs: OrderedDict[Where, Pair] = OrderedDict()
        self._parents: dict[Where, Pair] = {}
        self._turns: dict[Where, Turn] = {}
        self._pid = os.getpid()
        self._closed = False

    def take(self, at: Address, key: str, deadline: float) -> Pair:
        """A pair with a producer; hand it back with :meth:`give`.

        Raises:
            TransferTimeout: it is not connected by ``deadline``, and goes on connecting for the next fetch.
            PeerLost, TransportError: the producer refused, or is gone.
        """
        started = time.monotonic()
        backend = self._backend()
        where = at, backend.device()
        with self._making(where, key, deadline):
            pair = self._known(where) or self._made(where, backend, key, deadline)
        try:
            self._connected(pair, at, key, deadline, started)
        except BaseException:
            self.give(pair)
            raise
        return pair

    @contextlib.contextmanager
    def _making(self, where: Where, key: str, deadline: float) -> Iterator[None]:
        """Alone with one producer, so that nobody makes a second pair."""
        started = time.monotonic()
        with self._lock:
            self._after_fork()
            turn = self._turns.setdefault(where, Turn())
            turn.users += 1
        try:
            if not turn.lock.acquire(timeout=max(0.0, deadline - started)):
                raise timed_out(f"the producer at {where[0].zmq}", key, time.monotonic() - started)
            try:
                yield
            finally:
                turn.lock.release()
        finally:
            with self._lock:
                turn.users -= 1
                if not turn.users:
                    del self._turns[where]

    def _after_fork(self) -> None:
        if self._pid != os.getpid():
            self._parents = self._pairs  # kept: dropping them would close the parent's connections
            self._pairs, self._turns, self._pid = OrderedDict(), {}, os.getpid()

    def give(self, pair: Pair) -> None:
        """A fetch is done with it."""
        with self._lock:
            pair.users -= 1

    def _known(self, where: Where) -> Pair | None:
        with self._lock:
            pair = self._pairs.get(where)
            if pair is None:
                return None
            pair.users += 1
            self._pairs.move_to_end(where)
        try:
            pair.look()
        except KVServeError as error:
            self.give(pair)
            self._drop(where, pair, error)
            return None
        return pair

    def _made(self, where: Where, backend: Backend, key: str, deadline: float) -> Pair:
        self._make_room()
        at, device = where
        link = self._links.take(at)
        try:
            link.send(msg.Join(0, backend.name, device))
            pair = Pair(link, backend, _invite(link, key, deadline), at.host)
        except BaseException:
            link.close()
            raise
        pair.users = 1
        with self._lock:
            if not self._closed:
                self._pairs[where] = pair
                return pair
        closed = TransferCancelled("this 'nccl' transport is closed; create a new one")
        pair.close(closed)
        raise closed

    def _make_room(self) -> None:
        """Also ends what failed, or whose producer is gone."""
        with self._lock:
            pairs = list(self._pairs.items())
        for where, pair in pairs:
            try:
                pair.look()
            except KVServeError as error:
                self._drop(where, pair, error)
        while unused := self._surplus():
            unused.close(PeerLost("the pair gave way to another producer's"))

    def _surplus(self) -> Pair | None:
        """A pair that must go, no longer in the pool."""
        with self._lock:
            if len(self._pairs) < self._most:
                return None
            where = next((w for w, pair in self._pairs.items() if not pair.users), None)
            if where is None:
                raise TransportError(f"pairs with {self._most} producers are in use; raise transport.nccl.max_pairs")
            return self._pairs.pop(where)

    def _drop(self, where: Where, pair: Pair, error: KVServeError) -> None:
        with self._lock:
            if self._pairs.get(where) is not pair:
                return
            del self._pairs[where]
        pair.close(error)

    def _connected(self, pair: Pair, at: Address, key: str, deadline: float, started: float) -> None:
        while not pair.channel.ready.wait(LOOK_S):
            pair.look()
            if time.monotonic() > deadline:
                raise timed_out(f"the pair with the producer at {at.zmq}", key, time.monotonic() - started)
        pair.look()

    def close(self) -> None:
        """End all pairs; fetches under way fail."""
        with self._lock:
            pairs, self._closed = list(self._pairs.values()), True
            self._pairs.clear()
        for pair in pairs:
            pair.close(TransferCancelled("this 'nccl' transport was closed"))


def _invite(link: Link, key: str, deadline: float) -> bytes:
    """What the producer answers to Join."""
    started = time.monotonic()
    while True:
        parts = link.wait(deadline, key, started)
        reply = msg.decode_reply(parts[0].buffer) if parts else None
        match reply:
            case msg.Joined(invite=invite):
                return invite
            case msg.Failed() as failed:
                raise msg.to_error(failed, link.peer)
            case msg.Beat() | None:
                pass
            case other:
                raise FrameError(f"{link.peer} answered Join with {type(other).__name__}")
