"""The prefill side of one rank: chunks that SGLang sends become tokens that a Producer serves."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import Tensor

from kvserve_core.errors import TransferCancelled
from kvserve_core.policy import RAW, Outcome
from kvserve_core.session import Failed, Freed
from kvserve_core.spec import Region
from kvserve_sglang.messages import Decided, Reported
from kvserve_sglang.opening import DECISION_S, Opening, overdue
from kvserve_sglang.prefill_rank import Rank
from kvserve_sglang.pump import Pump, one_by_one
from kvserve_sglang.sending import Chunk, Sending

log = logging.getLogger(__name__)


class PrefillSide:
    """One per prefill rank. Methods are called by SGLang's threads and never wait; the work is done by the pump."""

    def __init__(self, rank: Rank) -> None:
        self._rank, self.exporter = rank, rank.exporter
        self._open: dict[int, Sending] = {}
        self._by_id: dict[str, Sending] = {}
        self._fallbacks = 0
        self.producer = rank.deployment.producer(rank.pipelines, self.gather)
        self._opening = Opening(rank, self.producer)
        self.pump = Pump("kvserve-prefill", self._handle, self._poll, lambda: self.active > 0, self._dropped)

    def begin(self, sending: Sending) -> None:
        """A request's first chunk is about to come."""
        self._open[sending.room] = sending

    def forget(self, room: int, reason: str = "the prefill engine ended the request") -> None:
        """SGLang is done with a request, one way or the other: once this returns, its pages are not read."""
        self._opening.forget(room)
        sending = self._open.get(room)
        if sending is None:
            return
        sending.end(reason)
        if sending.transfer_id and not sending.freed:
            self.producer.abort(sending.transfer_id, reason)
        self._open.pop(room, None)  # last: a second thread that forgets the room must wait for its reads too

    def abort(self, room: int, reason: str) -> None:
        """The decode side gave up: what is still on offer for it is withdrawn."""
        self.forget(room, reason)
        for transfer_id, sending in list(self._by_id.items()):
            if sending.room == room:
                self.producer.abort(transfer_id, reason)

    @property
    def active(self) -> int:
        """Requests and transfers that have not ended."""
        return len(self._open) + len(self._by_id)

    def close(self) -> None:
        """End the pump and the session."""
        self.pump.stop()
        self.producer.close()

    def gather(self, transfer_id: str, at: Region) -> Tensor:
        """Gather of the session; see :class:`~kvserve_core.session.Gather`."""
        sending = self._by_id.get(transfer_id)
        if sending is None or sending.total is None:
            raise TransferCancelled(f"transfer {transfer_id!r} is not known here")
        layout = self._rank.layout
        with sending.reading:
            if sending.ended:
                raise TransferCancelled(sending.ended)
            x = layout.gather(at, sending.slots.of(layout.kv, at, sending.total))
            sending.fence.mark(layout.device)
            return x

    def _handle(self, message: object) -> None:
        match message:
            case Chunk():
                self._guarded(message.to, self._chunk, message)
            case Decided():
                self._decided(message)
            case Reported():
                self._opening.reported(message.prefill_rank, message.outcome)

    def _guarded(self, sending: Sending, work: Callable[..., None], *args: object) -> None:
        try:
            work(*args)
        except Exception as error:  # one request's failure is its own
            log.exception("room %s cannot be sent", sending.room)
            self._fail(sending, f"{type(error).__name__}: {error}")

    def _chunk(self, chunk: Chunk) -> None:
        sending = chunk.to
        if sending.over:
            return
        sending.add(chunk)
        if chunk.prefilled is not None:
            self._opening.prefilled(*chunk.prefilled)
        if not sending.targets:  # a dummy rank: others send what it would
            if chunk.last:
                self._succeed(sending)
            return
        if not sending.transfer_id and sending.total is not None:
            self._decide(sending)
        if sending.transfer_id:
            self._ready(sending)

    def _decide(self, sending: Sending) -> None:
        decided = self._opening.decision(sending, len(self._by_id))
        if decided is not None:
            self._serve(sending, decided)

    def _decided(self, decided: Decided) -> None:
        sending = self._open.get(decided.room)
        if sending is not None and sending.over:
            return
        if sending is not None and sending.waiting_since is not None and not sending.transfer_id:
            self._guarded(sending, self._serve, sending, decided)
            return
        self._opening.keep(decided)

    def _serve(self, sending: Sending, decided: Decided) -> None:
        """Open the transfer, tell the decode ranks where it is, and hand over the tokens that are final."""
        sending.waiting_since = None
        self._by_id[decided.transfer_id] = sending
        try:
            endpoint, profile = self._opening.open(sending, decided)
        except BaseException:
            del self._by_id[decided.transfer_id]
            self._opening.withdraw(decided.transfer_id)
            raise
        if not sending.opened(decided.transfer_id):
            self.producer.abort(decided.transfer_id, sending.ended)
            return
        self._opening.announce(sending, endpoint, profile)
        self._ready(sending)

    def _ready(self, sending: Sending) -> None:
        tokens = sending.newly_ready(self._rank.window)
        if tokens:
            self.producer.ready(sending.transfer_id, tokens, sending.event)

    def _succeed(self, sending: Sending) -> None:
        sending.freed = True
        if not sending.over:
            self._rank.rooms.succeed(sending.room)

    def _fail(self, sending: Sending, reason: str) -> None:
        if sending.transfer_id:
            self.producer.abort(sending.transfer_id, reason)
        if not sending.over and not sending.freed:
            sending.failed = True
            self._rank.rooms.fail(sending.room, reason)

    def _poll(self) -> None:
        events = self.producer.poll()
        one_by_one(events, self._event, self.exporter)
        if events:
            self._export()
        self._end_waiting()
        self.exporter.set("active", self.active, side="producer")

    def _event(self, event: Freed | Failed | Outcome) -> None:
        match event:
            case Freed():
                if event.transfer_id in self._by_id:
                    self._succeed(self._by_id[event.transfer_id])
            case Failed():
                self._failed(event)
            case Outcome():
                self._delivered(event)

    def _dropped(self) -> None:
        self.exporter.count("hook_failures", hook="pump")

    def _export(self) -> None:
        self.exporter.set("published_bytes", self.producer.budget.held_bytes)
        raw = self.producer.counters.snapshot().get("fallback_raw", 0)
        self.exporter.count("fallbacks", raw - self._fallbacks, rung=RAW)  # segments
        self._fallbacks = raw

    def _failed(self, event: Failed) -> None:
        sending = self._by_id.pop(event.transfer_id, None)
        self._opening.withdraw(event.transfer_id)
        self.exporter.count("transfers", side="producer", ok="false")
        if sending is not None:
            log.warning("room %s was not delivered: %s", sending.room, event.reason)
            sending.transfer_id = ""  # it is closed already
            self._fail(sending, event.reason)

    def _delivered(self, outcome: Outcome) -> None:
        self._settle(outcome)
        self.exporter.transfer(outcome, "producer")
        self._opening.report(outcome)

    def _settle(self, outcome: Outcome) -> None:
        """Consumers may be done before the encode thread says that the pages are free."""
        sending = self._by_id.pop(outcome.transfer_id, None)
        if sending is None or sending.freed:
            return
        if outcome.ok:
            self._succeed(sending)
        else:
            self._fail(sending, outcome.reason)

    def _end_waiting(self) -> None:
        for sending in list(self._open.values()):
            if overdue(sending):
                self._fail(sending, f"the first prefill rank did not decide within {DECISION_S:.0f} s")
