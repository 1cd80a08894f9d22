"""How a request on a prefill rank gets its transfer: by the first rank's decision, under a profile that serves it."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from kvserve_core.errors import KVServeError, PeerLost, StoreFull
from kvserve_core.policy import RAW, Outcome
from kvserve_core.requests import RequestOptions
from kvserve_core.session import Producer
from kvserve_core.transport import Endpoint
from kvserve_sglang.deciding import Judge, as_decision
from kvserve_sglang.messages import Decided, Located, Reported
from kvserve_sglang.prefill_rank import Rank
from kvserve_sglang.sending import Sending

DECISION_S = 30.0
"""How long a rank waits for the first rank's decision."""
EARLY_KEPT = 1024
log = logging.getLogger(__name__)


class Opening:
    """One per prefill rank; the pump's. judge: of the first rank, which decides; the others wait for its word."""

    def __init__(self, rank: Rank, producer: Producer) -> None:
        self._rank, self._producer = rank, producer
        self.judge = Judge(rank.deployment, rank.pipelines) if rank.ranks.first else None
        self._early: dict[int, Decided] = {}

    def decision(self, sending: Sending, active: int) -> Decided | None:
        """What was decided; None while the first rank has not. active: transfers under way beside this one."""
        decided = self._ask(self.judge, sending, active) if self.judge else self._early.pop(sending.room, None)
        sending.text = str  # it holds the engine's request, which holds this one
        if decided is None:
            sending.waiting_since = sending.waiting_since or time.monotonic()
        return decided

    def _ask(self, judge: Judge, sending: Sending, active: int) -> Decided:
        total = sending.total or 0
        decided, decision = judge.decide(
            sending.room,
            total,
            [t.register for t in sending.targets],
            self._options(sending),
            ranks=self._rank.ranks.reporting(sending.targets[0].peer.shard.size),
            elapsed_s=time.monotonic() - sending.born,
            to_prefill=total - sending.sent,
            active=active + 1,
        )
        self._rank.exporter.count("decisions", profile=decision.profile, reason=decision.reason.split(";")[0])
        log.debug("room %s: %s", sending.room, decision.explain())
        for other in self._rank.ranks.others:
            self._rank.ranks.tell(other, decided)
        return decided

    def _options(self, sending: Sending) -> RequestOptions:
        """With a workload that the classifier names, where there is one and the request does not say."""
        classifier = self._rank.deployment.classifier
        if sending.options.workload is not None or classifier is None:
            return sending.options
        try:
            text = sending.text()
            return replace(sending.options, workload=classifier.classify(text)) if text else sending.options
        except Exception:  # a workload without a name is served by the deployment's
            log.exception("the workload of room %s has no name", sending.room)
            self._rank.exporter.count("hook_failures", hook="classifier")
            return sending.options

    def keep(self, decided: Decided) -> None:
        """A decision that came before the first chunk of its request."""
        while len(self._early) >= EARLY_KEPT:
            self._early.pop(next(iter(self._early)), None)
        self._early[decided.room] = decided

    def forget(self, room: int) -> None:
        """The request is over."""
        self._early.pop(room, None)

    def open(self, sending: Sending, decided: Decided) -> tuple[Endpoint, str]:
        """Publish a transfer under what was decided, or raw where this rank cannot serve that: where, and as what.

        Raises:
            KVServeError: it cannot be served at all.
        """
        try:
            return self._open(sending, decided, decided.profile)
        except StoreFull:
            raise
        except KVServeError as error:
            if decided.profile == RAW:
                raise
            log.warning("room %s is sent raw, profile %r cannot be: %s", sending.room, decided.profile, error)
            self._rank.exporter.count("fallbacks", rung="profile")  # transfers; RAW counts segments
            return self._open(sending, decided, RAW)

    def _open(self, sending: Sending, decided: Decided, profile: str) -> tuple[Endpoint, str]:
        if profile in self._rank.pipelines:
            sending.grid = self._rank.pipelines[profile].spec.segment_tokens
        decision, total = as_decision(decided, profile), sending.total or 0
        return self._producer.open(decided.transfer_id, total, decision, start=sending.first), profile

    def announce(self, sending: Sending, endpoint: Endpoint, profile: str) -> None:
        """Tell the decode ranks where this rank's part is."""
        number, total = self._rank.number, sending.total or 0
        for target in sending.targets:
            located = Located(sending.room, number, sending.transfer_id, total, endpoint, profile)
            self._rank.rooms.tell(target.wanted, located)

    def withdraw(self, transfer_id: str) -> None:
        """A transfer ended without an outcome."""
        if self.judge:
            self.judge.forget(transfer_id)

    def report(self, outcome: Outcome) -> None:
        """What this rank's part of a transfer cost: to the first rank's controller, which can do without."""
        if self.judge:
            self.reported(self._rank.number, outcome)
            return
        try:
            self._rank.ranks.tell((0, 0), Reported(self._rank.number, outcome))
        except PeerLost as error:
            log.warning("the first prefill rank is not told what %s cost: %s", outcome.transfer_id, error)
            self._rank.exporter.count("hook_failures", hook="report")

    def reported(self, rank: int, outcome: Outcome) -> None:
        """What a rank's part cost."""
        ended = self.judge.report(rank, outcome) if self.judge else None
        if ended is not None:
            self._rank.exporter.settled(self._rank.deployment.controller, *ended)

    def prefilled(self, tokens: int, seconds: float) -> None:
        """What the engine took for the prompt of a request.

        Its wait is left out: decisions fall with a request's first chunk, by when it has waited.
        """
        if self.judge:
            self._rank.deployment.controller.observe_prefill(tokens, seconds)


def overdue(sending: Sending) -> bool:
    """Whether a request has waited too long for a decision; it is asked once."""
    since = sending.waiting_since
    if since is None or time.monotonic() - since <= DECISION_S:
        return False
    sending.waiting_since = None
    return True
