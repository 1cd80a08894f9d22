"""What lies between queued kernels and segments: sizes and flags are read, bytes are fetched, raw is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from kvserve_core.bodies import host_bytes
from kvserve_core.errors import KVServeError
from kvserve_core.payload import as_bytes
from kvserve_core.plan import RAW_CHAIN_ID, Planned
from kvserve_core.tensor import Encoded, Params, Part, on_host
from kvserve_core.wire import Segment


@dataclass
class Draft:
    """A segment after T, Q and the launch of C. fused: not by its stages, so that these can still be asked."""

    planned: Planned
    x: Tensor
    stages: Sequence[Params]
    parts: tuple[Part, ...]
    encoded: Sequence[Encoded]
    finite: Tensor | None
    fused: bool = False


@dataclass
class Settled:
    """A segment whose sizes are known. ``data``: parameters, then each stream, coded or as it stands."""

    draft: Draft
    coded: list[bool]
    data: list[Tensor]

    @property
    def streams(self) -> list[Tensor]:
        """Those of ``data`` that are no parameters."""
        return self.data[len(self.data) - len(self.coded) :]


class Launched:
    """Segments whose kernels are queued. ``finish`` reads sizes, so call it after the fence.

    It may be called on another stream, which must wait for the one of the kernels.
    """

    def __init__(self, finisher: Finisher, drafts: list[Draft]) -> None:
        self._finisher, self._drafts = finisher, drafts
        self._stream = torch.cuda.current_stream(drafts[0].x.device) if drafts and drafts[0].x.is_cuda else None

    def finish(self, on_device: bool = False) -> list[Segment]:
        """The segments, each no larger than raw plus its overhead. Sizes come in one copy, all bytes in another.

        on_device: leave the bodies where they are (queued, not waited for), as slices of one buffer a batch.
        """
        settled = [self._settle(*each) for each in _read(self._drafts)]
        if on_device:
            return self._on_device(settled)
        if self._stream is not None:
            return self._brought(settled)
        data = on_host([t for s in settled if isinstance(s, Settled) for t in s.data])
        taken = 0
        segments = []
        for s in settled:
            if isinstance(s, Segment):
                segments.append(s)
                continue
            segments.append(self._finisher.packed(s, data[taken : taken + len(s.data)]))
            taken += len(s.data)
        return segments

    def _on_device(self, settled: Sequence[Settled | Segment]) -> list[Segment]:
        """Segments whose bodies stay on the device; what had to be packed on the host goes back there."""
        placed = iter(self._finisher.placed([s for s in settled if isinstance(s, Settled)]))
        device = self._drafts[0].x.device if self._drafts else None
        return [next(placed) if isinstance(s, Settled) else _moved(s, device) for s in settled]

    def _brought(self, settled: Sequence[Settled | Segment]) -> list[Segment]:
        """Put together on the GPU and brought here in one copy to pinned memory, which bodies are slices of."""
        placed = self._finisher.placed([s for s in settled if isinstance(s, Settled)])
        bodies = on_host([s.body for s in placed if isinstance(s.body, Tensor)])
        brought = iter([replace(s, body=as_bytes(b)) for s, b in zip(placed, bodies, strict=True)])
        return [next(brought) if isinstance(s, Settled) else s for s in settled]

    def _settle(self, draft: Draft, sizes: Sequence[int], finite: bool) -> Settled | Segment:
        if finite or draft.planned.chain == RAW_CHAIN_ID:
            return _settled(draft, sizes)
        if draft.fused:  # the kernel could not; the stages may, which are bound to the stream that they ran on
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                return self._finisher.by_stages(draft.planned, draft.x)
        return self._finisher.raw(draft.planned, draft.x)


class Finisher(Protocol):
    """The pipeline, as far as a launch needs it."""

    def packed(self, settled: Settled, data: Sequence[Tensor]) -> Segment:
        """``data``: of ``settled``, on the host. Raw if that is smaller."""

    def placed(self, settled: Sequence[Settled]) -> list[Segment]:
        """The same with bodies on the device, of all segments in one buffer."""

    def by_stages(self, planned: Planned, x: Tensor) -> Segment:
        """One segment without kernels that take stages together."""

    def raw(self, planned: Planned, x: Tensor) -> Segment:
        """The segment as it is in the cache."""


def _moved(segment: Segment, device: torch.device | None) -> Segment:
    body = torch.frombuffer(bytearray(host_bytes(segment.body)), dtype=torch.uint8)
    return replace(segment, body=body.to(device))


def _read(drafts: Sequence[Draft]) -> list[tuple[Draft, list[int], bool]]:
    """Each draft's sizes and whether it is finite, all in one copy."""
    counts = [e.nbytes for draft in drafts for e in draft.encoded]
    flags = [draft.finite for draft in drafts if draft.finite is not None]
    rows = ([_together(flags).to(torch.int64)] if flags else []) + ([_together(counts)] if counts else [])
    values = iter(torch.cat(rows).tolist() if rows else [])
    finite = iter([bool(next(values)) for _ in flags])
    return [(d, [next(values) for _ in d.encoded], d.finite is None or next(finite)) for d in drafts]


def _together(each: Sequence[Tensor]) -> Tensor:
    """0-d tensors as one. Those of a batch are mostly pieces of one already, and need no kernel."""
    whole = each[0]._base
    pieces = all(x._base is whole and x.storage_offset() == i for i, x in enumerate(each))
    if whole is not None and pieces and whole.shape == (len(each),) and whole.is_contiguous():
        return whole
    return torch.stack(list(each))


def _settled(draft: Draft, sizes: Sequence[int]) -> Settled:
    """Streams that coding makes smaller are sent coded, the others as they stand; so is all of a raw segment."""
    coded = []
    data = [value for params in draft.stages for value in params.values()]
    for part, encoded, size in zip(draft.parts, draft.encoded, sizes, strict=True):
        if not 0 <= size <= encoded.data.numel():
            raise KVServeError(f"a codec says {size} bytes of a buffer of {encoded.data.numel()}")
        coded.append(size < part.nbytes and draft.planned.chain != RAW_CHAIN_ID)
        data.append(encoded.data[:size] if coded[-1] else part.codes)
    return Settled(draft, coded, data)
