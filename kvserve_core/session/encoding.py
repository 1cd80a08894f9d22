"""Segments of a transfer, batch by batch: read from the engine's blocks, encoded, sealed.

On a GPU one batch is queued ahead: while it is encoded, the one before is read back, sealed and on its way. So the
device holds two batches at most, and a block has been read by the time its segments are available.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from kvserve_core.errors import UnsupportedSpecError
from kvserve_core.launched import Launched
from kvserve_core.metrics import Counters
from kvserve_core.pipeline import Pipeline
from kvserve_core.plan import RAW_CHAIN_ID, Planned
from kvserve_core.session.events import Event, Gather, gather_region
from kvserve_core.session.lanes import Lane
from kvserve_core.session.sealing import brought
from kvserve_core.session.source import Source
from kvserve_core.spec import Region
from kvserve_core.tensor import TORCH
from kvserve_core.transport import Transport
from kvserve_core.wire import Segment

log = logging.getLogger(__name__)


@dataclass
class _Batch:
    """Segments whose kernels are queued. mark: behind all of these and before later ones."""

    data: list[tuple[Planned, Tensor]]
    launched: Launched
    mark: Event | None


class Encoding:
    """What a producer's encode thread does. batch_bytes: original bytes of a batch."""

    def __init__(self, gather: Gather, transport: Transport, lane: Lane, batch_bytes: int, counters: Counters) -> None:
        self._gather, self._transport, self._lane = gather, transport, lane
        self._batch_bytes, self._counters = batch_bytes, counters

    def run(self, source: Source, planned: Sequence[Planned], event: Event | None) -> None:
        """Encode what became final with ``event``. Stops where the source is closed."""
        if event is not None and source.closed is None:
            event.synchronize()  # gathering would wait for it anyhow; the engine's own work is no time of encoding
        ahead = 0 if self._lane.device.type == "cpu" else 1  # on a CPU nothing goes on in the background
        started, waiting = time.perf_counter(), deque[_Batch]()
        for members in self._batches(source, planned):
            if source.closed is not None:
                return
            waiting.append(self._queued(source, members))
            while len(waiting) > ahead:
                started = self._sealed(source, waiting.popleft(), started)
        while waiting:
            started = self._sealed(source, waiting.popleft(), started)

    def _queued(self, source: Source, planned: Sequence[Planned]) -> _Batch:
        with self._lane.work():
            data = [(p, self._gathered(source, p.at)) for p in planned]
            try:
                launched = source.pipeline.launch(data)
            except Exception as error:  # noqa: BLE001  # a codec may raise anything; the segments must still arrive
                launched = source.pipeline.launch(_raw(data, error))
            return _Batch(data, launched, self._lane.mark())

    def _sealed(self, source: Source, batch: _Batch, started: float) -> float:
        """Make a batch available, without waiting for what is queued behind it; the time."""
        with self._lane.beside(batch.mark):
            sealed = source.seal(self._segments(source.pipeline, batch), self._transport.piece_hashes)
            if self._transport.staging == "host":
                sealed = brought(sealed)
        now = time.perf_counter()
        source.add(sealed, now - started)
        return now

    def _segments(self, pipeline: Pipeline, batch: _Batch) -> list[Segment]:
        there = self._transport.staging == "device" or self._transport.hashes_on_device
        on_device = there and pipeline.device.type != "cpu"
        try:
            segments = batch.launched.finish(on_device)
        except Exception as error:  # noqa: BLE001  # as above
            segments = pipeline.encode(_raw(batch.data, error), on_device)
        # What a stage refused, or what compressing would not make smaller.
        refused = sum(s.chain != p.chain for s, (p, _) in zip(segments, batch.data, strict=True))
        self._counters.add("fallback_raw", refused)
        return segments

    def _gathered(self, source: Source, at: Region) -> Tensor:
        x = gather_region(self._gather, source.transfer_id, at)
        plane = source.pipeline.kv.group(at.group).plane(at.plane)
        shape = (len(at.layers), len(at.heads), at.num_tokens, plane.dim)
        if x.shape != shape or x.dtype != TORCH[plane.dtype]:
            raise UnsupportedSpecError(
                f"gather gave {tuple(x.shape)} {x.dtype} for {at}, expected {shape} {TORCH[plane.dtype]} in the order"
                " layer, head, token, dim"
            )
        return x

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


def _raw(data: list[tuple[Planned, Tensor]], error: Exception) -> list[tuple[Planned, Tensor]]:
    """A codec failed: the same tokens, raw."""
    log.warning("sending %d segments raw, their codec failed: %s", len(data), error)
    return [(replace(p, chain=RAW_CHAIN_ID), x) for p, x in data]
