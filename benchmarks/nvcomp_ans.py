"""The prototype that proves the Codec ABC: nvCOMP's batched rANS through its C API, without a host synchronisation.

A part becomes chunks of ``chunk_bytes``; one nvCOMP call codes the chunks of all parts; one Triton kernel packs each
part's chunks into one blob: u32 sizes of its chunks, zeros to 16 bytes, then the chunks, each 16-byte aligned.
Sizes, status codes and offsets stay on the device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_char, c_int, c_size_t, c_uint8, c_void_p
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
from nvcomp_ans_kernels import BLOCK, pack_kernel, unpack_kernel, verdict_kernel
from torch import Tensor

from kvserve_core.component import Capabilities, ComponentConfig, Tunable
from kvserve_core.errors import FrameError, UnsupportedSpecError
from kvserve_core.stages import Codec
from kvserve_core.tensor import Encoded, Part

if TYPE_CHECKING:
    from kvserve_core.artefacts import Artefacts
    from kvserve_core.spec import KVSpec, Region

ALIGN = 16
"""What nvCOMP's ANS asks of every chunk address, both ways."""
UCHAR = 1


class CompressOpts(ctypes.Structure):
    """``nvcompBatchedANSCompressOpts_t`` of nvCOMP 6: 64 bytes, zero means default."""

    _fields_ = (("type", c_int), ("data_type", c_int), ("tuning", c_uint8 * 3), ("reserved", c_char * 53))


class DecompressOpts(ctypes.Structure):
    """``nvcompBatchedANSDecompressOpts_t`` of nvCOMP 6."""

    _fields_ = (("backend", c_int), ("data_type", c_int), ("tuning", c_uint8 * 3), ("reserved", c_char * 53))


COMPRESS = CompressOpts(0, UCHAR)
DECOMPRESS = DecompressOpts(0, UCHAR)


@lru_cache
def library() -> ctypes.CDLL:
    """libnvcomp with the signatures used here; from the wheel ``nvidia-libnvcomp-cu13``."""
    from nvidia.libnvcomp.load import load_library

    lib = load_library()
    if lib is None:
        raise UnsupportedSpecError("libnvcomp.so.6 does not load; pip install 'kvserve[nvcomp-cu13]'")
    lib.nvcompBatchedANSCompressGetMaxOutputChunkSize.argtypes = [c_size_t, CompressOpts, POINTER(c_size_t)]
    lib.nvcompBatchedANSCompressGetTempSize.argtypes = [
        *(c_size_t, c_size_t, CompressOpts, POINTER(c_size_t), c_size_t, c_void_p),
    ]
    lib.nvcompBatchedANSDecompressGetTempSize.argtypes = [
        *(c_size_t, c_size_t, DecompressOpts, POINTER(c_size_t), c_size_t, c_void_p),
    ]
    pointer, size = c_void_p, c_size_t
    lib.nvcompBatchedANSCompressAsync.argtypes = [
        *(pointer, pointer, size, size, pointer, size, pointer, pointer, CompressOpts, pointer, pointer),
    ]
    lib.nvcompBatchedANSDecompressAsync.argtypes = [
        *(pointer, pointer, pointer, pointer, size, pointer, size, pointer, DecompressOpts, pointer, pointer),
    ]
    return lib


def check(status: int, what: str) -> None:
    """Raise what nvCOMP reports on the host side of a call: bad arguments, a failed launch."""
    if status:
        raise RuntimeError(f"nvCOMP {what} returned status {status}")


@lru_cache(maxsize=4096)
def chunk_bound(nbytes: int) -> int:
    """Most bytes nvCOMP writes for a chunk, rounded up to the alignment; about 1.4 times its input."""
    out = c_size_t()
    check(library().nvcompBatchedANSCompressGetMaxOutputChunkSize(nbytes, COMPRESS, out), "bound")
    return -(-out.value // ALIGN) * ALIGN


@dataclass(frozen=True)
class Layout:
    """Where the chunks of a batch lie. Arrays over chunks, except ``counts``, ``header`` and ``caps``, over parts."""

    counts: np.ndarray
    part: np.ndarray
    first: np.ndarray
    within: np.ndarray
    nbytes: np.ndarray
    bounds: np.ndarray

    @classmethod
    def of(cls, lengths: Sequence[int], chunk: int) -> Layout:
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
    def header(self) -> np.ndarray:
        """Bytes of each part's table of chunk sizes."""
        return -(-self.counts * 4 // ALIGN) * ALIGN

    @cached_property
    def caps(self) -> np.ndarray:
        """Most bytes of each part's blob."""
        return self.header + np.bincount(self.part, self.bounds, len(self.counts)).astype(np.int64)


class Plan:
    """What does not change between batches of the same lengths: the layout, also on the device, and scratch sizes."""

    def __init__(self, lengths: tuple[int, ...], chunk: int, device: torch.device) -> None:
        self.layout = at = Layout.of(lengths, chunk)
        self.chunks, self.largest = len(at.part), int(at.nbytes.max(initial=0))
        self.caps, self.lengths = at.caps.tolist(), lengths
        self.padded = [-(-n // ALIGN) * ALIGN for n in lengths]
        self.slots = np.cumsum(at.bounds) - at.bounds
        self.target = (np.cumsum(self.padded) - self.padded)[at.part] + at.within
        self.width = triton.next_power_of_2(max(int(at.header.max(initial=ALIGN)) // 4, 4))
        self.temp = {way: scratch(way, self.chunks, self.largest, sum(lengths)) for way in ("Compress", "Decompress")}
        blobs = (np.cumsum(at.caps) - at.caps)[at.part]
        rows = (at.nbytes, self.slots, at.bounds, at.first, at.counts[at.part], at.part, blobs, at.caps[at.part])
        self.table = to_device(device, *rows)


def to_device(device: torch.device, *rows: np.ndarray) -> Tensor:
    """Rows of i64 in one asynchronous copy from pinned memory (torch reuses pinned memory only after the copy)."""
    pinned = torch.empty((len(rows), len(rows[0])), dtype=torch.int64, pin_memory=device.type == "cuda")
    np.stack(rows, out=pinned.numpy())
    return pinned.to(device, non_blocking=True)


def scratch(way: str, chunks: int, largest: int, total: int) -> int:
    """Bytes of scratch that nvCOMP wants for one call."""
    need, opts = c_size_t(), COMPRESS if way == "Compress" else DECOMPRESS
    check(getattr(library(), f"nvcompBatchedANS{way}GetTempSize")(chunks, largest, opts, need, total, None), "scratch")
    return max(need.value, 1)


class NvcompANS(Codec):
    """nvCOMP's rANS on the GPU, one call for a batch of segments, sizes on the device."""

    class Config(ComponentConfig):
        """``batch_bytes``: codes of one batch, for which scratch is allocated once."""

        chunk_bytes: int = Tunable(2**16, choices=(2**16, 2**18, 2**20))
        batch_bytes: int = 2**28

    config: Config
    caps = Capabilities(
        exact=True, encode_on=frozenset({"cuda"}), decode_on=frozenset({"cuda"}), head_local=True, async_size=True
    )

    def bind(self, at: Region, spec: KVSpec, device: torch.device, artefacts: Artefacts) -> NvcompANS:
        """Load the library and allocate scratch for one batch; a larger batch grows it once."""
        bound = super().bind(at, spec, device, artefacts)
        chunks = -(-self.config.batch_bytes // self.config.chunk_bytes)
        bound.device, bound.plans = device, {}
        bound.slots = torch.empty(chunks * chunk_bound(self.config.chunk_bytes), dtype=torch.uint8, device=device)
        return bound

    def bound(self, part: Part) -> int:
        """Table of chunk sizes, plus nvCOMP's bound of each chunk."""
        return int(Layout.of([part.nbytes], self.config.chunk_bytes).caps[0])

    def encode(self, parts: Sequence[Part]) -> list[Encoded]:
        """Blobs are slices of one fresh buffer, so results of several launches stay valid until dropped."""
        plan = self._plan(parts)
        blobs = torch.empty(sum(plan.caps), dtype=torch.uint8, device=self.device)
        totals = torch.zeros(len(parts), dtype=torch.int64, device=self.device)
        if plan.chunks:
            source = np.array([p.codes.data_ptr() for p in parts], np.int64)[plan.layout.part] + plan.layout.within
            self._compress(plan, source, blobs, totals)
        return list(map(Encoded, blobs.split(plan.caps), totals.unbind()))

    def _compress(self, plan: Plan, source: np.ndarray, blobs: Tensor, totals: Tensor) -> None:
        need = int(plan.layout.bounds.sum())
        if need > self.slots.numel():
            self.slots = torch.empty(need, dtype=torch.uint8, device=self.device)
        call = to_device(self.device, source, plan.slots + self.slots.data_ptr())
        sizes, status, temp = self._scratch(plan, "Compress")
        args = (call[0].data_ptr(), plan.table.data_ptr(), plan.largest, plan.chunks, temp.data_ptr(), temp.numel())
        outs = (call[1].data_ptr(), sizes.data_ptr(), COMPRESS, status.data_ptr(), self._stream())
        check(library().nvcompBatchedANSCompressAsync(*args, *outs), "compress")
        grid = (plan.chunks, triton.cdiv(int(plan.layout.bounds.max()) // 8, BLOCK))
        words, heads = blobs.view(torch.int64), blobs.view(torch.int32)
        slots = self.slots.view(torch.int64)
        pack_kernel[grid](plan.table, slots, sizes, status, words, heads, totals, plan.chunks, plan.width, BLOCK)

    def decode(self, blobs: Sequence[Encoded], like: Sequence[Part]) -> list[Tensor]:
        """Codes again. What only the device can see is left in :attr:`ok`, 1 or 0 a blob, for after the fence."""
        plan = self._plan(like)
        limits = np.array([b.data.numel() for b in blobs], np.int64)
        if (limits < plan.layout.header).any():
            raise FrameError(f"a blob of {limits.min()} bytes is shorter than its own table of chunk sizes")
        out = torch.empty(sum(plan.padded), dtype=torch.uint8, device=self.device)
        self.ok = torch.ones(len(blobs), dtype=torch.int8, device=self.device)
        if plan.chunks:
            source = np.array([b.data.data_ptr() for b in blobs], np.int64)
            self._decompress(plan, source[plan.layout.part], limits[plan.layout.part], out)
        pieces = zip(out.split(plan.padded), plan.lengths, plan.padded, strict=True)
        codes = [piece if n == room else piece[:n] for piece, n, room in pieces]
        return [c if p.codes.dtype is torch.uint8 else c.view(p.codes.dtype) for c, p in zip(codes, like, strict=True)]

    def _decompress(self, plan: Plan, source: np.ndarray, limits: np.ndarray, out: Tensor) -> None:
        call = to_device(self.device, source, limits, plan.target + out.data_ptr(), limits, limits)
        unpack_kernel[(plan.chunks,)](plan.table, call, plan.chunks, plan.width)
        actual, status, temp = self._scratch(plan, "Decompress")
        args = (call[3].data_ptr(), call[4].data_ptr(), plan.table.data_ptr(), actual.data_ptr(), plan.chunks)
        outs = (temp.data_ptr(), temp.numel(), call[2].data_ptr(), DECOMPRESS, status.data_ptr(), self._stream())
        check(library().nvcompBatchedANSDecompressAsync(*args, *outs), "decompress")
        grid = (triton.cdiv(plan.chunks, BLOCK),)
        verdict_kernel[grid](plan.table, actual, status, self.ok, plan.chunks, BLOCK)

    def _plan(self, parts: Sequence[Part]) -> Plan:
        lengths = tuple([p.nbytes for p in parts])
        if lengths not in self.plans:
            self.plans[lengths] = Plan(lengths, self.config.chunk_bytes, self.device)
        return self.plans[lengths]

    def _scratch(self, plan: Plan, way: str) -> tuple[Tensor, Tensor, Tensor]:
        counts = torch.empty(plan.chunks, dtype=torch.int64, device=self.device)
        status = torch.empty(plan.chunks, dtype=torch.int32, device=self.device)
        return counts, status, torch.empty(plan.temp[way], dtype=torch.uint8, device=self.device)

    def _stream(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream
