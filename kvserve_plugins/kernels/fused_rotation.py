"""``hadamard`` and ``uniform`` as one kernel a batch, with ``bitpack`` in it for 16 levels, or inside ``mixhq``.

For keys and values of 64 or 128 channels in bf16, groups of a head and token or of a head and channel, bf16
parameters and at most 128 levels. ``derope`` before ``hadamard`` is folded in, in bf16, where levels are few enough
for that rounding to be lost in theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kvserve_core.payload import PartMeta
from kvserve_core.spec import DType, KVSpec, PlanePart, Region
from kvserve_core.stages import Codec, Fused, Fusion, Quantizer, Transform
from kvserve_core.tensor import Encoded, Params, Part, Quantized
from kvserve_plugins.kernels import rope
from kvserve_plugins.kernels.fused_jobs import Extent, JobTable, Run, head_table, outwards, pair_table, pieces
from kvserve_plugins.kernels.hadamard import matrix
from kvserve_plugins.kernels.signs import signs

if TYPE_CHECKING:
    from kvserve_plugins.quantizers.uniform import Uniform

DIMS = (64, 128)
ROWS, CELL = 64, 256
"""Rows of a tile; tokens that a tile holds where channels share a grid."""
MAX_LEVELS = 128
DEROPE_LEVELS = 32
"""Turned keys are rounded to bf16 before they are rotated: with 32 levels that moves 0.4 % of the codes by one."""
MAX_PLANS = 64
_NOTHING: Params = {}


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
class _Plan:
    table: JobTable
    pieces: Tensor
    programs: Tensor
    tiles: int
    ragged: bool
    code_cuts: list[int]
    grid_cuts: list[int]


def orders(half: int) -> tuple[Tensor, Tensor, Tensor]:
    """``store_order``, ``load_order`` and ``spread_order``: the channel at each place of a product of ``half`` columns.

    They make the channels that a thread of a tensor-core product holds neighbours in memory.
    """
    c = torch.arange(half)
    store = half // 4 * (c % 8 // 2) + 2 * (c // 8) + c % 2
    load = half // 4 * (c % 8 // 2) + 4 * (c // 16) + 2 * (c // 8 % 2) + c % 2
    spread = c // 32 * 32 + 8 * (c % 8 // 2) + 2 * (c // 8 % 4) + c % 2 if half == 64 else c
    return store, load, spread


def available(device: torch.device) -> bool:
    """Whether the kernels run there."""
    return device.type == "cuda" and find_spec("triton") is not None


def fusion(
    transforms: Sequence[Transform], codec: Codec, grid: Uniform, alone: bool, spec: KVSpec, device: torch.device
) -> Rotation | None:
    """The kernels of this chain, if it is one of those above. ``alone``: ``grid`` is the quantizer, not inside one."""
    from kvserve_plugins.codecs.bitpack import Bitpack
    from kvserve_plugins.transforms.derope import Derope
    from kvserve_plugins.transforms.hadamard import Hadamard

    kinds = tuple(type(t) for t in transforms)
    config = grid.config
    if kinds not in ((Hadamard,), (Derope, Hadamard)) or not available(device):
        return None
    derope = len(kinds) == 2
    if config.axis not in ("token_head", "channel") or config.param_dtype != "bf16":
        return None
    if config.levels > (DEROPE_LEVELS if derope else MAX_LEVELS):
        return None
    rotation = transforms[-1]
    packed = alone and isinstance(codec, Bitpack) and config.levels == 16 and config.axis == "token_head"
    return Rotation(rotation.config.seed, config.axis == "channel", packed, derope, spec, device)  # type: ignore[attr-defined]  # a Hadamard


class Rotation(Fusion):
    """The kernels of one chain on one device; see the module. ``exact`` is for Triton's interpreter."""

    def __init__(
        self, seed: int, channel: bool, packed: bool, derope: bool, spec: KVSpec, device: torch.device
    ) -> None:
        self.with_codec = packed
        self._seed, self._channel, self._derope = seed, channel, derope
        self._spec, self._device, self._exact = spec, device, device.type != "cuda"
        self._places: dict[tuple[int, str, tuple[int, ...], tuple[int, ...]], Placed] = {}
        self._signs: dict[int, tuple[Tensor, Tensor]] = {}
        self._plans: dict[Any, _Plan] = {}
        self._angles: dict[tuple[PlanePart, bool], tuple[Tensor, Tensor]] = {}

    def bind(self, at: Region, transforms: Sequence[Transform], quantizer: Quantizer) -> bool:
        """Add the signs of a place to the table on the device."""
        plane = self._spec.group(at.group).plane(at.plane)
        part = plane.parts[0] if len(plane.parts) == 1 else None
        if plane.dtype is not DType.BF16 or plane.dim not in DIMS or part is None:
            return False
        if self._derope and (part.rope is None or part.rope.style != "neox" or part.rope.rotary_dim != plane.dim):
            return False
        streams = quantizer.streams(at)  # type: ignore[attr-defined]  # of Uniform and MixHQ, which make this fusion
        if not all(2 <= s.levels <= MAX_LEVELS for s in streams):
            return False
        row = self._add_signs(at, plane.dim)
        heads = len(at.layers), len(at.heads)
        self._places[_key(at)] = Placed(row, heads, plane.dim, streams, part if self._derope else None)
        return True

    def takes(self, x: Tensor, at: Region) -> bool:
        """Contiguous, aligned, and for two codes a byte an even number of rows."""
        rows = x.shape[0] * x.shape[1] * x.shape[2]
        fits = at.num_tokens <= CELL if self._channel else True
        if self.with_codec:  # halves of a head at other positions than their partners' need even heads
            fits = rows % 2 == 0 and (not self._derope or x.shape[0] * x.shape[1] % 2 == 0)
        return fits and rows > 0 and x.is_contiguous() and x.data_ptr() % 16 == 0

    def encode(self, batch: Sequence[tuple[Region, Tensor]]) -> Sequence[Fused]:
        """One launch for segments of one head size (mixed ones come in several)."""
        return self._by_kind(batch, self._encode)

    def _encode(self, batch: Sequence[tuple[Region, Tensor]], placed: Sequence[Placed]) -> list[Fused]:
        plan = self._plan([(p, at.num_tokens) for (at, _), p in zip(batch, placed, strict=True)], self._rows("encode"))
        table, device = plan.table, self._device
        codes = torch.empty(table.code_bytes, dtype=torch.uint8, device=device)
        grids = torch.empty((2, table.param_count), dtype=torch.bfloat16, device=device)
        ok = torch.ones(len(batch), dtype=torch.uint8, device=device)
        jobs = table.on(device, [x.data_ptr() for _, x in batch], [at.start for at, _ in batch])
        self._launch("encode", plan, placed[0], jobs, codes, grids, ok, max(at.stop for at, _ in batch))
        return self._cut(batch, placed, plan, codes, grids, ok)

    def _cut(
        self, batch: Sequence[tuple[Region, Tensor]], placed: Sequence[Placed], plan: _Plan, codes: Tensor,
        grids: Tensor, ok: Tensor,
    ) -> list[Fused]:  # fmt: skip
        """Views of the batch's memory for each segment; few operations a stream, as there may be hundreds."""
        pieces = iter(codes.split_with_sizes(plan.code_cuts))
        lows, scales = (iter(row.split_with_sizes(plan.grid_cuts)) for row in grids.unbind())
        flags, made = ok.bool().unbind(), []
        for (at, x), p, good in zip(batch, placed, flags, strict=True):
            parts, params, encoded = [], {}, []
            for s in p.streams:
                shape = s.params(at.num_tokens, p.dim, self._channel)
                heads = shape[0] * shape[1]
                values, count = heads * at.num_tokens * p.dim, heads * shape[2] * shape[3]
                params[s.prefix + "lo"] = next(lows)[:count].view(shape)
                params[s.prefix + "scale"] = next(scales)[:count].view(shape)
                if self.with_codec:
                    encoded.append(Encoded(next(pieces)[: values // 2], _size(values // 2, self._device)))
                    parts.append(Part(_shell(values), s.levels, heads))
                else:
                    parts.append(Part(next(pieces)[:values], s.levels, heads))
            stages = [*(_NOTHING for _ in range(1 + self._derope)), params]
            shape = (x.shape[0], x.shape[1], x.shape[2], x.shape[3])
            made.append(Fused(stages, Quantized(tuple(parts), params, shape), encoded or None, good))
        return made

    def reads(self, stages: Sequence[Params], parts: Sequence[PartMeta], at: Region) -> bool:
        """Whether parameters and streams are exactly what this chain makes at this place."""
        placed = self._places[_key(at)]
        if len(stages) != 2 + self._derope or any(stages[:-1]) or len(parts) != len(placed.streams):
            return False
        if (self._channel and at.num_tokens > CELL) or at.num_tokens == 0:
            return False
        names = set()
        for s, part in zip(placed.streams, parts, strict=True):
            shape = s.params(at.num_tokens, placed.dim, self._channel)
            values = shape[0] * shape[1] * at.num_tokens * placed.dim
            coded = part.coded and part.nbytes == values // 2 and values % (2 * placed.dim) == 0
            if (part.length, part.width, part.alphabet) != (values, 1, s.levels) or (self.with_codec and not coded):
                return False
            names |= {s.prefix + "lo", s.prefix + "scale"}
            for name in ("lo", "scale"):
                x = stages[-1].get(s.prefix + name)
                if x is None or x.shape != shape or x.dtype is not torch.bfloat16:
                    return False
        return names == set(stages[-1])

    def decode(
        self, batch: Sequence[tuple[Region, Sequence[Params], Sequence[Tensor]]]
    ) -> tuple[Sequence[Tensor], Tensor]:
        """One launch for segments of one head size."""
        done = self._by_kind(batch, self._decode)
        return [x for x, _ in done], torch.stack([ok for _, ok in done])

    def _decode(
        self, batch: Sequence[tuple[Region, Sequence[Params], Sequence[Tensor]]], placed: Sequence[Placed]
    ) -> list[tuple[Tensor, Tensor]]:
        plan = self._plan(
            [(p, at.num_tokens) for (at, _, _), p in zip(batch, placed, strict=True)], self._rows("decode")
        )
        table, device = plan.table, self._device
        grids = self._staged_grids(batch, placed, table)
        streams = [x for _, _, data in batch for x in data]
        codes, moved = self._staged_codes(streams, table) if self.with_codec else (streams[0], streams)
        shapes = [(*p.heads, at.num_tokens, p.dim) for (at, _, _), p in zip(batch, placed, strict=True)]
        out = [torch.empty(shape, dtype=torch.bfloat16, device=device) for shape in shapes]
        ok = torch.ones(len(batch), dtype=torch.uint8, device=device)
        jobs = table.on(device, [x.data_ptr() for x in out], [at.start for at, _, _ in batch], codes, moved)
        self._launch("decode", plan, placed[0], jobs, codes, grids, ok, max(at.stop for at, _, _ in batch))
        return list(zip(out, ok.bool().unbind(), strict=True))

    def _staged_grids(self, batch: Sequence[Any], placed: Sequence[Placed], table: JobTable) -> Tensor:
        """Minima and scales of all segments in the order of the table, in one copy."""
        host = torch.zeros((2, table.param_count), dtype=torch.bfloat16, pin_memory=not self._exact)
        run = 0
        for (_, stages, _), p in zip(batch, placed, strict=True):
            for s in p.streams:
                first = int(table.param_starts[run])
                for row, name in zip(host, ("lo", "scale"), strict=True):
                    values = stages[-1][s.prefix + name].reshape(-1)
                    row[first : first + values.numel()].copy_(values)
                run += 1
        return host.to(self._device, non_blocking=True)

    def _staged_codes(self, streams: Sequence[Tensor], table: JobTable) -> tuple[Tensor, None]:
        host = torch.zeros(table.code_bytes, dtype=torch.uint8, pin_memory=not self._exact)
        for start, x in zip(table.code_starts.tolist(), streams, strict=True):
            host[start : start + x.numel()].copy_(x)
        return host.to(self._device, non_blocking=True), None

    def _launch(
        self, way: str, plan: _Plan, placed: Placed, jobs: Tensor, codes: Tensor, grids: Tensor, ok: Tensor, end: int
    ) -> None:
        half = placed.dim // 2
        natural, spread = self._signs[placed.dim]
        cos, sin = self._turning(placed, end, way == "decode")
        given: dict[str, Any] = {
            "jobs": jobs, "pieces": plan.pieces, "programs": plan.programs, "codes": codes, "grids": grids,
            "plane": plan.table.param_count, "ok": ok, "table": plan.programs, "block_stride": 0,
            "token_stride": placed.dim, "cos": cos, "sin": sin, "norm": placed.dim**-0.5, "tiles": plan.tiles,
            "signs": natural if way == "encode" else spread,
            "matrix": _matrix(half, way, self._channel, self._device), "dim": placed.dim, "page": 0,
            "rope": placed.part is not None, "ragged": plan.ragged, "exact": self._exact,
        }  # fmt: skip
        kernel, tuned = self._kernel(way, placed)
        kernel[(plan.programs.numel() - 1,)](**given, **tuned)

    def _rows(self, way: str) -> int:
        """Rows of a tile."""
        return ROWS if not self._channel else CELL if way == "encode" else CELL // 2

    def _kernel(self, way: str, placed: Placed) -> tuple[Any, dict[str, Any]]:
        """The kernel, and what was found to be fastest for it; see docs/performance.md."""
        from kvserve_plugins.kernels import triton_codes, triton_pack  # a CUDA build of torch brings Triton

        module = triton_pack if self.with_codec else triton_codes
        kernel = module.encode_kernel if way == "encode" else module.decode_kernel
        tuned: dict[str, Any] = {"rows": self._rows(way), "num_warps": 4}
        if self.with_codec:
            tuned |= {"outward": outwards(16), "stages": 4} if way == "encode" else {"ahead": 1}
        else:
            tuned |= {"channel": self._channel, "stages": 3}
        if self._channel:
            tuned |= {"num_warps": 8, "stages": 3 if way == "encode" else 2}
        elif placed.part is None:
            tuned["maxnreg"] = 128
        return kernel, tuned

    def _plan(self, segments: Sequence[tuple[Placed, int]], rows: int) -> _Plan:
        """Tables of a batch of these places and tokens, kept."""
        key = rows, tuple((p.signs, p.dim, tokens) for p, tokens in segments)
        if key not in self._plans:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            self._plans[key] = self._made_plan(segments, rows)
        return self._plans[key]

    def _made_plan(self, segments: Sequence[tuple[Placed, int]], rows: int) -> _Plan:
        extents = [Extent(p.signs, p.heads[0] * p.heads[1], tokens) for p, tokens in segments]
        dim = segments[0][0].dim
        if self.with_codec:
            table, step = pair_table(extents, dim), rows // 2
        else:
            runs = [_run(i, s, p) for i, (p, _) in enumerate(segments) for s in p.streams]
            table, step = head_table(extents, runs, dim, self._channel), rows
        tiles = 1 << max(-(-table.tokens // step) - 1, 0).bit_length()
        most = 3 if self._exact else _resident(self._device, self._channel)
        cut, programs = pieces(table.groups, tiles, min(len(table.jobs) * tiles, most))
        ragged = bool((table.jobs[:, 6] != tiles * step).any())
        ends = np.append(table.code_starts, table.code_bytes), np.append(table.param_starts, table.param_count)
        on = [torch.from_numpy(a).to(self._device) for a in (cut, programs)]
        return _Plan(table, on[0], on[1], tiles, ragged, np.diff(ends[0]).tolist(), np.diff(ends[1]).tolist())

    def _by_kind(self, batch: Sequence[Any], run: Any) -> list[Any]:
        """``run`` for each kind of place, results in the order of the batch."""
        placed = [self._places[_key(at)] for at, *_ in batch]
        kinds: dict[Any, list[int]] = {}
        for i, p in enumerate(placed):
            kinds.setdefault((p.dim, p.part), []).append(i)
        if len(kinds) == 1:
            return run(batch, placed)
        out: dict[int, Any] = {}
        for members in kinds.values():
            out.update(zip(members, run([batch[i] for i in members], [placed[i] for i in members]), strict=True))
        return [out[i] for i in range(len(batch))]

    def _add_signs(self, at: Region, dim: int) -> int:
        natural = torch.from_numpy(signs(self._seed, at.layers, at.heads, dim)).reshape(-1, dim)
        spread = natural.reshape(-1, 2, dim // 2)[:, :, orders(dim // 2)[2]].reshape(-1, dim)
        new = [t.to(self._device, torch.bfloat16) for t in (natural, spread)]
        old = self._signs.get(dim)
        self._signs[dim] = (
            (new[0], new[1]) if old is None else (torch.cat((old[0], new[0])), torch.cat((old[1], new[1])))
        )
        return 0 if old is None else len(old[0])

    def _turning(self, placed: Placed, end: int, apply: bool) -> tuple[Tensor, Tensor]:
        """Cosines and sines of all positions below ``end``, f32, in the order of channels that the kernel has."""
        if placed.part is None or placed.part.rope is None:
            some = self._signs[placed.dim][0]
            return some, some
        key = (placed.part, apply)
        if key not in self._angles or len(self._angles[key][0]) < end:
            length = 1 << max(end - 1, 1023).bit_length()
            cos, sin = rope.angles(placed.part.rope, 0, length, self._device)
            factor = placed.part.rope.attn_factor if apply else 1 / placed.part.rope.attn_factor
            order = orders(placed.dim // 2)[2].to(self._device) if apply else slice(None)
            self._angles[key] = (cos[:, order] * factor).contiguous(), (sin[:, order] * factor).contiguous()
        return self._angles[key]


def _key(at: Region) -> tuple[int, str, tuple[int, ...], tuple[int, ...]]:
    return at.group, at.plane, at.layers, at.heads


def _run(segment: int, s: Stream, p: Placed) -> Run:
    return Run(segment, tuple(r * p.heads[1] + c for r in s.rows for c in s.columns), s.levels)


@lru_cache(maxsize=256)
def _shell(values: int) -> Tensor:
    return torch.empty(values, dtype=torch.uint8, device="meta")


@lru_cache(maxsize=256)
def _size(nbytes: int, device: torch.device) -> Tensor:
    return torch.full((), nbytes, dtype=torch.int64, device=device)


@lru_cache(maxsize=32)
def _matrix(half: int, way: str, channel: bool, device: torch.device) -> Tensor:
    store, load, spread = orders(half)
    h = matrix(half)
    turned = h[:, store] if way == "encode" else h[:, spread] if channel else h[load][:, spread]
    return turned.contiguous().to(device, torch.bfloat16)


@lru_cache(maxsize=8)
def _resident(device: torch.device, channel: bool) -> int:
    """Programs that run at a time."""
    return torch.cuda.get_device_properties(device).multi_processor_count * (2 if channel else 4)
