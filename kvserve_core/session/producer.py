"""The producing side: cells are encoded as soon as they are final, staged on the host, served until released."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from torch import Tensor

from kvserve_core.errors import (
    ConfigError,
    KVServeError,
    StoreFull,
    TransportError,
    Unacceptable,
    did_you_mean,
)
from kvserve_core.metrics import Counters
from kvserve_core.peer import PeerInfo, acceptable
from kvserve_core.pipeline import Pipeline
from kvserve_core.plan import RAW_CHAIN_ID, Planned
from kvserve_core.policy import Decision, Outcome
from kvserve_core.session.events import Event, Failed, Freed, Gather, gather_region
from kvserve_core.session.source import Source
from kvserve_core.transport import Endpoint, Released, Transport
from kvserve_core.wire import Segment

log = logging.getLogger(__name__)
ProducerEvent: TypeAlias = Freed | Failed | Outcome


@dataclass
class _Job:
    source: Source
    tokens: range
    event: Event | None


class Producer:
    """One per worker rank. All methods may be called from the engine's thread; none blocks on a peer.

    pipelines: by profile name. batch_bytes: original bytes encoded in one call. published_bytes_max: host bytes held
    for consumers; beyond it encoding waits for releases, at most ``lease_s``.
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
        counters: Counters | None = None,
    ) -> None:
        self._pipelines, self._transport, self._gather = dict(pipelines), transport, gather
        self._lease_s, self._batch_bytes, self._max = lease_s, batch_bytes, published_bytes_max
        self.counters = counters or Counters()
        self._sources: dict[str, Source] = {}
        self._held = 0
        self._room = threading.Condition()
        self._events: queue.SimpleQueue[ProducerEvent] = queue.SimpleQueue()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvserve-encode", daemon=True)
        self._thread.start()

    def open(self, transfer_id: str, total: int, decision: Decision, peer: PeerInfo | None = None) -> Endpoint:
        """Publish a transfer of ``total`` tokens under the decision's profile; tokens follow with :meth:`ready`.

        Raises:
            Unacceptable: the known ``peer`` cannot decode the profile.
            TransportError: the id is in use, or the transport refuses. StoreFull: it can never fit.
        """
        pipeline = self._pipelines.get(decision.profile)
        if pipeline is None:
            raise ConfigError(did_you_mean(decision.profile, self._pipelines, "profile"))
        if total < 1:
            raise ConfigError(f"transfer {transfer_id!r} has {total} tokens; at least 1 is needed")
        if transfer_id in self._sources:
            raise TransportError(f"transfer {transfer_id!r} is already open; use a fresh id per request")
        if peer and (refusal := acceptable(pipeline.chains, pipeline.used_artefacts, peer)):
            raise Unacceptable(refusal.stages, refusal.detail)
        source = Source(pipeline, transfer_id, total, decision.profile, decision.context.link)
        if source.header.raw_bytes > self._max:
            raise StoreFull(
                f"transfer {transfer_id!r} may need {source.header.raw_bytes} bytes, 'published_bytes_max' is"
                f" {self._max}; raise it"
            )
        self._sources[transfer_id] = source
        if self._transport.persistent:
            return Endpoint(self._transport.address, pipeline.shard)
        try:
            source.address = self._transport.publish(transfer_id, source, self._lease_s)
        except BaseException:
            del self._sources[transfer_id]
            raise
        return Endpoint(source.address, pipeline.shard)

    def ready(self, transfer_id: str, tokens: range, event: Event | None = None) -> None:
        """``tokens`` are final in the engine's blocks (once ``event`` has fired). May come in any order and number."""
        source = self._sources.get(transfer_id)
        if source is not None:  # an aborted transfer's late tokens are nobody's business
            self._jobs.put(_Job(source, tokens, event))

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

    def close(self) -> None:
        """Stop the encode thread and withdraw what is still published."""
        self._jobs.put(None)
        for source in list(self._sources.values()):
            self._fail(source, "the producer is shutting down")
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._encode(job)
            except Exception as error:  # noqa: BLE001  # the engine goes on whatever one request's data does
                self._fail(job.source, f"{type(error).__name__}: {error}")

    def _encode(self, job: _Job) -> None:
        source = job.source
        if job.event is not None:
            job.event.synchronize()
        for batch in self._batches(source, source.newly_final(job.tokens)):
            if source.closed is not None:
                return
            started = time.perf_counter()
            data = [(p, gather_region(self._gather, source.header.transfer_id, p.at)) for p in batch]
            sealed = source.seal(self._segments(source.pipeline, data))
            self._hold(source, source.add(sealed, time.perf_counter() - started))
            if source.address:
                self._transport.renew(source.address, source.header.transfer_id, self._lease_s)
        if source.complete and source.closed is None:
            self._complete(source)

    def _batches(self, source: Source, planned: Sequence[Planned]) -> list[list[Planned]]:
        batches: list[list[Planned]] = []
        room = 0
        for p in planned:
            size = source.pipeline.kv.nbytes(p.at)
            if not batches or size > room:
                batches.append([])
                room = self._batch_bytes
            batches[-1].append(p)
            room -= size
        return batches

    def _segments(self, pipeline: Pipeline, data: list[tuple[Planned, Tensor]]) -> list[Segment]:
        try:
            segments = pipeline.encode(data)
            # What a stage refused, or what compressing would not make smaller.
            escaped = sum(s.chain != p.chain for s, (p, _) in zip(segments, data, strict=True))
            self.counters.add("fallback_raw", escaped)
            return segments
        except (KVServeError, RuntimeError, ValueError) as error:  # next rung of the ladder: the same tokens, raw
            log.warning("sending %d segments raw, their chain failed: %s", len(data), error)
            self.counters.add("fallback_raw", len(data))
            return pipeline.encode([(replace(p, chain=RAW_CHAIN_ID), x) for p, x in data])

    def _hold(self, source: Source, nbytes: int) -> None:
        with self._room:
            self._held += nbytes
            source.held += nbytes
        deadline = time.monotonic() + self._lease_s
        with self._room:
            while self._held > self._max and source.closed is None:
                if not self._room.wait(deadline - time.monotonic()):
                    raise StoreFull(f"{self._held} bytes wait for consumers, 'published_bytes_max' is {self._max}")

    def _complete(self, source: Source) -> None:
        transfer_id = source.header.transfer_id
        if self._transport.persistent:
            self._transport.publish(transfer_id, source, self._lease_s)
            self._drop(source)
            self._delivered(source, ())
        self._free(source)

    def _ended(self, released: Released) -> None:
        source = self._sources.get(released.key)
        if source is None:
            return
        if released.reason:
            self._fail(source, released.reason)
            return
        self._drop(source)
        source.close("released by every consumer")
        self._delivered(source, released.reports)
        self._free(source)

    def _free(self, source: Source) -> None:
        if source.mark_freed():
            self._events.put(Freed(source.header.transfer_id))

    def _delivered(self, source: Source, reports: Sequence[Outcome]) -> None:
        outcome = source.outcome(reports)
        self.counters.add("transfers")
        self.counters.add("raw_bytes", outcome.raw_bytes)
        self.counters.add("wire_bytes", outcome.wire_bytes)
        self._events.put(outcome)

    def _fail(self, source: Source, reason: str) -> None:
        if self._sources.get(source.header.transfer_id) is not source:
            return
        self._drop(source)
        source.close(reason)
        self._transport.withdraw(source.header.transfer_id, reason)
        self.counters.add("failures")
        self._events.put(Failed(source.header.transfer_id, reason))

    def _drop(self, source: Source) -> None:
        self._sources.pop(source.header.transfer_id, None)
        with self._room:
            self._held -= source.held
            source.held = 0
            self._room.notify_all()
