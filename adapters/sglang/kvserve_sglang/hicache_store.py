"""Pages of the host pool to and from a Store: one object a page, written and read by the sessions of the core."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from kvserve_core.deployment import Deployment
from kvserve_core.errors import KVServeError, TransferCancelled, TransferTimeout, TransportError
from kvserve_core.pipeline import Pipeline
from kvserve_core.policy import Decision, Outcome
from kvserve_core.session import Consumer, Failed, Freed, Loaded, LoadFailed, Producer
from kvserve_core.spec import Region
from kvserve_core.transport import Endpoint, Locator
from kvserve_sglang.hicache_bounded import Bounded
from kvserve_sglang.hicache_pages import HostPages

WRITTEN_AT_ONCE = 16
"""Pages under way in the producer: its budget counts their original bytes."""
POLL_S = 0.001
GRACE_S = 0.5
"""After its deadline the session ends a page itself, unless the page's thread hangs."""
Result = TypeVar("Result")
Ended = Mapping[str, Outcome | Exception]
"""By name: what it cost, or why it is not there."""


@dataclass(frozen=True)
class Placed:
    """A page: its object's name, its place in the host pool, and the number of its first token in the object."""

    name: str
    page: int
    start: int = 0


def link_seconds(outcomes: Sequence[Outcome], wall_s: float) -> float:
    """Seconds for which a link was busy with pages that came, some at a time, within ``wall_s``.

    Threads fetch and decode at once. How many did, on average, is what their seconds add up to over the wall's.
    """
    fetching_s = sum(outcome.transfer_s for outcome in outcomes)
    at_once = (fetching_s + sum(outcome.decode_s for outcome in outcomes)) / wall_s if wall_s > 0 else 1.0
    return fetching_s / max(1.0, at_once)


class Places:
    """Pages that sessions may touch now. Once :meth:`closed` returns, none of them is touched any more."""

    def __init__(self) -> None:
        self._open: dict[str, Placed] = {}
        self._lock = threading.Lock()

    def opened(self, placed: Sequence[Placed]) -> None:
        """They are SGLang's to give until they are closed."""
        with self._lock:
            self._open.update((p.name, p) for p in placed)

    def closed(self, placed: Sequence[Placed]) -> None:
        """SGLang has them back."""
        with self._lock:
            for p in placed:
                self._open.pop(p.name, None)

    def gather(self, pages: HostPages, name: str, at: Region) -> Tensor:
        """Read, while the page is open."""
        with self._lock:
            placed = self._at(name)
            return pages.gather(at, placed.page, placed.start)

    def scatter(self, pages: HostPages, name: str, at: Region, x: Tensor) -> None:
        """Write, while the page is open."""
        with self._lock:
            placed = self._at(name)
            pages.scatter(at, placed.page, placed.start, x)

    def _at(self, name: str) -> Placed:
        if name not in self._open:
            raise TransferCancelled(f"SGLang took back the page of {name!r}")
        return self._open[name]


class PageStore:
    """One per rank. ``write`` and ``read`` wait: SGLang calls them on threads of their own. link: the name under which
    the goodput of reading is kept, and configured.

    Raises:
        ConfigError: ``store`` names no transport that keeps what it is given.
    """

    def __init__(self, deployment: Deployment, pages: HostPages, pipelines: Mapping[str, Pipeline], store: str) -> None:
        self.pages, self.link, self._deadline_s = pages, f"store:{store}", deployment.settings.deadline
        self.store = deployment.store(store)
        self._endpoint = Endpoint(self.store.address, pages.shard)
        self._writing, self._reading = Places(), Places()
        self._write_lock, self._read_lock = threading.Lock(), threading.Lock()
        self._producer: Producer = deployment.producer(pipelines, self._gather, store)
        self._stuck: set[str] = set()
        self._unwritable_until_s = 0.0
        self._lookup = Bounded(self._deadline_s)
        self._consumer: Consumer = deployment.consumer(pages.shard, self._scatter, link=self.link)

    def lookup(self, otherwise: Result, work: Callable[[], Result]) -> Result:
        """What ``work`` finds by :meth:`leading`, in as many calls as it likes; ``otherwise`` where that takes too
        long, and for as long after that."""
        return self._lookup.call(otherwise, work)

    def leading(self, names: Sequence[str]) -> int:
        """How many of the first are there. May hang; see :meth:`lookup`."""
        return self.store.contains(names)

    def write(self, placed: Sequence[Placed], decision: Decision) -> Ended:
        """Encode and store pages under a profile; a page is visible once all of it is written.

        After pages that the store did not take in time, none are given to it for as long.
        """
        ended: dict[str, Outcome | Exception] = {}
        with self._write_lock:
            for i in range(0, len(placed), WRITTEN_AT_ONCE):
                some = placed[i : i + WRITTEN_AT_ONCE]
                ended.update(self._silent(some) if self._unwritable else self._write(some, decision))
        return ended

    @property
    def _unwritable(self) -> bool:
        return time.monotonic() < self._unwritable_until_s

    def _silent(self, placed: Sequence[Placed]) -> Ended:
        return {p.name: TransportError(f"the store {self.store.address!r} does not answer") for p in placed}

    def _write(self, placed: Sequence[Placed], decision: Decision) -> Ended:
        ended: dict[str, Outcome | Exception] = {}
        self._writing.opened(placed)
        try:
            waiting = {p.name for p in placed if self._open(p, decision, ended)}
            until = time.monotonic() + self._deadline_s
            while waiting:
                for event in self._producer.poll():
                    match event:
                        case Freed(name):
                            waiting.discard(name)
                        case Failed(name, reason):
                            ended[name] = KVServeError(reason)
                        case Outcome():
                            ended[event.transfer_id] = event
                self._wait(until, waiting)
        finally:
            self._writing.closed(placed)
        return ended

    def _open(self, placed: Placed, decision: Decision, ended: dict[str, Outcome | Exception]) -> bool:
        stop = placed.start + self.pages.page_size
        try:
            self._producer.open(placed.name, stop, decision, start=placed.start)
        except KVServeError as error:
            ended[placed.name] = error
            return False
        self._producer.ready(placed.name, range(placed.start, stop))
        return True

    def _wait(self, until: float, waiting: set[str]) -> None:
        if time.monotonic() < until:
            time.sleep(POLL_S)
            return
        late = f"the store {self.store.address!r} did not take it within {self._deadline_s:g} s"
        for name in waiting:
            self._unwritable_until_s = time.monotonic() + self._deadline_s
            self._producer.abort(name, late)

    def read(self, placed: Sequence[Placed]) -> Ended:
        """Fetch, verify and decode pages into their places, until the deadline.

        A page that failed may be written in part. While pages of an earlier call hang in the store, none are fetched.
        """
        with self._read_lock:
            self._stuck -= {name for name, _ in self._loaded()}
            if self._stuck:
                return self._silent(placed)
            self._reading.opened(placed)
            try:
                return self._read(placed)
            finally:
                self._reading.closed(placed)

    def _read(self, placed: Sequence[Placed]) -> Ended:
        ended: dict[str, Outcome | Exception] = {}
        until = time.monotonic() + self._deadline_s
        waiting = {p.name for p in placed if self._fetch(p, until, ended)}
        while waiting:
            for name, result in self._loaded():
                waiting.discard(name)
                ended[name] = result
            if waiting and time.monotonic() > until + GRACE_S:
                ended.update(self._left(waiting))
                break
            time.sleep(POLL_S if waiting else 0)
        return ended

    def _left(self, waiting: set[str]) -> Ended:
        """Pages whose threads hang in the store: they write nothing any more, whenever they come back."""
        self._stuck |= waiting
        for name in waiting:
            self._consumer.cancel(name)
        late = f"the store {self.store.address!r} did not give it within {self._deadline_s:g} s"
        return {name: TransferTimeout(late) for name in waiting}

    def _fetch(self, placed: Placed, until: float, ended: dict[str, Outcome | Exception]) -> bool:
        stop = placed.start + self.pages.page_size
        try:
            self._consumer.fetch(Locator(placed.name, stop, (self._endpoint,), ""), range(placed.start, stop), until)
        except KVServeError as error:
            ended[placed.name] = error
            return False
        return True

    def _loaded(self) -> Iterator[tuple[str, Outcome | Exception]]:
        for event in self._consumer.poll():
            match event:
                case Loaded():
                    yield event.transfer_id, event.outcome
                case LoadFailed():
                    yield event.transfer_id, event.error

    def _gather(self, name: str, at: Region) -> Tensor:
        return self._writing.gather(self.pages, name, at)

    def _scatter(self, name: str, at: Region, x: Tensor) -> None:
        self._reading.scatter(self.pages, name, at, x)

    def close(self) -> None:
        """End both sessions."""
        self._lookup.close()
        self._producer.close()
        self._consumer.close()
