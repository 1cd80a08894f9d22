"""The consuming side: fetch the covering segments, verify, decode, scatter, and only then call tokens loaded."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from kvserve_core.artefacts import NONE, Artefacts
from kvserve_core.decoder import Decoder
from kvserve_core.errors import ConfigError, FrameError, TransferCancelled, TransferTimeout
from kvserve_core.handshake import peer_info
from kvserve_core.metrics import Counters
from kvserve_core.policy import Outcome
from kvserve_core.registry import Registry, default_registry
from kvserve_core.session.coverage import Coverage, clip, cut
from kvserve_core.session.events import Loaded, LoadFailed, Scatter, split_region
from kvserve_core.session.routing import route, share
from kvserve_core.spec import KVSpec, Region, Shard
from kvserve_core.transport import Delivery, Locator, Selection, Transport
from kvserve_core.wire import ChainInfo, Codebook, FrameHeader, Segment

ConsumerEvent: TypeAlias = Loaded | LoadFailed
CPU = torch.device("cpu")
DECODERS_KEPT = 64
log = logging.getLogger(__name__)


@dataclass
class _Leg:
    """What one endpoint delivered."""

    regions: tuple[Region, ...]
    wire_bytes: int = 0
    raw_bytes: int = 0
    transfer_s: float = 0.0
    decode_s: float = 0.0


@dataclass
class _Fetch:
    """One request in flight on a fetch thread; legs by endpoint index."""

    loc: Locator
    tokens: range
    deadline: float
    coverage: Coverage
    cancelled: threading.Event = field(default_factory=threading.Event)
    legs: dict[int, _Leg] = field(default_factory=dict)


class Consumer:
    """One per worker rank. ``fetch`` and ``poll`` never block; work happens on ``threads`` fetch threads.

    transport_for: the transport that serves an address (by its scheme). everyone: the shards of all consumer ranks,
    so that producers know when the last one is done; default: the tensor-parallel ranks beside this one.
    batch_bytes: original bytes decoded in one call.
    """

    def __init__(
        self,
        kv: KVSpec,
        shard: Shard,
        transport_for: Callable[[str], Transport],
        scatter: Scatter,
        *,
        registry: Registry | None = None,
        artefacts: Artefacts = NONE,
        device: torch.device = CPU,
        everyone: Sequence[Shard] | None = None,
        threads: int = 4,
        batch_bytes: int = 4 * 2**20,
        counters: Counters | None = None,
    ) -> None:
        self._kv, self._shard, self._transport_for, self._scatter = kv, shard, transport_for, scatter
        self._registry, self._artefacts, self._device = registry or default_registry(), artefacts, device
        self._everyone = everyone or [Shard(shard.layers, r, shard.size) for r in range(shard.size)]
        self._batch_bytes = batch_bytes
        self.counters = counters or Counters()
        self.peer = peer_info(kv, shard, self._registry, artefacts, device)
        self._events: queue.SimpleQueue[ConsumerEvent] = queue.SimpleQueue()
        self._active: dict[str, _Fetch] = {}
        self._local = threading.local()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kvserve-fetch")

    def fetch(self, loc: Locator, tokens: range, deadline: float) -> None:
        """Start loading ``tokens`` of a transfer; the end of ``deadline`` (``time.monotonic()``) fails it.

        Raises:
            ConfigError: the tokens are not in the transfer, or it is already being fetched.
        """
        if not 0 <= tokens.start < tokens.stop <= loc.num_tokens:
            raise ConfigError(f"tokens {tokens.start}-{tokens.stop} of a transfer of {loc.num_tokens}")
        if loc.transfer_id in self._active:
            raise ConfigError(f"transfer {loc.transfer_id!r} is already being fetched")
        job = _Fetch(loc, tokens, deadline, Coverage(self._kv, self._shard, tokens, loc.num_tokens))
        self._active[loc.transfer_id] = job
        self._pool.submit(self._run, job)

    def cancel(self, transfer_id: str) -> None:
        """Give up a fetch. Nothing is scattered for it after its LoadFailed was polled."""
        if job := self._active.get(transfer_id):
            job.cancelled.set()

    def poll(self) -> Sequence[ConsumerEvent]:
        """What ended since the last call. Never blocks."""
        events = []
        while True:
            try:
                events.append(self._events.get_nowait())
            except queue.Empty:
                return events

    def close(self) -> None:
        """Cancel everything and stop the fetch threads."""
        for job in list(self._active.values()):
            job.cancelled.set()
        self._pool.shutdown(wait=True)

    def _run(self, job: _Fetch) -> None:
        started = time.perf_counter()
        error: Exception | None = None
        try:
            self._load(job)
        except Exception as caught:  # noqa: BLE001  # a failed load is reported; the engine recomputes
            error = caught
        total_s = time.perf_counter() - started
        if isinstance(error, FrameError):
            self._discard(job)
        self._release(job, total_s, error)
        outcome = _outcome(job, list(job.legs.values()), total_s, error)
        del self._active[job.loc.transfer_id]
        if error is None:
            self._events.put(Loaded(job.loc.transfer_id, job.tokens, outcome))
        else:
            self.counters.add("fallback_recompute")
            valid = job.coverage.valid()
            self._events.put(LoadFailed(job.loc.transfer_id, job.tokens, valid, error, outcome))

    def _load(self, job: _Fetch) -> None:
        loc = job.loc
        routed = route(loc.endpoints, self._kv, self._shard, job.tokens, loc.num_tokens)
        job.legs = {i: _Leg(regions) for i, regions in routed}
        for i, leg in job.legs.items():
            address = loc.endpoints[i].address
            want = Selection(leg.regions, self.peer)
            delivery = self._transport_for(address).fetch(address, loc.transfer_id, want, job.deadline)
            try:
                self._receive(job, leg, delivery)
            finally:
                delivery.close()
                leg.wire_bytes, leg.transfer_s = delivery.stats.nbytes, delivery.stats.link_s
        job.coverage.require_complete()

    def _receive(self, job: _Fetch, leg: _Leg, delivery: Delivery) -> None:
        _check_header(delivery.header, job.loc)
        decoder, codebook = self._decoder(delivery.header), Codebook(delivery.header)
        batch: list[Segment] = []
        room = self._batch_bytes
        try:
            for sealed in delivery:
                _check(job)
                batch.append(codebook.unseal(sealed))
                room -= self._kv.nbytes(batch[-1].at)
                if room <= 0:
                    full, batch, room = batch, [], self._batch_bytes
                    self._decode(job, leg, decoder, full)
        finally:  # what arrived before an error is good: the engine recomputes that much less
            self._decode(job, leg, decoder, batch)

    def _decode(self, job: _Fetch, leg: _Leg, decoder: Decoder, batch: list[Segment]) -> None:
        if job.cancelled.is_set():
            return
        started = time.perf_counter()
        decoded = decoder.decode(batch)
        for at, x in decoded:
            for plane_at, piece in split_region(self._kv, at, x):
                self._place(job, leg, plane_at, piece)
        leg.decode_s += time.perf_counter() - started

    def _place(self, job: _Fetch, leg: _Leg, at: Region, x: Tensor) -> None:
        for wanted in leg.regions:
            part = clip(at, wanted)
            if part is not None:
                self._scatter(job.loc.transfer_id, part, cut(x, at, part))
                job.coverage.add(part)
                leg.raw_bytes += self._kv.nbytes(part)

    def _decoder(self, header: FrameHeader) -> Decoder:
        """A decoder for these chains, kept per thread: bound stages are safe on one stream only."""
        cache: dict[tuple[ChainInfo, ...], Decoder] = self._local.__dict__.setdefault("decoders", {})
        if header.chains not in cache or header.fingerprint != self._kv.fingerprint:
            if len(cache) >= DECODERS_KEPT:
                cache.clear()
            cache[header.chains] = Decoder(header, self._kv, self._device, self._registry, self._artefacts)
        return cache[header.chains]

    def _discard(self, job: _Fetch) -> None:
        """What a store holds is damaged: take it out, so that the next request does not meet it again."""
        for i in job.legs:
            transport = self._transport_for(job.loc.endpoints[i].address)
            if transport.persistent:
                transport.withdraw(job.loc.transfer_id, "a segment was damaged")

    def _release(self, job: _Fetch, total_s: float, error: Exception | None) -> None:
        loc = job.loc
        for i, leg in job.legs.items():
            mine = share(i, loc.endpoints, self._kv, self._shard, self._everyone)
            report, address = _outcome(job, [leg], total_s, error), loc.endpoints[i].address
            try:
                self._transport_for(address).release(address, loc.transfer_id, mine, report)
            except Exception as failure:  # noqa: BLE001  # the lease frees it; the load itself is decided
                log.warning("releasing transfer %r failed: %s", loc.transfer_id, failure)


def _check_header(header: FrameHeader, loc: Locator) -> None:
    if (header.transfer_id, header.num_tokens) != (loc.transfer_id, loc.num_tokens):
        raise FrameError(
            f"the frame is of transfer {header.transfer_id!r} with {header.num_tokens} tokens,"
            f" expected {loc.transfer_id!r} with {loc.num_tokens}",
            "header",
        )


def _check(job: _Fetch) -> None:
    if job.cancelled.is_set():
        raise TransferCancelled(f"the fetch of {job.loc.transfer_id!r} was cancelled here")
    if time.monotonic() > job.deadline:
        raise TransferTimeout(f"the fetch of {job.loc.transfer_id!r} did not end by its deadline")


def _outcome(job: _Fetch, legs: Sequence[_Leg], total_s: float, error: Exception | None) -> Outcome:
    return Outcome(
        transfer_id=job.loc.transfer_id,
        profile=job.loc.profile,
        raw_bytes=sum(leg.raw_bytes for leg in legs),
        wire_bytes=sum(leg.wire_bytes for leg in legs),
        transfer_s=sum(leg.transfer_s for leg in legs),
        decode_s=sum(leg.decode_s for leg in legs),
        total_s=total_s,
        ok=error is None,
        reason="" if error is None else f"{type(error).__name__}: {error}",
    )
