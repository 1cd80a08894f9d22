"""A pair of ranks and the bodies that go from the first to the second, in the order in which both were told.

A communicator belongs to one thread. It is never waited for without looking around, so that a peer that died or hangs
costs its pair and nothing else.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from kvserve_core.bodies import Body
from kvserve_core.errors import KVServeError, PeerLost, TransferCancelled, TransferTimeout

LOOK_S = 0.02
"""How often whoever waits looks whether the other side is there."""
STALL_S = 30.0
"""A batch that takes longer has lost its peer, whatever the heartbeats say."""
AHEAD = 4
"""Batches handed to the communicator before the first of them is through."""
_IDLE_S = 1.0
_JOIN_S = 5.0
_names = itertools.count()

Check: TypeAlias = Callable[[], None]
"""Raises what ended the channel, if anything did."""


class Communicator(Protocol):
    """Two ranks: 0 sends, 1 receives. Called by one thread, but for ``interrupt`` and ``room``."""

    def post(self, bodies: Sequence[Body | int], check: Check) -> Any:
        """Begin to send these, or to receive into these tensors; int: that many bytes, whatever they are.

        Empty bodies are not sent. Raises as :meth:`through`.
        """

    def through(self, posted: Any, check: Check) -> bool:
        """Whether what :meth:`post` gave is, after a moment, or where that cannot be asked, when it is.

        Raises:
            PeerLost, TransferTimeout: it never will be.
        """

    def room(self, sizes: Sequence[int]) -> list[Tensor]:
        """u8 tensors to receive into."""

    def interrupt(self) -> None:
        """The channel failed: wake who waits in ``through``, from another thread."""

    def abort(self) -> None:
        """Free everything; the peer may be gone, and what was posted may never be through."""


Connect: TypeAlias = Callable[[Check], Communicator]
"""Opens one end; waits for the other, and looks around meanwhile."""


class Backend(Protocol):
    """Makes communicators. ``on_device``: whether bodies are sent from where a GPU encoded them."""

    name: str
    on_device: bool

    def device(self) -> str:
        """What both sides must not share; empty: nothing."""

    def host(self, bind: str) -> tuple[bytes, Connect]:
        """Rank 0, reached at ``bind``: what the other side must know, and how to meet it. Does not wait."""

    def guest(self, invite: bytes, host: str) -> Connect:
        """Rank 1: how to meet the side at ``host`` that made ``invite``; raises FrameError where it is malformed."""

    def taken(self, bodies: Sequence[Tensor]) -> list[tuple[Body, bytes | None]]:
        """What was received into ``room``, for the caller's stream, with the hashes of their pieces if known."""


class Job:
    """Bodies on their way. begun, ended: on ``time.monotonic()``; the latter is set with ``done``."""

    def __init__(self, bodies: Sequence[Any]) -> None:
        self.bodies = bodies
        self.begun = time.monotonic()
        self.done = threading.Event()
        self.error: KVServeError | None = None
        self.ended = 0.0

    def end(self, error: KVServeError | None = None) -> None:
        """Tell who waits."""
        self.error, self.ended = error, time.monotonic()
        self.done.set()


class Channel:
    """One end, with the thread that drives it. Jobs are through in the order of :meth:`submit`.

    watch: called from that thread now and then, may call :meth:`fail`.
    """

    def __init__(self, connect: Connect, watch: Callable[[Channel], None] = lambda channel: None) -> None:
        self._connect, self._watch = connect, watch
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._communicator: Communicator | None = None
        self._looked = 0.0
        self.unfinished = 0
        """Jobs not yet through."""
        self.ready = threading.Event()
        """It is connected, or failed."""
        self.error: KVServeError | None = None
        self._thread = threading.Thread(target=self._run, name=f"kvserve-nccl-{next(_names)}", daemon=True)
        self._thread.start()

    def room(self, sizes: Sequence[int]) -> list[Tensor]:
        """Of a channel that is ready."""
        if self.error is not None or self._communicator is None:
            raise self.error or PeerLost("the channel is not connected yet")
        return self._communicator.room(sizes)

    def submit(self, bodies: Sequence[Body | int]) -> Job:
        """Queue bodies to send, or tensors to receive into; keeps them until they are through."""
        job = Job(bodies)
        with self._lock:
            if self.error is not None:
                raise self.error
            self.unfinished += 1
            self._queue.put(job)
        return job

    def fail(self, error: KVServeError) -> None:
        """Give up, with everything that is not through; the first reason counts."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error
            self._queue.put(None)
        if self._communicator is not None:
            self._communicator.interrupt()

    def close(self) -> None:
        """Give up and wait for the thread; one that hangs in a library is left behind."""
        self.fail(TransferCancelled("the transport was closed"))
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    @property
    def gone(self) -> bool:
        """Its thread has ended."""
        return not self._thread.is_alive()

    def _check(self) -> None:
        now = time.monotonic()
        if now - self._looked > LOOK_S:
            self._looked = now
            self._watch(self)
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        posted: deque[tuple[Job, Any]] = deque()
        try:
            self._communicator = self._connect(self._check)
            self.ready.set()
            while True:
                self._step(self._communicator, posted)
        except KVServeError as error:
            self.fail(error)
        except BaseException as error:  # noqa: BLE001  # a library that breaks fails this pair only
            self.fail(PeerLost(f"the other side of the pair is gone, or its library failed: {error}"))
        finally:
            self._end(posted)

    def _step(self, communicator: Communicator, posted: deque[tuple[Job, Any]]) -> None:
        job = self._next(wait=not posted) if len(posted) < AHEAD else None
        if job is not None:
            posted.append((job, None))  # before it begins, so that a failure in between ends it
            posted[-1] = (job, communicator.post(job.bodies, self._check))
        elif posted and communicator.through(posted[0][1], self._check):
            self._count_down()
            posted.popleft()[0].end()

    def _next(self, wait: bool) -> Job | None:
        self._check()
        try:
            return self._queue.get(timeout=_IDLE_S) if wait else self._queue.get_nowait()
        except queue.Empty:
            return None

    def _count_down(self) -> None:
        with self._lock:
            self.unfinished -= 1

    def _end(self, posted: deque[tuple[Job, Any]]) -> None:
        """``posted`` holds what a device may still read or write until the communicator is gone."""
        if self._communicator is not None:
            try:
                self._communicator.abort()
            except Exception as error:  # noqa: BLE001  # nothing is left to tell but this
                self.error = PeerLost(f"{self.error}; and ending it failed: {error}")
        self.ready.set()
        for job, _ in posted:
            job.end(self.error)
        while not self._queue.empty():
            job_or_end = self._queue.get()
            if job_or_end is not None:
                job_or_end.end(self.error)


def stalled(since: float) -> TransferTimeout | None:
    """What ends a batch begun at ``since`` that takes too long."""
    waited = time.monotonic() - since
    return TransferTimeout(f"bodies were not through after {waited:.3g} s") if waited > STALL_S else None
