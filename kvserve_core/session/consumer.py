"""The consuming side: fetch the covering segments, verify, decode, scatter, and only then call tokens loaded."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import torch
from torch import Tensor

from kvserve_core.artefacts import NONE, Artefacts
from kvserve_core.decoder import Decoder
from kvserve_core.errors import ConfigError, IntegrityError, TransferCancelled, Unacceptable
from kvserve_core.handshake import peer_info, warm_up
from kvserve_core.metrics import Counters
from kvserve_core.policy import Outcome
from kvserve_core.registry import Registry, default_registry
from kvserve_core.session.coverage import Coverage, clip, cut
from kvserve_core.session.events import Loaded, LoadFailed, Scatter, split_region
from kvserve_core.session.fetching import Fetch, Leg
from kvserve_core.session.gate import Gate, default_turns
from kvserve_core.session.lanes import Lane
from kvserve_core.session.routing import route, share
from kvserve_core.spec import KVSpec, Region, Shard
from kvserve_core.transport import Delivery, Locator, Selection, Transport
from kvserve_core.wire import ChainInfo, Codebook, FrameHeader, Segment

ConsumerEvent: TypeAlias = Loaded | LoadFailed
CPU = torch.device("cpu")
DECODERS_KEPT = 64
log = logging.getLogger(__name__)


class Consumer:
    """One per worker rank. ``fetch``, ``cancel`` and ``poll`` never block; the work is done on fetch threads.

    transport_for: the transport that serves an address (by its scheme). everyone: the shards of all consumer ranks,
    so that producers know when the last one is done; default: the tensor-parallel ranks beside this one.
    link: under which name the producer keeps the goodput seen from here. threads: requests served at once; further
    ones wait, within their deadline. batch_bytes: original bytes decoded in one call. sms: a GPU's multiprocessors that
    decoding may use, 0 for all. decoders: batches decoded at a time; 0 for half the cores of this process, and for two
    on a GPU, whose stream takes one after the other anyhow. decode_share: part of its time that a thread decodes while
    ``gate.busy``, which is the engine's to set; the rests count as time of decoding.

    Raises:
        ConfigError: ``everyone`` does not hold ``shard``.
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
        link: str = "default",
        threads: int = 32,
        batch_bytes: int = 4 * 2**20,
        sms: int = 0,
        decoders: int = 0,
        decode_share: float = 1.0,
        counters: Counters | None = None,
    ) -> None:
        self._kv, self._shard, self._transport_for, self._scatter = kv, shard, transport_for, scatter
        self._registry, self._artefacts, self._device = registry or default_registry(), artefacts, device
        self._everyone = list(everyone or [Shard(shard.layers, r, shard.size) for r in range(shard.size)])
        if shard not in self._everyone:
            raise ConfigError(f"'everyone' must hold the shard of this rank, {shard}")
        self._batch_bytes = batch_bytes
        self._lane = Lane(device, sms)
        self.gate = Gate(decoders or default_turns(device), decode_share)
        self.counters = counters or Counters()
        self.peer = peer_info(kv, shard, self._registry, artefacts, device, link)
        warm_up(self.peer, self._registry)
        self._events: queue.SimpleQueue[ConsumerEvent] = queue.SimpleQueue()
        self._active: dict[str, Fetch] = {}
        self._ended = threading.Condition()
        self._local = threading.local()
        self._closed = False
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kvserve-fetch")
        self._leg_pool = ThreadPoolExecutor(threads, thread_name_prefix="kvserve-leg")

    def fetch(self, loc: Locator, tokens: range, deadline: float, *, name: str = "") -> None:
        """Start loading ``tokens`` of a transfer; the end of ``deadline`` (``time.monotonic()``) fails it.

        On a GPU nothing is written before what the calling thread's stream has queued so far is done.

        name: what ``scatter``, ``cancel`` and events call it instead of the transfer id: several requests may load the
        same object of a store at once.

        Raises:
            ConfigError: the tokens are not in the transfer, or it is already being fetched.
            TransferCancelled: the consumer was closed.
        """
        if not 0 <= tokens.start < tokens.stop <= loc.num_tokens:
            raise ConfigError(f"tokens {tokens.start}-{tokens.stop} of a transfer of {loc.num_tokens}")
        name = name or loc.transfer_id
        if name in self._active:
            raise ConfigError(f"transfer {name!r} is already being fetched")
        if self._closed:
            raise TransferCancelled("this consumer is closed; create a new one")
        coverage = Coverage(self._kv, self._shard, tokens, loc.num_tokens)
        job = Fetch(name, loc, tokens, deadline, coverage, self._lane.mark())
        self._active[name] = job
        self._pool.submit(self._run, job)

    def release(self, loc: Locator) -> None:
        """Say that this rank needs nothing of a transfer (a full prefix hit), so that the producer can let it go."""
        self._pool.submit(self._release, loc, {})

    def cancel(self, name: str) -> None:
        """Give up a fetch, by its name or transfer id. Nothing is scattered for it after its LoadFailed was polled."""
        if job := self._active.get(name):
            job.cancel()

    def poll(self) -> Sequence[ConsumerEvent]:
        """What ended since the last call. Never blocks."""
        now = time.monotonic()
        for job in list(self._active.values()):
            if now > job.deadline and job.claim():
                self._end(job, 0.0, job.late())
        events = []
        while True:
            try:
                events.append(self._events.get_nowait())
            except queue.Empty:
                return events

    def wait(self, seconds: float) -> None:
        """Until :meth:`poll` has something to tell, at most so long: for an engine's thread with nothing else to do."""
        with self._ended:
            self._ended.wait_for(lambda: not (self._active and self._events.empty()), seconds)

    def close(self) -> None:
        """Cancel everything and stop the fetch threads."""
        self._closed = True
        for job in list(self._active.values()):
            job.cancel()
        self._pool.shutdown(wait=True)
        self._leg_pool.shutdown(wait=True)

    def _run(self, job: Fetch) -> None:
        if not job.claim():
            return
        started = time.perf_counter()
        error: Exception | None = None
        try:
            self._load(job)
        except Exception as caught:  # noqa: BLE001  # a failed load is reported; the engine recomputes
            error = caught
        except BaseException as caught:  # noqa: BLE001  # SystemExit in a scatter must not leave the engine waiting
            error = TransferCancelled(f"the fetch of {job.loc.transfer_id!r} was interrupted: {caught!r}")
        self._end(job, time.perf_counter() - started, error)

    def _end(self, job: Fetch, total_s: float, error: Exception | None) -> None:
        if isinstance(error, IntegrityError):
            self._discard(job)
        if job.legs:
            self._release(job.loc, {i: job.outcome([leg], total_s, error) for i, leg in job.legs.items()})
        outcome = job.outcome(list(job.legs.values()), total_s, error)
        event: ConsumerEvent = Loaded(job.name, job.tokens, outcome)
        if error is not None:
            if isinstance(error, Unacceptable) and not error.other_model:
                self.counters.add("fallback_codec")
            self.counters.add("fallback_recompute")
            event = LoadFailed(job.name, job.tokens, job.coverage.valid(), error, outcome)
        with self._ended:  # both at once, so that who waits never sees neither
            del self._active[job.name]
            self._events.put(event)
            self._ended.notify_all()

    def _load(self, job: Fetch) -> None:
        loc = job.loc
        routed = route(loc.endpoints, self._kv, self._shard, job.tokens, loc.num_tokens)
        job.legs = {i: Leg(regions) for i, regions in routed}
        first, *others = job.legs
        running = [self._leg_pool.submit(self._receive, job, i) for i in others]
        try:
            self._receive(job, first)
        finally:
            failures = [f.exception() for f in running]
            self._lane.wait()  # what was scattered is in place: any stream of the engine may read it from here on
        for failure in failures:
            if failure is not None:
                raise failure
        job.check()
        job.coverage.require_complete()

    def _receive(self, job: Fetch, index: int) -> None:
        job.check()
        leg, address = job.legs[index], job.loc.endpoints[index].address
        want = Selection(leg.regions, self.peer)
        delivery = self._transport_for(address).fetch(address, job.loc.transfer_id, want, job.deadline)
        leg.delivery = delivery
        self._lane.after(job.mark)
        try:
            with self._lane.work():
                self._take(job, leg, delivery)
        finally:
            delivery.close()
            leg.wire_bytes, leg.transfer_s = delivery.stats.nbytes, delivery.stats.link_s

    def _take(self, job: Fetch, leg: Leg, delivery: Delivery) -> None:
        job.check_header(delivery.header)
        decoder, codebook = self._decoder(delivery.header), Codebook(delivery.header)
        batch: list[Segment] = []
        room = self._batch_bytes
        try:
            for sealed in delivery:
                job.check()
                batch.append(codebook.unseal(sealed))
                room -= self._kv.nbytes(batch[-1].at)
                if room <= 0:
                    full, batch, room = batch, [], self._batch_bytes
                    self._decode(job, leg, decoder, full)
        finally:  # what arrived before an error is good: the engine recomputes that much less
            self._decode(job, leg, decoder, batch)

    def _decode(self, job: Fetch, leg: Leg, decoder: Decoder, batch: list[Segment]) -> None:
        with self.gate.turn(job.cancelled):
            if job.cancelled.is_set():
                return
            started = time.perf_counter()
            decoded = decoder.decode(batch)
            for at, x in decoded:
                for plane_at, piece in split_region(self._kv, at, x):
                    self._place(job, leg, plane_at, piece)
        leg.decode_s += time.perf_counter() - started

    def _place(self, job: Fetch, leg: Leg, at: Region, x: Tensor) -> None:
        for wanted in leg.regions:
            part = clip(at, wanted)
            if part is not None:
                job.coverage.claim(part)
                self._scatter(job.name, part, cut(x, at, part))
                job.coverage.count(part)
                leg.raw_bytes += self._kv.nbytes(part)

    def _decoder(self, header: FrameHeader) -> Decoder:
        """A decoder for these chains, kept per thread: bound stages are safe on one stream only."""
        cache: dict[tuple[ChainInfo, ...], Decoder] = self._local.__dict__.setdefault("decoders", {})
        if header.chains not in cache or header.fingerprint != self._kv.fingerprint:
            if len(cache) >= DECODERS_KEPT:
                cache.clear()
            cache[header.chains] = Decoder(header, self._kv, self._device, self._registry, self._artefacts)
        return cache[header.chains]

    def _discard(self, job: Fetch) -> None:
        """What a store holds is damaged: take it out, so that the next request does not meet it again."""
        for i in job.legs:
            try:
                transport = self._transport_for(job.loc.endpoints[i].address)
                if transport.persistent:
                    transport.withdraw(job.loc.transfer_id, "a segment was damaged")
            except Exception as failure:  # noqa: BLE001  # it will be met, and refused, again
                log.warning("removing damaged %r failed: %s", job.loc.transfer_id, failure)

    def _release(self, loc: Locator, reports: Mapping[int, Outcome]) -> None:
        for i, endpoint in enumerate(loc.endpoints):
            try:
                mine = share(i, loc.endpoints, self._kv, self._shard, self._everyone)
                if mine is not None:
                    transport = self._transport_for(endpoint.address)
                    transport.release(endpoint.address, loc.transfer_id, mine, reports.get(i))
            except Exception as failure:  # noqa: BLE001  # the lease frees it; the load itself is decided
                log.warning("releasing transfer %r failed: %s", loc.transfer_id, failure)
