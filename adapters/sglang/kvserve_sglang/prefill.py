"""The prefill side of one rank: chunks that SGLang sends become tokens that a Producer serves."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from torch import Tensor

from kvserve_core.errors import KVServeError, StoreFull, TransferCancelled
from kvserve_core.policy import RAW, Outcome
from kvserve_core.session import Failed, Freed
from kvserve_core.spec import Region
from kvserve_core.transport import Endpoint
from kvserve_sglang.deciding import Judge, as_decision
from kvserve_sglang.messages import Decided, Located, Reported
from kvserve_sglang.prefill_rank import Rank
from kvserve_sglang.pump import Pump
from kvserve_sglang.sending import Chunk, Sending

DECISION_S = 30.0
"""How long a rank waits for the first rank's decision."""
EARLY_KEPT = 1024
log = logging.getLogger(__name__)


class PrefillSide:
    """One per prefill rank. Methods are called by SGLang's threads and never wait; the work is done by the pump."""

    def __init__(self, rank: Rank) -> None:
        self._rank, self._ranks = rank, rank.ranks
        self._judge = Judge(rank.deployment, rank.pipelines) if rank.ranks.first else None
        self._open: dict[int, Sending] = {}
        self._by_id: dict[str, Sending] = {}
        self._early: dict[int, Decided] = {}
        self._fallbacks = 0
        self.producer = rank.deployment.producer(rank.pipelines, self.gather)
        self.pump = Pump("kvserve-prefill", self._handle, self._poll, lambda: bool(self._open or self._by_id))

    def begin(self, sending: Sending) -> None:
        """A request's first chunk is about to come."""
        self._open[sending.room] = sending

    def forget(self, room: int, reason: str = "the prefill engine ended the request") -> None:
        """SGLang is done with a request, one way or the other: once this returns, its pages are not read."""
        self._early.pop(room, None)
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
                self._report(message.prefill_rank, message.outcome)

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
        if not sending.targets:  # a dummy rank: others send what it would
            if chunk.last:
                self._succeed(sending)
            return
        if not sending.transfer_id and sending.total is not None:
            self._decide(sending)
        if sending.transfer_id:
            self._ready(sending)

    def _decide(self, sending: Sending) -> None:
        decided = self._ask(self._judge, sending) if self._judge else self._early.pop(sending.room, None)
        if decided is None:
            sending.waiting_since = sending.waiting_since or time.monotonic()
        else:
            self._serve(sending, decided)

    def _ask(self, judge: Judge, sending: Sending) -> Decided:
        total = sending.total or 0
        decided, decision = judge.decide(
            sending.room,
            total,
            [t.register for t in sending.targets],
            sending.options,
            ranks=self._ranks.reporting(sending.targets[0].peer.shard.size),
            elapsed_s=time.monotonic() - sending.born,
            to_prefill=total - sending.sent,
            active=len(self._by_id) + 1,
        )
        self._rank.exporter.count("decisions", profile=decision.profile, reason=decision.reason.split(";")[0])
        log.debug("room %s: %s", sending.room, decision.explain())
        for other in self._ranks.others:
            self._ranks.tell(other, decided)
        return decided

    def _decided(self, decided: Decided) -> None:
        sending = self._open.get(decided.room)
        if sending is not None and sending.over:
            return
        if sending is not None and sending.waiting_since is not None and not sending.transfer_id:
            self._guarded(sending, self._serve, sending, decided)
            return
        while len(self._early) >= EARLY_KEPT:
            self._early.pop(next(iter(self._early)), None)
        self._early[decided.room] = decided

    def _serve(self, sending: Sending, decided: Decided) -> None:
        """Open the transfer, tell the decode ranks where it is, and hand over the tokens that are final."""
        sending.waiting_since = None
        self._by_id[decided.transfer_id] = sending
        try:
            endpoint, profile = self._opened(sending, decided)
        except BaseException:
            del self._by_id[decided.transfer_id]
            self._withdraw_decision(decided.transfer_id)
            raise
        if not sending.opened(decided.transfer_id):
            self.producer.abort(decided.transfer_id, sending.ended)
            return
        for target in sending.targets:
            located = Located(
                sending.room, self._rank.number, decided.transfer_id, sending.total or 0, endpoint, profile
            )
            self._rank.rooms.tell(target.wanted, located)
        self._ready(sending)

    def _opened(self, sending: Sending, decided: Decided) -> tuple[Endpoint, str]:
        def opened(profile: str) -> tuple[Endpoint, str]:
            if profile in self._rank.pipelines:
                sending.grid = self._rank.pipelines[profile].spec.segment_tokens
            decision = as_decision(decided, profile)
            total = sending.total or 0
            return self.producer.open(decided.transfer_id, total, decision, start=sending.first), profile

        try:
            return opened(decided.profile)
        except StoreFull:
            raise
        except KVServeError as error:
            if decided.profile == RAW:
                raise
            log.warning("room %s is sent raw, profile %r cannot be: %s", sending.room, decided.profile, error)
            self._rank.exporter.count("fallbacks", rung=RAW)
            return opened(RAW)

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
        if events:
            self._export()
        for event in events:
            match event:
                case Freed():
                    if event.transfer_id in self._by_id:
                        self._succeed(self._by_id[event.transfer_id])
                case Failed():
                    self._failed(event)
                case Outcome():
                    self._delivered(event)
        self._end_waiting()
        self._rank.exporter.set("active", self.active, side="producer")

    def _export(self) -> None:
        self._rank.exporter.set("published_bytes", self.producer.budget.held_bytes)
        raw = self.producer.counters.snapshot().get("fallback_raw", 0)
        self._rank.exporter.count("fallbacks", raw - self._fallbacks, rung=RAW)  # segments
        self._fallbacks = raw

    def _failed(self, event: Failed) -> None:
        sending = self._by_id.pop(event.transfer_id, None)
        self._withdraw_decision(event.transfer_id)
        self._rank.exporter.count("transfers", side="producer", ok="false")
        if sending is not None:
            log.warning("room %s was not delivered: %s", sending.room, event.reason)
            sending.transfer_id = ""  # it is closed already
            self._fail(sending, event.reason)

    def _withdraw_decision(self, transfer_id: str) -> None:
        if self._judge:
            self._judge.forget(transfer_id)

    def _delivered(self, outcome: Outcome) -> None:
        self._settle(outcome)
        self._rank.exporter.transfer(outcome, "producer")
        if self._judge:
            self._report(self._rank.number, outcome)
        else:
            self._ranks.tell((0, 0), Reported(self._rank.number, outcome))

    def _settle(self, outcome: Outcome) -> None:
        """Consumers may be done before the encode thread says that the pages are free."""
        sending = self._by_id.pop(outcome.transfer_id, None)
        if sending is None or sending.freed:
            return
        if outcome.ok:
            self._succeed(sending)
        else:
            self._fail(sending, outcome.reason)

    def _report(self, rank: int, outcome: Outcome) -> None:
        whole = self._judge.report(rank, outcome) if self._judge else None
        if whole is not None:
            estimate = self._rank.deployment.controller.links.estimate(whole.link)
            self._rank.exporter.set("goodput_bytes_per_second", estimate, link=whole.link)

    def _end_waiting(self) -> None:
        for sending in list(self._open.values()):
            since = sending.waiting_since
            if since is not None and time.monotonic() - since > DECISION_S:
                sending.waiting_since = None
                self._fail(sending, f"the first prefill rank did not decide within {DECISION_S:.0f} s")
