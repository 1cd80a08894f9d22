"""Cells of prompts that this rank puts into the store: read from their blocks by the session's encode thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from kvserve_core.errors import TransferCancelled
from kvserve_core.policy import Outcome
from kvserve_core.session import Failed, Freed, Producer
from kvserve_core.spec import SEGMENT_TOKENS, Region
from kvserve_vllm.held import Fence, Held, kept_region
from kvserve_vllm.metadata import WorkerReport
from kvserve_vllm.placement import Placement
from kvserve_vllm.prefix.meta import PrefixStore, PrefixStored

log = logging.getLogger(__name__)
HELD_S = 5.0
"""Longest time that a cell waits to be encoded, and holds blocks, behind others that the store takes."""


@dataclass
class Cell(Held):
    """One cell on its way. since_s: when it was computed, on the monotonic clock."""

    req_id: str
    start: int
    since_s: float


class PrefixWriter:
    """Publishes cells; a request's blocks are needed until all of its cells are written. rank: of this worker."""

    def __init__(self, placement: Placement, rank: int, fence: Fence) -> None:
        self._placement, self._rank, self._fence = placement, rank, fence
        self._cells: dict[str, Cell] = {}
        self._by_request: dict[str, set[str]] = {}
        self._finished: set[str] = set()
        self._late = False
        self._producer: Producer | None = None

    def attach(self, producer: Producer) -> None:
        """The session to drive: it is made after this object, whose ``gather`` it takes."""
        self._producer = producer

    @property
    def held(self) -> int:
        """Requests whose blocks may still be needed."""
        return len(self._by_request)

    def gather(self, name: str, at: Region) -> Tensor:
        """A region of a cell, ``[L, H, T, D]``. Called from the encode thread.

        Raises:
            TransferCancelled: the engine took the blocks back.
        """
        cell = self._cells.get(name)
        if cell is None:
            raise TransferCancelled(f"the cell {name!r} is no longer stored")
        return cell.gather(self._placement, at)

    def store(self, orders: Iterable[PrefixStore], report: WorkerReport) -> None:
        """The forward pass that computed these cells is queued: publish them."""
        given = list(orders)
        for order in given:  # the scheduler waits for their blocks, however this ends
            self._by_request.setdefault(order.req_id, set())
        for order in given:
            try:
                for number, names in order.cells.items():
                    self._open(order, number * SEGMENT_TOKENS, names[self._rank], report)
            except Exception:  # one order's trouble: the others are carried out
                log.exception("cells of request %r are not stored", order.req_id)

    def _open(self, order: PrefixStore, start: int, name: str, report: WorkerReport) -> None:
        stop = start + SEGMENT_TOKENS
        if name in self._cells:
            report.prefix_stored.append(PrefixStored(name, None, "it is being stored already"))
            return
        try:
            cell = Cell(order.blocks, order.req_id, start, time.monotonic())
            cell.kept.extend(self._copies(cell))
            self._cells[name] = cell
            self._session().open(name, stop, order.decision, start=start)
            self._by_request[order.req_id].add(name)
            self._session().ready(name, range(start, stop), self._fence())
        except Exception as error:  # noqa: BLE001  # a cell that is not stored is computed again another time
            self._fail(name, order.req_id, f"{type(error).__name__}: {error}", report)

    def _fail(self, name: str, req_id: str, reason: str, report: WorkerReport) -> None:
        opened = name in self._by_request[req_id]
        self._close(name)
        if opened:
            self._session().abort(name, reason)  # the session tells the reason
        else:
            report.prefix_stored.append(PrefixStored(name, None, reason))

    def _copies(self, cell: Cell) -> list[tuple[Region, Tensor]]:
        """Sliding windows: their blocks are given to other requests while this one still runs."""
        stop = cell.start + SEGMENT_TOKENS
        regions = [
            kept_region(self._placement, group, plane.name, stop, cell.start)
            for group in self._placement.kv.groups
            if group.window is not None
            for plane in group.planes
        ]
        return [(at, self._placement.gather(cell.blocks, at)) for at in regions if at.layers]

    def drop(self, req_ids: Iterable[str]) -> None:
        """Give up what is not encoded yet: after this call no thread reads the blocks of these requests."""
        names = [name for req_id in req_ids for name in self._by_request.get(req_id, ())]
        for name in names:
            self._close(name)
        for name in names:
            self._session().abort(name, "preempted")

    def poll(self, report: WorkerReport) -> None:
        """What the session has to tell."""
        for event in self._session().poll():
            match event:
                case Freed(name):
                    self._close(name)
                case Failed(name, reason):
                    report.prefix_stored.append(PrefixStored(name, None, reason))
                case Outcome():
                    self._late = False
                    report.prefix_stored.append(PrefixStored(event.transfer_id, event))
        self._give_up()

    def _give_up(self) -> None:
        """Cells that a slow store, or one that hangs, leaves waiting: the engine needs their blocks."""
        before = time.monotonic() - HELD_S
        late = [name for name, cell in self._cells.items() if cell.since_s < before]
        if late and not self._late:
            log.warning("the store is slower than the prompts: cells that wait for %g s are not stored", HELD_S)
        self._late = self._late or bool(late)
        for name in late:
            self._close(name)
            self._session().abort(name, "the store was too slow")

    def finished(self, req_ids: Iterable[str], sent: set[str], offered: Callable[[str], bool]) -> set[str]:
        """Requests whose blocks the engine may have back, each once.

        req_ids: requests that finished now. sent: those of which the offering half has just let go. offered: whether
        it still holds a request.
        """
        self._finished |= self._by_request.keys() & set(req_ids)
        done = {r for r in self._finished if not self._by_request[r] and not offered(r)}
        given = (sent - self._by_request.keys()) | done
        self._finished -= done
        for req_id in done:
            del self._by_request[req_id]
        return given

    def _close(self, name: str) -> None:
        cell = self._cells.pop(name, None)
        if cell is None:
            return
        cell.close()
        self._by_request[cell.req_id].discard(name)

    def _session(self) -> Producer:
        if self._producer is None:
            raise TransferCancelled("this rank stores nothing")
        return self._producer
