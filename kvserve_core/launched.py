"""What lies between queued kernels and segments: sizes and flags are read, bytes are fetched, raw is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvserve_core.errors import KVServeError
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


class Launched:
    """Segments whose kernels are queued. ``finish`` reads sizes, so call it after the fence."""

    def __init__(self, finisher: Finisher, drafts: list[Draft]) -> None:
        self._finisher, self._drafts = finisher, drafts

    def finish(self) -> list[Segment]:
        """The segments, each no larger than raw plus its overhead. Sizes come in one copy, all bytes in another."""
        settled = [self._settle(*each) for each in _read(self._drafts)]
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

    def _settle(self, draft: Draft, sizes: Sequence[int], finite: bool) -> Settled | Segment:
        if finite or draft.planned.chain == RAW_CHAIN_ID:
            return _settled(draft, sizes)
        if draft.fused:  # the kernel could not; the stages may
            return self._finisher.by_stages(draft.planned, draft.x)
        return self._finisher.raw(draft.planned, draft.x)


class Finisher(Protocol):
    """The pipeline, as far as a launch needs it."""

    def packed(self, settled: Settled, data: Sequence[Tensor]) -> Segment:
        """``data``: of ``settled``, on the host. Raw if that is smaller."""

    def by_stages(self, planned: Planned, x: Tensor) -> Segment:
        """One segment without kernels that take stages together."""

    def raw(self, planned: Planned, x: Tensor) -> Segment:
        """The segment as it is in the cache."""


def _read(drafts: Sequence[Draft]) -> list[tuple[Draft, list[int], bool]]:
    """Each draft's sizes and whether it is finite, all in one copy."""
    counts = [e.nbytes for draft in drafts for e in draft.encoded]
    flags = [draft.finite for draft in drafts if draft.finite is not None]
    rows = ([torch.stack(flags).to(torch.int64)] if flags else []) + ([torch.stack(counts)] if counts else [])
    values = iter(torch.cat(rows).tolist() if rows else [])
    finite = iter([bool(next(values)) for _ in flags])
    return [(d, [next(values) for _ in d.encoded], d.finite is None or next(finite)) for d in drafts]


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
