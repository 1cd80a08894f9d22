"""Prompts that this rank loads from the store, cell by cell, each a fetch of its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from torch import Tensor

from kvserve_core.errors import TransferCancelled
from kvserve_core.policy import Outcome
from kvserve_core.session import Consumer, Loaded, LoadFailed
from kvserve_core.spec import SEGMENT_TOKENS, Region
from kvserve_core.transport import Endpoint, Locator
from kvserve_vllm.metadata import WorkerReport
from kvserve_vllm.placement import Placement
from kvserve_vllm.prefix.meta import PrefixLoad, PrefixLoaded
from kvserve_vllm.worker.loads import Ended
from kvserve_vllm.worker.waiting import LET_GO_S, SILENT, ending, give_up, wait_out

log = logging.getLogger(__name__)


@dataclass
class Running:
    """A load under way. left: names of fetches that have not ended. valid: where the first cell that failed breaks."""

    load: PrefixLoad
    started_s: float
    valid: int
    left: set[str] = field(default_factory=set)
    outcomes: list[Outcome] = field(default_factory=list)
    reason: str = ""


class PrefixLoader:
    """Starts, cancels and ends loads. endpoint: this rank's part of the store. deadline_s: longest time of a load."""

    def __init__(self, placement: Placement, endpoint: Endpoint, rank: int, deadline_s: float) -> None:
        self._placement, self._endpoint, self._rank, self._deadline_s = placement, endpoint, rank, deadline_s
        self._running: dict[str, Running] = {}
        self._fetches: dict[str, Running] = {}
        self._consumer: Consumer | None = None
        self._windowed = any(group.window is not None for group in placement.kv.groups)
        self.ended = Ended()

    def attach(self, consumer: Consumer) -> None:
        """The session to drive: it is made after this object, whose ``scatter`` it takes."""
        self._consumer = consumer

    @property
    def active(self) -> int:
        """Loads in flight."""
        return len(self._running)

    def scatter(self, name: str, at: Region, x: Tensor) -> None:
        """Write a region into the request's blocks. Called from the fetch threads.

        Raises:
            TransferCancelled: the load ended meanwhile.
        """
        running = self._fetches.get(name)
        if running is None:
            raise TransferCancelled(f"the load {name!r} has ended")
        self._placement.scatter(running.load.blocks, at, x)

    def start(self, loads: Iterable[PrefixLoad], report: WorkerReport) -> list[tuple[PrefixLoad, Outcome]]:
        """Start fetching; loads that the forward pass waits for have ended on return. Where this raises, all have."""
        begun = [Running(load, time.monotonic(), load.stop) for load in loads]
        self._running.update((running.load.req_id, running) for running in begun)
        waiting = {running.load.req_id for running in begun if running.load.wait}
        with ending(self, {running.load.req_id for running in begun}, report):
            ended = [end for running in begun for end in self._begin(running, report)]
            return ended + wait_out(self, waiting, report)

    def _begin(self, running: Running, report: WorkerReport) -> list[tuple[PrefixLoad, Outcome]]:
        for number in sorted(running.load.cells):
            self._fetch(running, number)
        return [] if running.left else [self._end(running, report)]

    def running(self, req_ids: Set[str]) -> set[str]:
        """Those of these loads that have not ended."""
        return set(req_ids & self._running.keys())

    def fail(self, req_id: str, reason: str, report: WorkerReport) -> None:
        """End a load that was cancelled and says nothing: nothing more is written for it."""
        running = self._running[req_id]
        for name in running.left:
            self._fetches.pop(name, None)
        running.valid, running.reason = running.load.start, reason
        self._end(running, report)

    def _fetch(self, running: Running, number: int) -> None:
        load, start = running.load, number * SEGMENT_TOKENS
        name, stop = f"{load.req_id}/{number}", start + SEGMENT_TOKENS
        tokens = range(max(start, load.start), min(stop, load.stop))
        locator = Locator(load.cells[number][self._rank], stop, (self._endpoint,), "")  # stored as any profile
        running.left.add(name)
        self._fetches[name] = running
        try:
            self._session().fetch(locator, tokens, running.started_s + self._deadline_s, name=name)
        except Exception as error:  # noqa: BLE001  # the engine waits for this load's end, whatever went wrong
            running.left.discard(name)
            del self._fetches[name]
            self._broken(running, tokens.start, error)

    def _broken(self, running: Running, valid: int, error: Exception) -> None:
        """A cell did not arrive: what is behind it is of no use."""
        if valid < running.valid or not running.reason:
            running.valid = min(running.valid, valid)
            running.reason = f"{type(error).__name__}: {error}"
        for name in running.left:
            if int(name.rpartition("/")[2]) * SEGMENT_TOKENS >= running.valid:
                self._session().cancel(name)

    def rest(self, seconds: float) -> None:
        """Leave the interpreter to the fetch threads until a cell is there, at most so long."""
        if self._running:
            self._session().wait(seconds)

    def cancel(self, req_ids: Iterable[str]) -> None:
        """Give up loads; each still ends with one report."""
        for req_id in req_ids:
            if running := self._running.get(req_id):
                for name in running.left:
                    self._session().cancel(name)

    def poll(self, report: WorkerReport) -> list[tuple[PrefixLoad, Outcome]]:
        """Loads that ended since the last call, with what they cost."""
        ended = []
        for event in self._session().poll():
            running = self._fetches.pop(event.transfer_id, None)
            if running is None:
                continue
            running.left.discard(event.transfer_id)
            running.outcomes.append(event.outcome)
            match event:
                case Loaded():
                    pass
                case LoadFailed():
                    self._broken(running, event.valid.stop, event.error)
            if not running.left:
                ended.append(self._end(running, report))
        late_s = time.monotonic() - self._deadline_s - LET_GO_S
        give_up(self, [name for name, running in self._running.items() if running.started_s < late_s], SILENT, report)
        return ended

    def _end(self, running: Running, report: WorkerReport) -> tuple[PrefixLoad, Outcome]:
        load = running.load
        del self._running[load.req_id]
        if running.reason:
            log.warning("loading the prefix of %r failed: %s", load.req_id, running.reason)
            if self._windowed:  # what the recomputed tokens would see of the window is not there
                running.valid = load.start
            self.ended.failed.add(load.req_id)
            self.ended.blocks.update(self._placement.unfilled(load.blocks, running.valid, load.stop))
        if not load.wait:
            self.ended.done.add(load.req_id)
        outcome = joined(running, load.profile, time.monotonic() - running.started_s)
        report.prefix_loaded.append(PrefixLoaded(load.req_id, running.valid, outcome, running.reason))
        return load, outcome

    def _session(self) -> Consumer:
        if self._consumer is None:
            raise TransferCancelled("this rank loads no prefixes")
        return self._consumer


def joined(running: Running, profile: str, total_s: float) -> Outcome:
    """One load over all its cells. They share the link: together it was busy no longer than the load took."""
    outcomes = running.outcomes
    return Outcome(
        running.load.req_id,
        profile,
        raw_bytes=sum(o.raw_bytes for o in outcomes),
        wire_bytes=sum(o.wire_bytes for o in outcomes),
        transfer_s=min(total_s, sum(o.transfer_s for o in outcomes)),
        decode_s=sum(o.decode_s for o in outcomes),
        total_s=total_s,
        ok=not running.reason,
        reason=running.reason,
    )
