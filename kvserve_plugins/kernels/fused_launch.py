"""Tables, matrices and launch parameters of the rotation kernels; what they do is in ``fused_rotation``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kvserve_core.spec import PlanePart, Region, RopeSpec
from kvserve_plugins.kernels import rope
from kvserve_plugins.kernels.fused_jobs import Extent, JobTable, Run, head_table, outwards, pair_table, pieces
from kvserve_plugins.kernels.hadamard import matrix
from kvserve_plugins.kernels.launching import Kept
from kvserve_plugins.kernels.signs import signs

ROWS, CELL = 64, 256
"""Rows of a tile; tokens that a tile holds where channels share a grid."""


@dataclass(frozen=True)
class Stream:
    """One stream of a segment: its parameters' prefix, layers and heads of the block, codes' levels."""

    prefix: str
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    levels: int

    def params(self, tokens: int, dim: int, channel: bool) -> tuple[int, int, int, int]:
        """Shape of ``lo`` and of ``scale``."""
        return len(self.rows), len(self.columns), 1 if channel else tokens, dim if channel else 1


@dataclass(frozen=True)
class Placed:
    """What is known of a place: first row of its signs, its heads, its streams, its rotary embedding."""

    signs: int
    heads: tuple[int, int]
    dim: int
    streams: tuple[Stream, ...]
    part: PlanePart | None


@dataclass(frozen=True)
class Pages:
    """An engine's paged cache of one request: block numbers by position, and strides in elements.

    size: tokens a block. A token of a head lies at the head's address, its block times ``block_stride`` and its place
    in the block times ``token_stride`` further; both are multiples of 8.
    """

    table: Tensor
    size: int
    block_stride: int
    token_stride: int


@dataclass(frozen=True)
class Plan:
    """A batch of these places and sizes: jobs, pieces for programs, and where a run's codes and parameters begin."""

    table: JobTable
    pieces: Tensor
    programs: Tensor
    tiles: int
    ragged: bool
    starts: list[tuple[int, int]]
    kept: Kept = field(default_factory=Kept)

    def jobs(self, device: torch.device, addresses: Sequence[int], positions: Sequence[int]) -> Tensor:
        """The table for tensors at these addresses, kept: the next batch is often where the last one was."""
        key = tuple(addresses), tuple(positions)
        return self.kept.get(key, lambda: self.table.on(device, addresses, positions))

    @property
    def kind(self) -> tuple[int, bool, int]:
        """What :func:`~kvserve_plugins.kernels.launching.launch` must know of it."""
        return self.tiles, self.ragged, self.table.param_count


def made_plan(
    segments: Sequence[tuple[Placed, int]], rows: int, packed: bool, channel: bool, device: torch.device
) -> Plan:
    """Places with their tokens, all of one head size, as tiles of ``rows``."""
    extents = [Extent(p.signs, p.heads[0] * p.heads[1], tokens) for p, tokens in segments]
    dim = segments[0][0].dim
    if packed:
        table, step = pair_table(extents, dim), rows // 2
    else:
        runs = [_run(i, s, p) for i, (p, _) in enumerate(segments) for s in p.streams]
        table, step = head_table(extents, runs, dim, channel), rows
    tiles = 1 << max(-(-table.tokens // step) - 1, 0).bit_length()
    cut, programs = pieces(table.groups, tiles, min(len(table.jobs) * tiles, resident(device, channel)))
    ragged = bool((table.jobs[:, 6] != tiles * step).any())
    starts = list(zip(table.code_starts.tolist(), table.param_starts.tolist(), strict=True))
    on = [torch.from_numpy(a).to(device) for a in (cut, programs)]
    return Plan(table, on[0], on[1], tiles, ragged, starts)


def _run(segment: int, s: Stream, p: Placed) -> Run:
    return Run(segment, tuple(r * p.heads[1] + c for r in s.rows for c in s.columns), s.levels)


def orders(half: int) -> tuple[Tensor, Tensor, Tensor]:
    """``store_order``, ``load_order`` and ``spread_order``: the channel at each place of a product of ``half`` columns.

    They make the channels that a thread of a tensor-core product holds neighbours in memory.
    """
    c = torch.arange(half)
    store = half // 4 * (c % 8 // 2) + 2 * (c // 8) + c % 2
    load = half // 4 * (c % 8 // 2) + 4 * (c // 16) + 2 * (c // 8 % 2) + c % 2
    spread = c // 32 * 32 + 8 * (c % 8 // 2) + 2 * (c // 8 % 4) + c % 2
    return store, load, spread


def sign_bits(rows: Tensor) -> Tensor:
    """``[n, dim]`` of +1 and -1 as ``[n, 4]`` i32, as ``triton_tile.signed`` reads them: j of the upper half from 8."""
    n, dim = rows.shape
    minus = (rows < 0).reshape(n, 2, dim // 16, 4, 2).to(torch.int64)
    j = torch.arange(dim // 16, device=rows.device) + torch.tensor([[0], [8]], device=rows.device)
    words = (minus[..., 0] << (15 - j)[..., None]) + (minus[..., 1] << (31 - j)[..., None])
    return words.sum((1, 2)).to(torch.int32).contiguous()  # the conversion wraps, as it should


@lru_cache(maxsize=32)
def hadamard_for(half: int, way: str, channel: bool, device: torch.device) -> Tensor:
    """The matrix of half a head in the order that a kernel wants."""
    store, load, spread = orders(half)
    h = matrix(half)
    turned = h[:, store] if way == "encode" else h[:, spread] if channel else h[load][:, spread]
    return turned.contiguous().to(device, torch.bfloat16)


@lru_cache(maxsize=8)
def resident(device: torch.device, channel: bool) -> int:
    """Programs that run at a time; a few in Triton's interpreter."""
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count * (1 if channel else 4)


def kernel(way: str, packed: bool, channel: bool, roped: bool) -> tuple[Any, dict[str, Any]]:
    """The kernel, and what was found to be fastest for it; see docs/performance.md."""
    from kvserve_plugins.kernels import triton_codes, triton_pack  # a CUDA build of torch brings Triton

    module = triton_pack if packed else triton_codes
    tuned: dict[str, Any] = {"rows": tile_rows(way, channel), "num_warps": 8 if channel else 4}
    if packed:
        tuned |= {"outward": outwards(16), "stages": 4} if way == "encode" else {"num_stages": 1}
    else:
        tuned |= {"channel": channel, "stages": 2 if channel and way == "decode" else 3}
    if not channel and not roped:
        tuned["maxnreg"] = 128
    return (module.encode_kernel if way == "encode" else module.decode_kernel), tuned


def tile_rows(way: str, channel: bool) -> int:
    """Rows of a tile."""
    return ROWS if not channel else CELL if way == "encode" else CELL // 2


class Tables:
    """Signs of all places and angles of all positions so far, on the device."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._device = seed, device
        self._signs: dict[int, tuple[Tensor, Tensor]] = {}
        self._bits: dict[int, tuple[Tensor, Tensor]] = {}
        self._angles: dict[tuple[PlanePart, bool], tuple[Tensor, Tensor]] = {}

    def add(self, at: Region, dim: int) -> int:
        """The first row of a place's signs, after adding them."""
        natural = torch.from_numpy(signs(self._seed, at.layers, at.heads, dim)).reshape(-1, dim)
        spread = natural.reshape(-1, 2, dim // 2)[:, :, orders(dim // 2)[2]].reshape(-1, dim)
        rows = [t.to(self._device, torch.bfloat16) for t in (natural, spread)]
        old = self._signs.get(dim)
        first = 0 if old is None else len(old[0])
        if old is not None:
            rows = [torch.cat(both) for both in zip(old, rows, strict=True)]
        self._signs[dim] = rows[0], rows[1]
        self._bits[dim] = sign_bits(rows[0]), sign_bits(rows[1])
        return first

    def signs(self, dim: int, way: str, bits: bool) -> Tensor:
        """``[rows, dim]`` in the order of channels that a kernel has, or its ``bits``, ``[rows, 4]``."""
        return (self._bits if bits else self._signs)[dim][0 if way == "encode" else 1]

    def angles(self, placed: Placed, end: int, way: str) -> tuple[Tensor, Tensor]:
        """Cosines and sines of all positions below ``end``, f32, in that order; any tensors without an embedding."""
        if placed.part is None or placed.part.rope is None:
            some = self._signs[placed.dim][0]
            return some, some
        key = (placed.part, way == "decode")
        if key not in self._angles or len(self._angles[key][0]) < end:
            self._angles[key] = self._made_angles(placed.part.rope, placed.dim, end, way == "decode")
        return self._angles[key]

    def _made_angles(self, turning: RopeSpec, dim: int, end: int, apply: bool) -> tuple[Tensor, Tensor]:
        cos, sin = rope.angles(turning, 0, 1 << max(end - 1, 1023).bit_length(), self._device)
        factor = turning.attn_factor if apply else 1 / turning.attn_factor
        order = orders(dim // 2)[2].to(self._device) if apply else slice(None)
        return (cos[:, order] * factor).contiguous(), (sin[:, order] * factor).contiguous()
