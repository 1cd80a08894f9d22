"""Batches of segments as tables of jobs for the fused kernels; see :mod:`kvserve_plugins.kernels.triton_tile`.

All that does not depend on addresses is computed once for a batch of these places and sizes, and kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvserve_core.spec import Region

I64 = NDArray[np.int64]
ALIGN = 16


@dataclass(frozen=True)
class Extent:
    """One segment of a batch: first row of its signs, layers times heads, tokens."""

    signs: int
    heads: int
    tokens: int


@dataclass(frozen=True)
class JobTable:
    """Jobs of a batch but for their addresses, sorted so that jobs of one group follow each other.

    jobs: ``[n, 8]``, addresses still offsets in bytes from the segment's start. segment, run: of each job. heads:
    ``[n, 2]``, of its sources. groups: ``[g, 4]`` i32. starts: of each run's codes and parameters within the batch;
    code_bytes, param_count: their sums. tokens: of the longest job.
    """

    jobs: I64
    segment: I64
    run: I64
    heads: I64
    groups: NDArray[np.int32]
    code_starts: I64
    param_starts: I64
    code_bytes: int
    param_count: int
    tokens: int
    paired: bool

    def on(
        self,
        device: torch.device,
        addresses: Sequence[int] | Sequence[Sequence[int]],
        positions: Sequence[int],
        codes: Tensor | None = None,
        streams: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """The jobs with addresses, on the device, in one asynchronous copy from pinned memory.

        addresses: of each segment, or of each of its heads. positions: of each segment's first token. streams: codes
        that lie elsewhere than in the batch's own memory, to be addressed from the start of ``codes``.
        """
        pinned = torch.empty(self.jobs.shape, dtype=torch.int64, pin_memory=device.type == "cuda")
        table = pinned.numpy()
        table[:] = self.jobs
        if isinstance(addresses[0], int):
            start = np.asarray(addresses, np.int64)[self.segment]
            table[:, 0] += start
            if self.paired:
                table[:, 1] += start
        else:
            self._by_head(table, addresses)  # type: ignore[arg-type]  # a list for each segment
        table[:, 7] += np.asarray(positions, np.int64)[self.segment]
        if codes is not None and streams is not None:
            moved = np.array([x.data_ptr() for x in streams], np.int64) - codes.data_ptr() - self.code_starts
            table[:, 2] += moved[self.run]
        return pinned.to(device, non_blocking=True)

    def _by_head(self, table: I64, addresses: Sequence[Sequence[int]]) -> None:
        """Sources of blocks: their tokens are found by position, so each has its own."""
        first = np.cumsum([0, *(len(a) for a in addresses)])[self.segment]
        flat = np.concatenate([np.asarray(a, np.int64) for a in addresses])
        table[:, 0] = flat[first + self.heads[:, 0]]
        if self.paired:
            table[:, 1] = flat[first + self.heads[:, 1]]


def pair_table(extents: Sequence[Extent], dim: int) -> JobTable:
    """Jobs for packing two codes a byte: item i of a segment with item i + half of its items.

    An item is a head of a layer, or half its tokens where layers times heads is odd (tokens are then even).
    """
    count = np.array([e.heads for e in extents], np.int64)
    tokens = np.array([e.tokens for e in extents], np.int64)
    cut = 1 + count % 2  # items a head
    items, rows = count * cut, tokens // cut
    code_bytes = count * tokens * dim // 2
    code_starts = starts(code_bytes)
    param_starts = starts(count * tokens)
    segment = np.repeat(np.arange(len(count)), items // 2)
    i = ranges(items // 2)
    j = i + (items // 2)[segment]
    size, base = rows[segment], np.array([e.signs for e in extents], np.int64)[segment]
    jobs = np.stack(
        (
            i * size * dim * 2,
            j * size * dim * 2,
            code_starts[segment] + i * size * dim,
            param_starts[segment] + i * size,
            param_starts[segment] + j * size,
            segment,
            size,
            i % cut[segment] * size,
        ),
        1,
    )
    heads = np.stack((i // cut[segment], j // cut[segment]), 1)
    return _sorted(jobs, segment, segment, heads, base, code_starts, param_starts, paired=True)


@dataclass(frozen=True)
class Run:
    """One stream of codes: heads of one class in a segment, in the order of the stream.

    segment: index in the batch. heads: positions in the segment, layer times heads plus head. levels: of the class.
    """

    segment: int
    heads: tuple[int, ...]
    levels: int


def head_table(extents: Sequence[Extent], runs: Sequence[Run], dim: int, channel: bool) -> JobTable:
    """Jobs for codes of one byte, a head each; ``code_starts`` and ``param_starts`` are those of the runs."""
    heads = [np.asarray(r.heads, np.int64) for r in runs]
    count = np.array([len(h) for h in heads], np.int64)
    segment_of_run = np.array([r.segment for r in runs], np.int64)
    tokens = np.array([e.tokens for e in extents], np.int64)
    code_starts = starts(count * tokens[segment_of_run] * dim)
    each = np.full(len(runs), dim) if channel else tokens[segment_of_run]
    param_starts = starts(count * each)
    run = np.repeat(np.arange(len(runs)), count)
    segment, i, head = segment_of_run[run], ranges(count), np.concatenate(heads)
    levels = np.array([r.levels for r in runs], np.int64)[run]
    size = tokens[segment]
    outward = np.array([outwards(r.levels) for r in runs], np.float32).view(np.int32).astype(np.int64)[run]
    jobs = np.stack(
        (
            head * size * dim * 2,
            levels - 1,
            code_starts[run] + i * size * dim,
            param_starts[run] + i * each[run],
            outward,
            segment,
            size,
            np.zeros_like(i),
        ),
        1,
    )
    base = np.array([e.signs for e in extents], np.int64)[segment]
    return _sorted(jobs, segment, run, np.stack((head, head), 1), base, code_starts, param_starts, paired=False)


def outwards(levels: int) -> float:
    """From a range to a quarter of a scale that rounding to bf16 leaves large enough, as ``minmax`` has it."""
    return 0.125 * (1 + 2**-8 + 2**-16) / ((levels - 1) / 2)


def starts(sizes: I64, align: int = ALIGN) -> I64:
    """Where pieces of these sizes begin, each at a multiple of ``align``; one more for the end."""
    padded = -(-sizes // align) * align
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(padded)))


def ranges(counts: I64) -> I64:
    """0 to count - 1 for each count, one after the other."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def _sorted(
    jobs: I64, segment: I64, run: I64, heads: I64, base: I64, code_starts: I64, param_starts: I64, *, paired: bool
) -> JobTable:
    """Jobs of the same heads of a place one after the other. base: first row of signs of each job's place."""
    rows = base[:, None] + heads
    order = np.lexsort((segment, rows[:, 1], rows[:, 0]))
    jobs, segment, run, heads, rows = (each[order] for each in (jobs, segment, run, heads, rows))
    change = np.flatnonzero((np.diff(rows, axis=0, prepend=-1) != 0).any(1))
    sizes = np.diff(change, append=len(jobs))
    groups = np.stack((change, sizes, rows[change, 0], rows[change, 1]), 1).astype(np.int32)
    ends = int(code_starts[-1]), int(param_starts[-1])
    longest = int(jobs[:, 6].max(initial=0))
    return JobTable(jobs, segment, run, heads, groups, code_starts[:-1], param_starts[:-1], *ends, longest, paired)


def pieces(groups: NDArray[np.int32], tiles: int, programs: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Tiles in order, cut evenly among persistent programs: ``[n, 4]`` first and last tile and both rows of signs,
    and ``[programs + 1]``, the first piece of each. A piece lies within one group."""
    ends = (groups[:, 0].astype(np.int64) + groups[:, 1]) * tiles
    total = int(ends[-1])
    borders = np.arange(programs + 1) * total // programs
    cuts = np.unique(np.concatenate((borders, ends)))
    group = np.searchsorted(ends, cuts[:-1], side="right")
    table = np.stack((cuts[:-1], cuts[1:], groups[group, 2], groups[group, 3]), 1)
    return table.astype(np.int32), np.searchsorted(cuts, borders).astype(np.int32)


def place_of(at: Region) -> tuple[int, str, tuple[int, ...], tuple[int, ...]]:
    """What of a region its stages are bound to."""
    return at.group, at.plane, at.layers, at.heads


@lru_cache(maxsize=256)
def shell(values: int) -> Tensor:
    """So many codes without memory, for a part that is coded already."""
    return torch.empty(values, dtype=torch.uint8, device="meta")
