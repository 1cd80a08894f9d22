"""``hadamard`` and ``uniform`` as one kernel a batch, with ``bitpack`` in it for 16 levels, or inside ``mixhq``.

For keys and values of 64 or 128 channels in bf16, groups of a head and token or of a head and channel, bf16
parameters and at most 128 levels. ``derope`` before ``hadamard`` is folded in, in bf16, where levels are few enough
for that rounding to be lost in theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvserve_core.payload import PartMeta
from kvserve_core.spec import DType, KVSpec, Region
from kvserve_core.stages import Codec, Fused, Fusion, Quantizer, Transform
from kvserve_core.tensor import Encoded, Params, Part, Quantized
from kvserve_plugins.kernels.fused_jobs import JobTable, place_of, shell
from kvserve_plugins.kernels.fused_launch import (
    CELL,
    Pages,
    Placed,
    Plan,
    Tables,
    hadamard_for,
    kernel,
    made_plan,
    tile_rows,
)
from kvserve_plugins.kernels.launching import even, launch

if TYPE_CHECKING:
    from kvserve_plugins.quantizers.uniform import Uniform

DIMS = (64, 128)
MAX_LEVELS = 128
DEROPE_LEVELS = 32
"""Turned keys are rounded to bf16 before they are rotated: with 32 levels that moves 0.4 % of the codes by one."""
MAX_PLANS = 64
_NOTHING: Params = {}


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
        self._channel, self._derope = channel, derope
        self._spec, self._device, self._exact = spec, device, device.type != "cuda"
        self._places: dict[tuple[int, str, tuple[int, ...], tuple[int, ...]], Placed] = {}
        self._plans: dict[Any, Plan] = {}
        self._sizes: dict[int, Tensor] = {}
        self._tables = Tables(seed, device)

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
        row = self._tables.add(at, plane.dim)
        heads = len(at.layers), len(at.heads)
        self._places[place_of(at)] = Placed(row, heads, plane.dim, streams, part if self._derope else None)
        return True

    def takes(self, x: Tensor, at: Region) -> bool:
        """Contiguous, aligned, and a shape that the kernels have."""
        heads = x.shape[0] * x.shape[1]
        return self._fits(heads, at.num_tokens) and x.is_contiguous() and x.data_ptr() % 16 == 0

    def _fits(self, heads: int, tokens: int) -> bool:
        """By channel one cell at most. Two codes a byte are of rows r and r + half of all rows: an even number of them,
        and, as both are then turned by the same angles, of heads where positions count."""
        if not heads * tokens or (self._channel and tokens > CELL):
            return False
        return not self.with_codec or (heads if self._derope else heads * tokens) % 2 == 0

    def encode(self, batch: Sequence[tuple[Region, Tensor]]) -> Sequence[Fused]:
        """One launch for segments of one head size (mixed ones come in several)."""
        return self._by_kind(batch, self._encode)

    def encode_pages(self, regions: Sequence[Region], heads: Sequence[Sequence[int]], pages: Pages) -> Sequence[Fused]:
        """As :meth:`encode`, straight from an engine's blocks.

        heads: for each region the addresses of its heads in block 0, layer by layer; an even number of them for two
        codes a byte.
        """
        given = list(zip(regions, heads, strict=True))
        return self._by_kind(given, lambda batch, placed: self._encoded(batch, placed, pages))

    def decode_pages(
        self, batch: Sequence[tuple[Region, Sequence[Params], Sequence[Tensor]]], heads: Sequence[Sequence[int]],
        pages: Pages,
    ) -> Tensor:  # fmt: skip
        """As :meth:`decode`, straight into an engine's blocks. Where the bool is False, wrong values are left there."""
        placed = [self._places[place_of(at)] for at, *_ in batch]
        return self._decoded(batch, placed, heads, pages)

    def _encode(self, batch: Sequence[tuple[Region, Tensor]], placed: Sequence[Placed]) -> list[Fused]:
        return self._encoded([(at, x.data_ptr()) for at, x in batch], placed, None)

    def _encoded(
        self, batch: Sequence[tuple[Region, Any]], placed: Sequence[Placed], pages: Pages | None
    ) -> list[Fused]:
        rows = tile_rows("encode", self._channel)
        plan = self._plan([(p, at.num_tokens) for (at, _), p in zip(batch, placed, strict=True)], rows)
        table, device = plan.table, self._device
        codes = torch.empty(table.code_bytes, dtype=torch.uint8, device=device)
        grids = torch.empty((2, table.param_count), dtype=torch.bfloat16, device=device)
        ok = torch.ones(len(batch), dtype=torch.uint8, device=device)
        where, positions = [each for _, each in batch], [at.start for at, _ in batch]
        jobs = table.on(device, where, positions) if pages else plan.jobs(device, where, positions)
        self._launch("encode", plan, placed[0], jobs, codes, grids, ok, max(at.stop for at, _ in batch), pages)
        return self._cut([at for at, _ in batch], placed, plan, codes, grids, ok)

    def _cut(
        self, regions: Sequence[Region], placed: Sequence[Placed], plan: Plan, codes: Tensor, grids: Tensor, ok: Tensor
    ) -> list[Fused]:
        """Views of the batch's memory for each segment; few operations a stream, as there may be hundreds."""
        flags, made, run = ok.view(torch.bool).unbind(), [], 0
        for at, p, good in zip(regions, placed, flags, strict=True):
            parts, params, encoded = [], {}, []
            for s in p.streams:
                (code, param), run = plan.starts[run], run + 1
                shape = s.params(at.num_tokens, p.dim, self._channel)
                heads, strides = shape[0] * shape[1], (shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1)
                values = heads * at.num_tokens * p.dim
                params[s.prefix + "lo"] = grids.as_strided(shape, strides, param)
                params[s.prefix + "scale"] = grids.as_strided(shape, strides, plan.table.param_count + param)
                if self.with_codec:
                    data = codes.as_strided((values // 2,), (1,), code)
                    encoded.append(Encoded(data, self._size(values // 2)))
                    parts.append(Part(shell(values), s.levels, heads))
                else:
                    parts.append(Part(codes.as_strided((values,), (1,), code), s.levels, heads))
            stages = [*(_NOTHING for _ in range(1 + self._derope)), params]
            made.append(
                Fused(stages, Quantized(tuple(parts), params, (*p.heads, at.num_tokens, p.dim)), encoded or None, good)
            )
        return made

    def _size(self, nbytes: int) -> Tensor:
        """Bytes of a stream, on the device; made on the stream that uses it."""
        if nbytes not in self._sizes:
            self._sizes[nbytes] = torch.full((), nbytes, dtype=torch.int64, device=self._device)
        return self._sizes[nbytes]

    def reads(self, stages: Sequence[Params], parts: Sequence[PartMeta], at: Region) -> bool:
        """Whether parameters and streams are exactly what this chain makes at this place."""
        placed = self._places[place_of(at)]
        if len(stages) != 2 + self._derope or any(stages[:-1]) or len(parts) != len(placed.streams):
            return False
        if not self._fits(placed.heads[0] * placed.heads[1], at.num_tokens):
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
        shapes = [(*p.heads, at.num_tokens, p.dim) for (at, _, _), p in zip(batch, placed, strict=True)]
        out = [torch.empty(shape, dtype=torch.bfloat16, device=self._device) for shape in shapes]
        ok = self._decoded(batch, placed, [x.data_ptr() for x in out], None)
        return list(zip(out, ok.unbind(), strict=True))

    def _decoded(
        self, batch: Sequence[tuple[Region, Sequence[Params], Sequence[Tensor]]], placed: Sequence[Placed],
        where: Sequence[Any], pages: Pages | None,
    ) -> Tensor:  # fmt: skip
        rows = tile_rows("decode", self._channel)
        plan = self._plan([(p, at.num_tokens) for (at, _, _), p in zip(batch, placed, strict=True)], rows)
        grids = self._staged_grids(batch, placed, plan.table)
        streams = [x for _, _, data in batch for x in data]
        codes, moved = self._staged_codes(streams, plan.table) if self.with_codec else (streams[0], streams)
        ok = torch.ones(len(batch), dtype=torch.uint8, device=self._device)
        jobs = plan.table.on(self._device, where, [at.start for at, _, _ in batch], codes, moved)
        self._launch("decode", plan, placed[0], jobs, codes, grids, ok, max(at.stop for at, _, _ in batch), pages)
        return ok.view(torch.bool)

    def _staged_grids(self, batch: Sequence[Any], placed: Sequence[Placed], table: JobTable) -> Tensor:
        """Minima and scales of all segments in the order of the table, in one copy."""
        runs = [(stages[-1], s.prefix) for (_, stages, _), p in zip(batch, placed, strict=True) for s in p.streams]
        values = [params[prefix + name].reshape(-1) for name in ("lo", "scale") for params, prefix in runs]
        grids = self._staged((2, table.param_count), values[0])
        starts = table.param_starts.tolist()[: len(runs)]
        rooms = [row[start:] for row in grids.unbind() for start in starts]
        return self._filled(grids, rooms, values)

    def _staged_codes(self, streams: Sequence[Tensor], table: JobTable) -> tuple[Tensor, None]:
        codes = self._staged((table.code_bytes,), streams[0])
        return self._filled(codes, [codes[start:] for start in table.code_starts.tolist()], streams), None

    def _staged(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Zeros where ``like`` lies: what comes from the host goes to the device in one copy."""
        pinned = not self._exact and not like.is_cuda
        return torch.zeros(shape, dtype=like.dtype, device=like.device, pin_memory=pinned)

    def _filled(self, whole: Tensor, rooms: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        places = [room[: x.numel()] for room, x in zip(rooms, values, strict=True)]
        torch._foreach_copy_(places, list(values))
        return whole.to(self._device, non_blocking=True)

    def _launch(
        self, way: str, plan: Plan, placed: Placed, jobs: Tensor, codes: Tensor, grids: Tensor, ok: Tensor, end: int,
        pages: Pages | None = None,
    ) -> None:  # fmt: skip
        cos, sin = self._tables.angles(placed, end, way)
        given: dict[str, Any] = {
            "jobs": jobs, "pieces": plan.pieces, "programs": plan.programs, "codes": codes, "grids": grids,
            "plane": plan.table.param_count, "ok": ok, "table": pages.table if pages else plan.programs,
            "block_stride": pages.block_stride if pages else 0,
            "token_stride": pages.token_stride if pages else placed.dim, "page": pages.size if pages else 0,
            "cos": cos, "sin": sin, "norm": placed.dim**-0.5, "tiles": plan.tiles, "dim": placed.dim,
            "signs": self._tables.signs(placed.dim, way, self.with_codec),
            "matrix": hadamard_for(placed.dim // 2, way, self._channel, self._device),
            "rope": placed.part is not None, "ragged": plan.ragged, "exact": self._exact,
        }  # fmt: skip
        found, tuned = kernel(way, self.with_codec, self._channel, placed.part is not None)
        size = given["page"], given["block_stride"], given["token_stride"]
        kind = tuned["rows"], placed.dim, given["rope"], plan.kind, size, even(given["codes"], grids, given["table"])
        launch(found, plan.programs.numel() - 1, kind, given | tuned)

    def _plan(self, segments: Sequence[tuple[Placed, int]], rows: int) -> Plan:
        """Tables of a batch of these places and tokens, kept."""
        key = rows, tuple((p.signs, p.dim, tokens) for p, tokens in segments)
        if key not in self._plans:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            self._plans[key] = made_plan(segments, rows, self.with_codec, self._channel, self._device)
        return self._plans[key]

    def _by_kind(self, batch: Sequence[Any], run: Any) -> list[Any]:
        """``run`` for each kind of place, results in the order of the batch."""
        placed = [self._places[place_of(at)] for at, *_ in batch]
        kinds: dict[Any, list[int]] = {}
        for i, p in enumerate(placed):
            kinds.setdefault((p.dim, p.part), []).append(i)
        if len(kinds) == 1:
            return run(batch, placed)
        out: dict[int, Any] = {}
        for members in kinds.values():
            out.update(zip(members, run([batch[i] for i in members], [placed[i] for i in members]), strict=True))
        return [out[i] for i in range(len(batch))]
