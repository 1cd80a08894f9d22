"""Prompts whose KV this rank fetches: decoded regions are written into their blocks by the session's threads."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from torch import Tensor

from kvserve_core.errors import TransferCancelled
from kvserve_core.policy import Outcome
from kvserve_core.session import Consumer, Loaded, LoadFailed
from kvserve_core.spec import Region
from kvserve_core.transport import Locator
from kvserve_vllm.metadata import Load, LoadEnd, WorkerReport
from kvserve_vllm.placement import Placement
from kvserve_vllm.worker.waiting import LET_GO_S, SILENT, ending, give_up, wait_out

log = logging.getLogger(__name__)
MAX_FROM_ONE = 8
"""Fetches at once from one prefill engine, a quarter of what a session serves at once."""


@dataclass
class Ended:
    """What a worker must tell the engine. blocks: those that hold no valid KV, where only blocks can be named."""

    done: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    blocks: set[int] = field(default_factory=set)

    def join(self, other: Ended) -> None:
        """Add those of another kind of load."""
        self.done |= other.done
        self.failed |= other.failed
        self.blocks |= other.blocks

    def take(self) -> Ended:
        """Everything so far; this object starts anew."""
        taken = Ended(self.done, self.failed, self.blocks)
        self.done, self.failed, self.blocks = set(), set(), set()
        return taken


@dataclass
class Queued:
    """A load whose turn has not come. until_s: its deadline, on the monotonic clock."""

    load: Load
    until_s: float
    given_up: bool = False

    @property
    def peer(self) -> str:
        """Where it comes from: ranks of one engine share a host, or a fate."""
        return next((endpoint.address for endpoint in self.load.locator.endpoints), "")


class Loads:
    """Starts, cancels and ends loads. deadline_s: longest time a fetch may take."""

    def __init__(self, placement: Placement, deadline_s: float) -> None:
        self._placement, self._deadline_s = placement, deadline_s
        self._active: dict[str, Load] = {}
        self._queued: deque[Queued] = deque()
        self._fetching: dict[str, Queued] = {}
        self._consumer: Consumer | None = None
        self.ended = Ended()

    def attach(self, consumer: Consumer) -> None:
        """The session to drive: it is made after this object, whose ``scatter`` it takes."""
        self._consumer = consumer

    @property
    def active(self) -> int:
        """Loads in flight."""
        return len(self._active)

    def scatter(self, req_id: str, at: Region, x: Tensor) -> None:
        """Write a region into the request's blocks. Called from the fetch threads; fetches go by their request.

        Raises:
            TransferCancelled: the load ended meanwhile.
        """
        load = self._active.get(req_id)
        if load is None:
            raise TransferCancelled(f"the load of request {req_id!r} has ended")
        self._placement.scatter(load.blocks, at, x)

    def start(self, loads: Iterable[Load], report: WorkerReport) -> list[tuple[Load, Outcome]]:
        """Start fetching; those the forward pass waits for have ended on return. Where this raises, all have."""
        given = {load.req_id: load for load in loads}
        until_s = time.monotonic() + self._deadline_s
        self._active.update(given)
        self._queued.extend(Queued(load, until_s) for load in given.values())
        with ending(self, given.keys(), report):
            self._fetch_queued(report)
            return wait_out(self, {req_id for req_id, load in given.items() if load.wait}, report)

    def running(self, req_ids: Set[str]) -> set[str]:
        """Those of these loads that have not ended."""
        return set(req_ids & self._active.keys())

    def fail(self, req_id: str, reason: str, report: WorkerReport) -> None:
        """End a load that was cancelled and says nothing: nothing more is written for it."""
        load = self._active[req_id]
        self._queued = deque(queued for queued in self._queued if queued.load is not load)
        self._end(load, load.start, reason, report)

    def _fetch_queued(self, report: WorkerReport) -> None:
        """Start those that have their turn: a host that is gone must not take the fetch threads from the others."""
        for _ in range(len(self._queued)):
            queued = self._queued.popleft()
            load, peer = queued.load, queued.peer
            if queued.given_up or time.monotonic() > queued.until_s:
                self._end(load, load.start, "TransferTimeout: its turn did not come in time", report)
            elif sum(other.peer == peer for other in self._fetching.values()) >= MAX_FROM_ONE:
                self._queued.append(queued)
            else:
                self._fetch(queued, report)

    def _fetch(self, queued: Queued, report: WorkerReport) -> None:
        load = queued.load
        try:
            tokens = range(load.start, load.stop)
            self._session().fetch(load.locator, tokens, queued.until_s, name=load.req_id)
            self._fetching[load.req_id] = queued
        except Exception as error:  # noqa: BLE001  # the engine waits for this load's end, whatever went wrong
            self._end(load, load.start, f"{type(error).__name__}: {error}", report)

    def rest(self, seconds: float) -> None:
        """Leave the interpreter to the fetch threads until a load ends, at most so long."""
        if self._active:
            self._session().wait(seconds)

    def cancel(self, req_ids: Iterable[str]) -> None:
        """Give up loads; each still ends with one report."""
        given_up = set(req_ids)
        for req_id in given_up & self._fetching.keys():
            self._session().cancel(req_id)
        for queued in self._queued:
            queued.given_up = queued.given_up or queued.load.req_id in given_up

    def release(self, locators: Iterable[Locator]) -> None:
        """Nothing of these is needed: tell their producers."""
        for locator in locators:
            self._session().release(locator)

    def poll(self, report: WorkerReport) -> list[tuple[Load, Outcome]]:
        """What ended since the last call, with what it cost."""
        outcomes = []
        for event in self._session().poll():
            load = self._active.get(event.transfer_id)
            if load is None:
                continue
            outcomes.append((load, event.outcome))
            match event:
                case Loaded():
                    self._end(load, load.stop, "", report)
                case LoadFailed():
                    log.warning("loading %r failed, %s", load.locator.transfer_id, event.error)
                    self._end(load, event.valid.stop, f"{type(event.error).__name__}: {event.error}", report)
        overdue = [name for name, queued in self._fetching.items() if time.monotonic() > queued.until_s + LET_GO_S]
        give_up(self, overdue, SILENT, report)
        self._fetch_queued(report)
        return outcomes

    def _end(self, load: Load, valid: int, reason: str, report: WorkerReport) -> None:
        del self._active[load.req_id]
        self._fetching.pop(load.req_id, None)
        tokens = load.stop - load.start
        report.loads.append(LoadEnd(load.req_id, load.locator.transfer_id, tokens, valid - load.start, reason))
        if not load.wait:
            self.ended.done.add(load.req_id)
        if reason:
            self.ended.failed.add(load.req_id)
            self.ended.blocks.update(self._placement.unfilled(load.blocks, valid, load.stop))

    def _session(self) -> Consumer:
        if self._consumer is None:
            raise TransferCancelled("this rank fetches nothing")
        return self._consumer
