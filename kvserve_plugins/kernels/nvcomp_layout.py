"""How the parts of a batch are cut into chunks for nvCOMP, and where the chunks lie in each part's blob.

A blob is the u32 sizes of its chunks, zeros to 16 bytes, then the chunks, each 16-byte aligned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvserve_plugins.kernels.launching import Kept
from kvserve_plugins.kernels.nvcomp_api import ALIGN, NvcompCalls

I64 = NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """Where the chunks of a batch lie. Arrays over chunks, except ``counts``, ``header`` and ``caps``, over parts."""

    counts: I64
    part: I64
    first: I64
    within: I64
    nbytes: I64
    bounds: I64

    @classmethod
    def of(cls, lengths: Sequence[int], chunk: int, chunk_bound: Callable[[int], int]) -> Layout:
        """Cut streams of ``lengths`` bytes into chunks of at most ``chunk``."""
        total = np.asarray(lengths, np.int64)
        counts = -(-total // chunk)
        part = np.repeat(np.arange(len(total)), counts)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        within = (np.arange(len(part)) - first) * chunk
        nbytes = np.minimum(chunk, total[part] - within)
        sizes, inverse = np.unique(nbytes, return_inverse=True)
        bounds = np.array([chunk_bound(int(n)) for n in sizes], np.int64)[inverse]
        return cls(counts, part, first, within, nbytes, bounds)

    @cached_property
    def header(self) -> I64:
        """Bytes of each part's table of chunk sizes."""
        return -(-self.counts * 4 // ALIGN) * ALIGN

    @cached_property
    def caps(self) -> I64:
        """Most bytes of each part's blob."""
        return self.header + np.bincount(self.part, self.bounds, len(self.counts)).astype(np.int64)


class Plan:
    """What does not change between batches of the same lengths: the layout, also on the device, and scratch sizes."""

    def __init__(self, lengths: tuple[int, ...], chunk: int, device: torch.device, calls: NvcompCalls) -> None:
        self.layout = at = Layout.of(lengths, chunk, calls.chunk_bound)
        self.chunks, self.largest = len(at.part), int(at.nbytes.max(initial=0))
        self.caps, self.lengths = at.caps.tolist(), lengths
        self.padded = [-(-n // ALIGN) * ALIGN for n in lengths]
        self.slots = np.cumsum(at.bounds) - at.bounds
        self.target = (np.cumsum(self.padded) - self.padded)[at.part] + at.within
        self.room, self.kept = int(at.bounds.sum()), Kept()
        self.width = 1 << max(int(at.header.max(initial=ALIGN)) // 4 - 1, 3).bit_length()
        self.temp = {
            "Compress": calls.scratch("Compress", self.chunks, self.largest, sum(lengths)) if self.chunks else 1,
            "Decompress": calls.scratch("Decompress", self.chunks, self.largest, sum(lengths)) if self.chunks else 1,
        }
        blobs = (np.cumsum(at.caps) - at.caps)[at.part]
        rows = (at.nbytes, self.slots, at.bounds, at.first, at.counts[at.part], at.part, blobs, at.caps[at.part])
        self.table = to_device(device, *rows)
        self.kind = self.chunks, self.width


def to_device(device: torch.device, *rows: I64) -> Tensor:
    """Rows of i64 in one asynchronous copy from pinned memory (torch reuses pinned memory only after the copy)."""
    pinned = torch.empty((len(rows), len(rows[0])), dtype=torch.int64, pin_memory=device.type == "cuda")
    np.stack(rows, out=pinned.numpy())
    return pinned.to(device, non_blocking=True)


def aligned(x: Tensor) -> Tensor:
    """``x``, or a copy where its memory does not begin at a multiple of 16 bytes."""
    return x.clone() if x.data_ptr() % ALIGN else x
