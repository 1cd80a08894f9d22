"""Any pipeline as a roundtrip of real frames: encode, seal, count every byte, verify, decode."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from torch import Tensor

from kvserve_core.artefacts import NONE, Artefacts
from kvserve_core.decoder import Decoder
from kvserve_core.pipeline import Pipeline
from kvserve_core.plan import Planned
from kvserve_core.session.events import gather_region, split_region
from kvserve_core.spec import Region
from kvserve_core.speed import Timing
from kvserve_core.wire import Codebook, pack_header

BATCH = 64
"""Segments a call."""


class FrameRoundtrip:
    """A :class:`~kvserve_core.evaluation.engine.Roundtrip` through frames; its counters add up over calls.

    segments: all of them; escaped: those that were to be compressed and went raw. timings: of each request, with
    sealing and verifying, as :func:`kvserve_core.speed.timings` gives them, in processor time.
    """

    def __init__(self, pipeline: Pipeline, artefacts: Artefacts = NONE) -> None:
        self._pipeline, self._artefacts = pipeline, artefacts
        self.raw_bytes = 0
        self.wire_bytes = 0
        self.segments = 0
        self.escaped = 0
        self.timings: list[Timing] = []
        self._encode_s = self._decode_s = 0.0

    @property
    def cr(self) -> float:
        """Effective ratio: original bytes over frame bytes, header, metadata, sinks and padding counted."""
        return self.raw_bytes / self.wire_bytes

    def __call__(self, read: Callable[[Region], Tensor], total: int) -> Iterable[tuple[Region, Tensor]]:
        """Restored regions of one request."""
        header, planned = self._pipeline.header("roundtrip", total, "measured")
        self.raw_bytes += header.raw_bytes
        self.wire_bytes += len(pack_header(header))
        book = Codebook(header)
        decoder = Decoder(header, self._pipeline.kv, artefacts=self._artefacts)
        self._encode_s = self._decode_s = 0.0
        for i in range(0, len(planned), BATCH):
            yield from self._batch(planned[i : i + BATCH], read, book, decoder)
        self.timings.append(Timing(header.raw_bytes, self._encode_s, self._decode_s))

    def _batch(
        self, planned: list[Planned], read: Callable[[Region], Tensor], book: Codebook, decoder: Decoder
    ) -> Iterable[tuple[Region, Tensor]]:
        began = time.process_time()
        data = [(p, gather_region(lambda _, at: read(at), "", p.at)) for p in planned]
        segments = self._pipeline.encode(data)
        sealed = [book.seal(segment) for segment in segments]
        encoded = time.process_time()
        restored = decoder.decode([book.unseal(s) for s in sealed])
        self._decode_s += time.process_time() - encoded
        self._encode_s += encoded - began
        self.segments += len(segments)
        self.escaped += sum(s.chain != p.chain for s, p in zip(segments, planned, strict=True))
        self.wire_bytes += sum(s.nbytes for s in sealed)
        for at, x in restored:
            yield from split_region(self._pipeline.kv, at, x)
