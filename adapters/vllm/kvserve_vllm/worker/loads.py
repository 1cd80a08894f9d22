"""Prompts whose KV this rank fetches: decoded regions are written into their blocks by the session's threads."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from kvserve_core.errors import TransferCancelled
from kvserve_core.policy import Outcome
from kvserve_core.session import Consumer, Loaded, LoadFailed
from kvserve_core.spec import Region
from kvserve_core.transport import Locator
from kvserve_vllm.metadata import Load, LoadEnd, WorkerReport
from kvserve_vllm.placement import NULL_BLOCK, Placement

log = logging.getLogger(__name__)
WAIT_S = 0.0005
"""How often a load that the forward pass waits for is looked at."""


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


class Loads:
    """Starts, cancels and ends loads. deadline_s: longest time a fetch may take."""

    def __init__(self, placement: Placement, deadline_s: float) -> None:
        self._placement, self._deadline_s = placement, deadline_s
        self._active: dict[str, Load] = {}
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
        """Start fetching; those the forward pass waits for have ended on return."""
        waiting = set()
        for load in loads:
            self._active[load.req_id] = load
            if load.wait:
                waiting.add(load.req_id)
            try:
                until = time.monotonic() + self._deadline_s
                self._session().fetch(load.locator, range(load.start, load.stop), until, name=load.req_id)
            except Exception as error:  # noqa: BLE001  # the engine waits for this load's end, whatever went wrong
                self._end(load, load.start, f"{type(error).__name__}: {error}", report)
        outcomes = []
        while waiting & self._active.keys():
            outcomes += self.poll(report)
            time.sleep(WAIT_S)
        return outcomes

    def cancel(self, req_ids: Iterable[str]) -> None:
        """Give up loads; each still ends with one report."""
        for req_id in req_ids:
            if req_id in self._active:
                self._session().cancel(req_id)

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
        return outcomes

    def _end(self, load: Load, valid: int, reason: str, report: WorkerReport) -> None:
        del self._active[load.req_id]
        tokens = load.stop - load.start
        report.loads.append(LoadEnd(load.req_id, load.locator.transfer_id, tokens, valid - load.start, reason))
        if not load.wait:
            self.ended.done.add(load.req_id)
        if reason:
            self.ended.failed.add(load.req_id)
            self.ended.blocks.update(self._invalid(load, valid))

    def _invalid(self, load: Load, valid: int) -> list[int]:
        """Blocks of a request of one pool that hold a token that did not arrive."""
        cache = next(iter(self._placement.layers.values()))
        table = load.blocks[cache.pool]
        held = table[valid // cache.block_size : -(-load.stop // cache.block_size)]
        return [block for block in held if block != NULL_BLOCK]

    def _session(self) -> Consumer:
        if self._consumer is None:
            raise TransferCancelled("this rank fetches nothing")
        return self._consumer
