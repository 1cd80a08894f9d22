"""The producing side: cells are encoded as soon as they are final, staged on the host, served until released."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from kvserve_core.errors import (
    ConfigError,
    TransportError,
    Unacceptable,
    did_you_mean,
)
from kvserve_core.metrics import Counters
from kvserve_core.peer import PeerInfo, acceptable
from kvserve_core.pipeline import Pipeline
from kvserve_core.policy import Decision, Outcome
from kvserve_core.session.budget import Budget
from kvserve_core.session.encoding import Encoding
from kvserve_core.session.events import Event, Failed, Freed, Gather
from kvserve_core.session.lanes import Lane
from kvserve_core.session.source import Source
from kvserve_core.transport import Endpoint, Released, Transport

CPU = torch.device("cpu")
CLOSE_S = 5.0
"""How long a producer that closes waits for its encode thread, which a store that hangs may hold for good."""
log = logging.getLogger(__name__)
ProducerEvent: TypeAlias = Freed | Failed | Outcome


@dataclass
class _Job:
    source: Source
    tokens: range
    event: Event | None


class Producer:
    """One per worker rank, with a transport of its own. No method waits for a peer or for encoding.

    pipelines: by profile name, all for one device. batch_bytes: original bytes encoded in one call; on a GPU the next
    batch is queued before one is read back, so twice as much is held there. sms: a GPU's multiprocessors that encoding
    may use, 0 for all. lease_s: how long consumers may take
    between two signs of life once everything is encoded. published_bytes_max: host bytes held for consumers; ``open``
    refuses what would not fit, so that the request is served another way.
    """

    def __init__(
        self,
        pipelines: Mapping[str, Pipeline],
        transport: Transport,
        gather: Gather,
        *,
        lease_s: float = 30.0,
        batch_bytes: int = 32 * 2**20,
        published_bytes_max: int = 4 * 2**30,
        sms: int = 0,
        counters: Counters | None = None,
    ) -> None:
        self._pipelines, self._transport, self._lease_s = dict(pipelines), transport, lease_s
        self._lane = Lane(next((p.device for p in self._pipelines.values()), CPU), sms)
        self.counters = counters or Counters()
        self._encoding = Encoding(gather, transport, self._lane, batch_bytes, self.counters)
        self.budget = Budget(published_bytes_max)
        self._closed = False
        self._lock = threading.Lock()
        self._sources: dict[str, Source] = {}
        self._events: queue.SimpleQueue[ProducerEvent] = queue.SimpleQueue()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvserve-encode", daemon=True)
        self._thread.start()

    def open(
        self, transfer_id: str, total: int, decision: Decision, peer: PeerInfo | None = None, *, start: int = 0
    ) -> Endpoint:
        """Publish a transfer of ``total`` tokens under the decision's profile; tokens follow with :meth:`ready`.

        start: the first token of a cell; the consumers hold what is before it.
        Every opened transfer gives one :class:`Freed`, and an :class:`Outcome` or a :class:`Failed`.

        Raises:
            ConfigError: no such profile, or no tokens. Unacceptable: the known ``peer`` cannot decode the profile.
            TransportError: the id is in use, or the transport refuses. StoreFull: the budget has no room for it.
        """
        pipeline = self._pipelines.get(decision.profile)
        if pipeline is None:
            raise ConfigError(did_you_mean(decision.profile, self._pipelines, "profile"))
        if peer and (refusal := acceptable(pipeline.chains, pipeline.used_artefacts, peer)):
            raise Unacceptable(refusal.stages, refusal.detail)
        if self._closed:
            raise TransportError("this producer is closed; create a new one")
        source = Source(pipeline, transfer_id, total, decision.profile, decision.context.link, start)
        self._enter(source)
        try:
            if self._transport.persistent:
                return Endpoint(self._transport.address, pipeline.shard)
            source.address = self._transport.publish(transfer_id, source, self._lease_s)
        except BaseException:
            self._drop(source)
            raise
        return Endpoint(source.address, pipeline.shard)

    def ready(self, transfer_id: str, tokens: range, event: Event | None = None) -> None:
        """``tokens`` are final in the engine's blocks once ``event`` has fired. May come in any order and number.

        Without an event: once what the calling thread's stream has queued so far is done.
        """
        source = self._sources.get(transfer_id)
        if source is not None:  # an aborted transfer's late tokens are nobody's business
            self._jobs.put(_Job(source, tokens, event or self._lane.mark()))

    def abort(self, transfer_id: str, reason: str) -> None:
        """Stop serving a transfer; consumers in flight fail with ``reason``."""
        source = self._sources.get(transfer_id)
        if source is not None:
            self._fail(source, reason)

    def poll(self) -> Sequence[ProducerEvent]:
        """What happened since the last call. Never blocks."""
        for released in self._transport.poll():
            self._ended(released)
        events = []
        while True:
            try:
                events.append(self._events.get_nowait())
            except queue.Empty:
                return events

    def close(self, wait_s: float = CLOSE_S) -> None:
        """Withdraw what is still published and stop the encode thread.

        A thread that does not end within ``wait_s`` is left behind, which the log says: a process can end without it.
        """
        self._closed = True
        self._jobs.put(None)
        for source in list(self._sources.values()):
            self._fail(source, "the producer is shutting down")
        self._thread.join(wait_s)
        if self._thread.is_alive():
            what = f"the store {self._transport.address!r}" if self._transport.persistent else "a batch"
            log.warning("%s did not let go of the encode thread within %g s, which is left behind", what, wait_s)

    def _enter(self, source: Source) -> None:
        with self._lock:
            if source.transfer_id in self._sources:
                raise TransportError(f"transfer {source.transfer_id!r} is already open; use a fresh id per request")
            self.budget.take(source.transfer_id, source.raw_bytes)
            self._sources[source.transfer_id] = source

    def _drop(self, source: Source) -> bool:
        """Forget a transfer; True for the one caller that did."""
        with self._lock:
            if self._sources.get(source.transfer_id) is not source:
                return False
            del self._sources[source.transfer_id]
        self.budget.free(source.transfer_id)
        return True

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._encode(job)
            except BaseException as error:  # noqa: BLE001  # whatever one request's data does, SystemExit too
                self._fail(job.source, f"{type(error).__name__}: {error}")

    def _encode(self, job: _Job) -> None:
        source = job.source
        self._encoding.run(source, source.newly_final(job.tokens), job.event)
        if source.complete and source.closed is None:
            self._complete(source)

    def _complete(self, source: Source) -> None:
        self.budget.settle(source.transfer_id, source.wire_bytes)
        if not self._transport.persistent:
            self._transport_renew(source)
            self._free(source)
            return
        self._transport.publish(source.transfer_id, source, self._lease_s)
        if self._drop(source):
            self._delivered(source, ())
            self._free(source)

    def _transport_renew(self, source: Source) -> None:
        """The lease counts from the last segment. Consumers may already be done, which ends the offer."""
        try:
            self._transport.renew(source.address, source.transfer_id, self._lease_s)
        except TransportError:
            log.debug("transfer %r ended before its last segment", source.transfer_id)

    def _ended(self, released: Released) -> None:
        source = self._sources.get(released.key)
        if source is None or released.source is not source:  # an earlier transfer of the same id
            return
        if released.reason:
            self._fail(source, released.reason)
        elif (refusals := [r.reason for r in released.reports if not r.ok]) and not source.complete:
            self._fail(source, "; ".join(filter(None, refusals)) or "a consumer gave up before all of it was encoded")
        elif self._drop(source):
            source.close("released by every consumer")
            self._delivered(source, released.reports)
            self._free(source)

    def _free(self, source: Source) -> None:
        if source.mark_freed():
            self._events.put(Freed(source.transfer_id))

    def _delivered(self, source: Source, reports: Sequence[Outcome]) -> None:
        outcome = source.outcome(reports)
        self.counters.add("transfers")
        self.counters.add("raw_bytes", outcome.raw_bytes)
        self.counters.add("wire_bytes", outcome.wire_bytes)
        self._events.put(outcome)

    def _fail(self, source: Source, reason: str) -> None:
        if not self._drop(source):
            return
        source.close(reason)
        if source.address:  # of a store nothing is visible yet, and what it holds under this key is another's
            self._transport.withdraw(source.transfer_id, reason)
        self.counters.add("failures")
        self._events.put(Failed(source.transfer_id, reason))  # before Freed, which alone means that it went well so far
        self._free(source)
