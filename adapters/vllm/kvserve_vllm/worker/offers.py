"""Prompts whose KV this rank offers: their blocks are read by the session's encode thread until it says Freed."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from kvserve_core.errors import TransferCancelled
from kvserve_core.policy import Outcome
from kvserve_core.session import Failed, Freed, Producer
from kvserve_core.spec import Region
from kvserve_vllm.held import Fence, Held, kept_region
from kvserve_vllm.metadata import Blocks, Open, WorkerReport
from kvserve_vllm.placement import Placement

log = logging.getLogger(__name__)


@dataclass
class Offer(Held):
    """One prompt. refused: its transfer id is not its own."""

    req_id: str
    transfer_id: str
    total: int
    ready: int = 0
    freed: bool = False
    refused: bool = False


class Offers:
    """Opens, feeds and ends offers; ``gather`` is what the producer reads with."""

    def __init__(self, placement: Placement, fence: Fence) -> None:
        self._placement, self._fence = placement, fence
        self._by_request: dict[str, Offer] = {}
        self._by_transfer: dict[str, Offer] = {}
        self._finished: set[str] = set()
        self._producer: Producer | None = None

    def attach(self, producer: Producer) -> None:
        """The session to drive: it is made after this object, whose ``gather`` it takes."""
        self._producer = producer

    @property
    def held(self) -> int:
        """Offers whose blocks are not free yet."""
        return len(self._by_request)

    def holds(self, req_id: str) -> bool:
        """Whether the blocks of a request may still be needed."""
        return req_id in self._by_request

    def gather(self, transfer_id: str, at: Region) -> Tensor:
        """A region of an offered prompt, ``[L, H, T, D]``. Called from the encode thread.

        Raises:
            TransferCancelled: the engine took the blocks back.
        """
        offer = self._by_transfer.get(transfer_id)
        if offer is None:
            raise TransferCancelled(f"transfer {transfer_id!r} is no longer offered")
        return offer.gather(self._placement, at)

    def open(self, op: Open, report: WorkerReport) -> None:
        """Publish a prompt. A refusal is reported: the consumer will find nothing and compute the prompt."""
        offer = Offer(op.blocks, op.req_id, op.transfer_id, op.total)
        self._by_request[op.req_id] = offer  # the scheduler waits for its blocks, however this ends
        try:
            self._session().open(op.transfer_id, op.total, op.decision, op.peer)
            self._by_transfer[op.transfer_id] = offer
        except Exception as error:  # noqa: BLE001  # its blocks must not stay with us, whatever went wrong
            log.warning("transfer %r is not offered: %s", op.transfer_id, error)
            report.failed.append((op.transfer_id, f"{type(error).__name__}: {error}"))
            offer.freed = offer.refused = offer.closed = True

    def grow(self, blocks: Mapping[str, Blocks]) -> None:
        """The engine gave these requests more blocks."""
        for req_id, new in blocks.items():
            if offer := self._by_request.get(req_id):
                with self._ending(offer):
                    for table, ids in zip(offer.blocks, new, strict=True):
                        table.extend(ids)

    def advance(self, ready: Mapping[str, int]) -> None:
        """Tokens up to these were computed by the forward pass that was just queued."""
        for req_id, stop in ready.items():
            offer = self._by_request.get(req_id)
            if offer is None or offer.freed:
                continue
            with self._ending(offer):
                if stop >= offer.total:
                    self._keep(offer)
                self._session().ready(offer.transfer_id, range(offer.ready, stop), self._fence())
                offer.ready = stop

    @contextmanager
    def _ending(self, offer: Offer) -> Iterator[None]:
        """Whatever goes wrong with one offer ends that one; its blocks go back to the engine with its request."""
        try:
            yield
        except Exception as error:
            log.exception("transfer %r ends", offer.transfer_id)
            self._end(offer, f"{type(error).__name__}: {error}")

    def _end(self, offer: Offer, reason: str) -> None:
        self._close(offer)
        offer.freed = True
        if not offer.refused:
            self._session().abort(offer.transfer_id, reason)

    def drop(self, reasons: Mapping[str, str]) -> None:
        """End offers at once: after this call no thread reads their blocks."""
        for req_id, reason in reasons.items():
            if offer := self._by_request.get(req_id):
                if reason == PREEMPTED:
                    del self._by_request[req_id]
                with self._ending(offer):
                    self._end(offer, reason)

    def poll(self, report: WorkerReport) -> None:
        """What the session has to tell."""
        for event in self._session().poll():
            match event:
                case Freed(transfer_id):
                    if offer := self._by_transfer.get(transfer_id):
                        self._close(offer)
                        offer.freed = True
                case Failed(transfer_id, reason):
                    report.failed.append((transfer_id, reason))
                case Outcome():
                    report.outcomes.append(event)

    def finished(self, req_ids: Iterable[str]) -> set[str]:
        """Of the requests that finished now or before: those whose blocks the engine may have back."""
        self._finished |= self._by_request.keys() & set(req_ids)
        done = {req_id for req_id in self._finished if self._by_request[req_id].freed}
        self._finished -= done
        for req_id in done:
            del self._by_request[req_id]
        return done

    def _close(self, offer: Offer) -> None:
        offer.close()
        if self._by_transfer.get(offer.transfer_id) is offer:
            del self._by_transfer[offer.transfer_id]

    def _keep(self, offer: Offer) -> None:
        """Copy what the engine frees or overwrites once the prompt is done: windows and state.

        Blocks that fall out of a window are given to other requests while the request still runs, and a state goes on
        with the next token.
        """
        groups = [g for g in self._placement.kv.groups if g.window is not None or g.unit == "state"]
        regions = [
            kept_region(self._placement, group, plane.name, offer.total) for group in groups for plane in group.planes
        ]
        with offer.lock:
            offer.kept.extend((at, self._copied(offer, at)) for at in regions if at.layers)  # a stage may hold none

    def _copied(self, offer: Offer, at: Region) -> Tensor:
        x = self._placement.gather(offer.blocks, at)
        if at.start > 0:
            x[:, :, 0] = 0  # in the region, but no query sees it: its block may be another request's by now
        return x

    def _session(self) -> Producer:
        if self._producer is None:
            raise TransferCancelled("this rank offers nothing")
        return self._producer


PREEMPTED = "preempted"
"""The reason of a drop whose request lives on; any other is the end of the request."""
