"""The decode side of one rank: it alone writes its pages, with what a Consumer fetched, verified and decoded."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from kvserve_core.errors import KVServeError, TransferCancelled
from kvserve_core.peer import PeerInfo
from kvserve_core.session import Consumer, Loaded, LoadFailed
from kvserve_core.spec import Region, Shard
from kvserve_core.transport import Locator
from kvserve_sglang.fence import Fence
from kvserve_sglang.layout import Layout
from kvserve_sglang.messages import Located
from kvserve_sglang.metrics import Exporter
from kvserve_sglang.pump import Pump, one_by_one
from kvserve_sglang.slots import Slots

log = logging.getLogger(__name__)
Consumers = Callable[[int], Consumer]
"""The session for a prefill server of so many tensor-parallel ranks."""


class Rooms(Protocol):
    """What of SGLang's manager this side needs."""

    def succeed(self, room: int) -> None:
        """All of it is in place."""

    def fail(self, room: int, reason: str) -> None:
        """It will not come."""


@dataclass
class Receiving:
    """One request. senders: prefill ranks that will say where their part is. deadline: ``time.monotonic()``."""

    room: int
    slots: Slots
    senders: int
    consumer: Consumer
    deadline: float
    located: dict[int, Located] = field(default_factory=dict)
    total: int = 0
    transfer_id: str = ""
    alive: bool = True
    writing: threading.Lock = field(default_factory=threading.Lock)
    fence: Fence = field(default_factory=Fence)

    def end(self) -> None:
        """Its pages are given away next: once this returns, no write to them is under way or will begin."""
        with self.writing:
            self.alive = False
        self.fence.wait()

    def locator(self) -> Locator:
        """Where all parts are; in the order of the senders, which is the same on every decode rank."""
        parts = [self.located[rank] for rank in sorted(self.located)]
        first = parts[0]
        named = sorted({(p.transfer_id, p.num_tokens) for p in parts})
        if len(named) > 1:
            raise KVServeError(
                f"the prefill ranks speak of different transfers (id, tokens) for room {self.room}: {named}; restart"
                " the prefill server"
            )
        return Locator(first.transfer_id, first.num_tokens, tuple(p.endpoint for p in parts), first.profile)


class DecodeSide:
    """One per decode rank. Methods are called by SGLang's threads and never wait for a peer."""

    def __init__(
        self, rooms: Rooms, layout: Layout, consumers: Consumers, exporter: Exporter, timeout_s: float
    ) -> None:
        self._rooms, self._layout, self._consumers, self.exporter = rooms, layout, consumers, exporter
        self._timeout_s = timeout_s
        self._open: dict[int, Receiving] = {}
        self._by_id: dict[str, Receiving] = {}
        self._sessions: set[Consumer] = set()
        self.pump = Pump("kvserve-decode", self._handle, self._poll, lambda: bool(self._by_id), self._dropped)

    def peer(self, prefill_size: int) -> PeerInfo:
        """What this rank can read."""
        return self._consumers(prefill_size).peer

    def begin(self, room: int, slots: Slots, senders: int, prefill_size: int) -> None:
        """Pages for a request are ready, and its prefill ranks will hear of it next."""
        consumer = self._consumers(prefill_size)
        self._sessions.add(consumer)
        self._open[room] = Receiving(room, slots, senders, consumer, time.monotonic() + self._timeout_s)

    def forget(self, room: int) -> None:
        """SGLang ends a request: once this returns, nothing is written to its pages."""
        receiving = self._open.get(room)
        if receiving is None:
            return
        receiving.end()
        if receiving.transfer_id:
            receiving.consumer.cancel(receiving.transfer_id)
        self._open.pop(room, None)  # last: a second thread that forgets the room must wait for its writes too

    @property
    def active(self) -> int:
        """Requests and transfers that have not ended."""
        return len(self._open) + len(self._by_id)

    def close(self) -> None:
        """End the pump and the sessions."""
        self.pump.stop()
        for room in list(self._open):
            self.forget(room)
        for consumer in self._sessions:
            consumer.close()

    def scatter(self, transfer_id: str, at: Region, x: Tensor) -> None:
        """Scatter of the session; see :class:`~kvserve_core.session.Scatter`."""
        receiving = self._by_id.get(transfer_id)
        if receiving is None:
            raise TransferCancelled(f"transfer {transfer_id!r} is not known here")
        with receiving.writing:
            if not receiving.alive:
                raise TransferCancelled(f"transfer {transfer_id!r} was ended by the engine")
            wanted = self._missing(receiving, at)
            if wanted is not None:
                slots = receiving.slots.of(self._layout.kv, wanted, receiving.total)
                self._layout.scatter(wanted, slots, x[:, :, wanted.start - at.start :])
                receiving.fence.mark(self._layout.device)

    def _missing(self, receiving: Receiving, at: Region) -> Region | None:
        """The part of a region that this side does not hold yet."""
        start = max(at.start, receiving.slots.prefix)
        if self._layout.kv.group(at.group).unit == "state" or start == at.start:
            return at
        return Region(at.group, at.plane, at.layers, at.heads, start, at.stop) if start < at.stop else None

    def _handle(self, message: object) -> None:
        if not isinstance(message, Located):
            return
        receiving = self._open.get(message.room)
        if receiving is None or receiving.transfer_id or not receiving.alive:
            log.debug("room %s is over, its location comes too late", message.room)
            return
        receiving.located[message.prefill_rank] = message
        if len(receiving.located) == receiving.senders:
            try:
                self._fetch(receiving)
            except Exception as error:  # one request's failure is its own
                log.exception("room %s cannot be fetched", receiving.room)
                self._by_id.pop(receiving.transfer_id, None)
                self._rooms.fail(receiving.room, f"{type(error).__name__}: {error}")

    def _fetch(self, receiving: Receiving) -> None:
        locator, slots = receiving.locator(), receiving.slots
        total = locator.num_tokens
        if -(-(total - slots.prefix) // slots.page_size) != slots.num_pages:
            raise KVServeError(
                f"the prefill side sends {total} tokens, this side has {slots.prefix} and made room for"
                f" {slots.num_pages} pages of {slots.page_size}"
            )
        if locator.transfer_id in self._by_id:
            raise KVServeError(f"the transfer {locator.transfer_id!r} is another room's; restart the prefill server")
        receiving.total, receiving.transfer_id = total, locator.transfer_id
        self._by_id[locator.transfer_id] = receiving
        receiving.consumer.fetch(locator, range(min(slots.prefix, total - 1), total), receiving.deadline)
        if not receiving.alive:  # ended before there was something to cancel
            receiving.consumer.cancel(locator.transfer_id)

    def _dropped(self) -> None:
        self.exporter.count("hook_failures", hook="pump")

    def _poll(self) -> None:
        for consumer in list(self._sessions):
            one_by_one(consumer.poll(), self._ended, self.exporter)
        self.exporter.set("active", self.active, side="consumer")

    def _ended(self, event: Loaded | LoadFailed) -> None:
        receiving = self._by_id.pop(event.transfer_id, None)
        self.exporter.transfer(event.outcome, "consumer")
        if receiving is None:
            return
        if isinstance(event, Loaded):
            self.exporter.count("external_tokens", len(event.tokens))
            if receiving.alive:
                self._rooms.succeed(receiving.room)
        elif receiving.alive:
            log.warning("room %s was not loaded: %s", receiving.room, event.error)
            self._rooms.fail(receiving.room, f"{type(event.error).__name__}: {event.error}")


def shards_together(me: Shard, prefill_size: int) -> list[Shard]:
    """The decode ranks that ask the same prefill ranks as ``me``: SGLang pairs ranks by their place."""
    if me.size <= prefill_size:
        return [me]
    each = me.size // prefill_size
    first = me.rank // each * each
    return [Shard(me.layers, rank, me.size) for rank in range(first, first + each)]
