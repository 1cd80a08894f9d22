"""One fetch on the producer's side, and the threads that wait for its segments to be encoded."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvserve_core.errors import KVServeError, TransferTimeout
from kvserve_core.wire import Sealed
from kvserve_plugins.transports._leases import Offer
from kvserve_plugins.transports._serving import checked_segment, failed_source, timed_out

AHEAD_BYTES = 32 * 2**20
AHEAD_SEGMENTS = 256
"""How far pulling runs ahead of sending. Costs references only: a source holds its segments until it is closed."""
_SLICE_S, _SLICE_BUSY_S = 0.05, 0.001


class Lent(NamedTuple):
    """A place in a carrier's memory. counts: what of the consumer's credit it takes up."""

    at: int
    counts: int


class Stream:
    """Segments still to pull from the source, and those pulled but not sent. Pulled in the frame's order.

    A puller appends to ``outbox``; the I/O thread does everything else. ``pulling`` is true while a puller owns the
    stream or it waits in their queue.
    """

    def __init__(
        self,
        owner: bytes,
        number: int,
        offer: Offer,
        indices: Sequence[int],
        timeout_s: float,
        on_device: bool = False,
    ) -> None:
        self.owner, self.number, self.offer, self.on_device = owner, number, offer, on_device
        self.started = time.monotonic()
        self.deadline = self.started + timeout_s
        self.todo = deque(indices)
        self.outbox: deque[Sealed] = deque()
        self.lent: deque[Lent] = deque()
        """What lies in memory that the consumer reads, in order, until it says that it has it."""
        self.credit = 0
        self.starved_since = self.beat_at = self.started
        """Since when there is no credit, and when the consumer was last seen to be there."""
        self.offset = 0
        self.not_before = 0.0
        self.waited_s = 0.0
        self.error: KVServeError | None = None
        self.cancelled = False
        self.begun = False
        self.pulling = False
        self._ahead = 0
        self._idle_since: float | None = self.started
        self._lock = threading.Lock()

    @property
    def finished(self) -> bool:
        """Everything was handed to the network, and nothing is lent any more."""
        return not self.todo and not self.outbox and not self.lent

    def failure(self) -> KVServeError | None:
        """Why the stream cannot go on, or None."""
        if self.offer.ended:
            return self.offer.failure()
        if self.error is None and time.monotonic() > self.deadline:
            return timed_out("the source", self.offer.key, time.monotonic() - self.started)
        return self.error

    def claim(self) -> bool:
        """True when the stream has room and no puller; the caller must then queue it."""
        with self._lock:
            if self.pulling or not self._room(2):  # half empty, so that threads change less often
                return False
            self.pulling = True
            return True

    def keep(self) -> bool:
        """Whether its puller should go on; gives the stream back otherwise."""
        with self._lock:
            self.pulling = self._room(1)
            return self.pulling

    def _room(self, part: int) -> bool:
        small = self._ahead * part < AHEAD_BYTES and len(self.outbox) * part < AHEAD_SEGMENTS
        return bool(self.todo) and small and not (self.error or self.cancelled or self.offer.ended)

    def push(self, sealed: Sealed) -> bool:
        """A segment came from the source; True when it is the only one, so that the I/O thread must be told."""
        with self._lock:
            first = not self.outbox
            self._ahead += sealed.nbytes
            self.outbox.append(sealed)
            self.todo.popleft()
            return first

    def pop(self, sent: float) -> None:
        """The first segment of the outbox is through at the time ``sent``."""
        self.offer.used()
        with self._lock:
            self._ahead -= self.outbox.popleft().nbytes
            self._idle_since = None if self.outbox else sent
        self.offset, self.begun = 0, False

    def resume(self, now: float) -> None:
        """The I/O thread sees that there is something to send again: until ``now`` the link waited for this host."""
        if self._idle_since is not None:
            self.waited_s += max(0.0, now - self._idle_since)
            self._idle_since = None

    def begin(self) -> None:
        """The first segment of the outbox is about to be sent."""
        self.begun = True


class Pullers:
    """A few threads that wait for segments, so that the I/O thread never does.

    A source that is not ready is asked in short slices and then goes to the end of the queue: any number of slow
    transfers leaves room for one that is ready.
    """

    def __init__(self, wake: Callable[[], None], threads: int) -> None:
        self._wake = wake
        self._queue: queue.SimpleQueue[Stream | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"kvserve-tcp-pull-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, stream: Stream) -> None:
        """Pull for ``stream`` when it has room."""
        if stream.claim():
            self._queue.put(stream)

    def close(self) -> None:
        """Stop; sources must be closed already."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (stream := self._queue.get()) is not None:
            self._pull(stream)
            if stream.error:
                self._wake()

    def _pull(self, stream: Stream) -> None:
        while stream.keep():
            now = time.monotonic()
            until = now + (_SLICE_S if self._queue.empty() else _SLICE_BUSY_S)
            try:
                index = stream.todo[0]
                sealed = checked_segment(
                    stream.offer.source.get(index, min(until, stream.deadline)), index, stream.on_device
                )
                if stream.push(sealed):
                    self._wake()
            except TransferTimeout:
                if now < stream.deadline:
                    self._queue.put(stream)
                    return
                stream.error = timed_out("the source", stream.offer.key, now - stream.started)
            except KVServeError as error:
                stream.error = error
            except BaseException as error:  # noqa: BLE001  # a source that breaks fails its own transfer only
                stream.error = failed_source(stream.offer.key, error)
