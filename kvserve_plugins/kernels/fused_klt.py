"""``klt`` and ``fixed_step`` as large matrix products, one for all segments of a batch that share a basis.

For bf16 planes whose first part may carry a rotary embedding and whose second, if any, is of the same width. Products
are of bf16 values and a basis in bf16, summed in f32: about 0.3 % of the codes are off by one. Energy outside the kept
components is counted on the way, so that drift escapes as it does stage by stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kvserve_core.payload import PartMeta
from kvserve_core.spec import DType, KVSpec, PlanePart, Region
from kvserve_core.stages import Fused, Fusion, Quantizer, Transform
from kvserve_core.tensor import Params, Part, Quantized
from kvserve_plugins.kernels import rope
from kvserve_plugins.kernels.basis import Basis
from kvserve_plugins.kernels.fused_jobs import place_of, starts
from kvserve_plugins.kernels.fused_rotation import available

if TYPE_CHECKING:
    from kvserve_plugins.quantizers.fixed_step import FixedStep

CELL = 256
M_BLOCK, N_BLOCK, K_BLOCK = 128, 256, 64
NARROW = 255


@dataclass(frozen=True)
class Product:
    """A basis as the kernels take it. ``to``: in units of the step; wide: columns of it, zeros past ``rank``."""

    index: int
    rank: int
    to: Tensor
    back: Tensor
    back_bias: Tensor
    mean: Tensor
    scale: Tensor
    drift: float


@dataclass(frozen=True)
class Placed:
    """Bases of a place in the order of its heads, and what lies where."""

    products: tuple[Product, ...]
    each: int
    dim: int
    part: PlanePart | None
    shape: tuple[int, int]

    @property
    def rank(self) -> int:
        """Components of all bases."""
        return sum(p.rank for p in self.products)


@dataclass(frozen=True)
class _Part:
    """Jobs of one basis."""

    start: int
    stop: int
    product: Product
    placed: Placed


@dataclass(frozen=True)
class _Jobs:
    """Jobs of a batch. segment: index in the batch of each. end: past the last position."""

    table: Tensor
    segment: Tensor
    drift: Tensor
    parts: list[_Part]
    ragged: bool
    end: int


def fusion(
    transforms: Sequence[Transform], quantizer: FixedStep, spec: KVSpec, device: torch.device
) -> Projection | None:
    """The kernels of this chain, if it is ``klt`` alone before a quantizer without dead zone and offset."""
    from kvserve_plugins.transforms.klt import KLT

    config = quantizer.config
    if len(transforms) != 1 or type(transforms[0]) is not KLT or not available(device):
        return None
    return Projection(config.step, spec, device) if config.dead_zone == config.offset == 0 else None


class Projection(Fusion):
    """The kernels of one chain on one device; see the module."""

    def __init__(self, step: float, spec: KVSpec, device: torch.device) -> None:
        self._step, self._spec, self._device, self._exact = step, spec, device, device.type != "cuda"
        self._places: dict[tuple[int, str, tuple[int, ...], tuple[int, ...]], Placed] = {}
        self._products: dict[int, tuple[Basis, Product]] = {}
        """By the basis' id, which is its own as long as it is kept here."""
        self._limit: float | None = None
        self._angles: dict[tuple[PlanePart, bool], tuple[Tensor, Tensor]] = {}

    def bind(self, at: Region, transforms: Sequence[Transform], quantizer: Quantizer) -> bool:
        """Take the bases over from the bound ``klt``."""
        klt: Any = transforms[0]
        plane = self._spec.group(at.group).plane(at.plane)
        part = plane.parts[0] if klt.config.undo_rope and rope.has_rope(plane.parts) else None
        if plane.dtype is not DType.BF16 or not _regular(plane.parts, part) or klt.each not in (1, len(at.heads)):
            return False
        if any(b.to.shape[0] % K_BLOCK for b in klt.bases):
            return False
        self._limit = klt.config.drift_limit
        products = tuple(self._product(b) for b in klt.bases)
        self._places[place_of(at)] = Placed(products, klt.each, plane.dim, part, (len(at.layers), len(at.heads)))
        return True

    def _product(self, basis: Basis) -> Product:
        if id(basis) not in self._products:
            self._products[id(basis)] = basis, _prepared(len(self._products), basis, self._step)
        return self._products[id(basis)][1]

    def takes(self, x: Tensor, at: Region) -> bool:
        """Contiguous, aligned, of one cell at most."""
        return 0 < at.num_tokens <= CELL and x.is_contiguous() and x.data_ptr() % 16 == 0

    def encode(self, batch: Sequence[tuple[Region, Tensor]]) -> Sequence[Fused]:
        """A product for each basis; what is per batch, once."""
        placed = [self._places[place_of(at)] for at, _ in batch]
        tokens = np.array([at.num_tokens for at, _ in batch], np.int64)
        begin = starts(np.array([p.rank for p in placed], np.int64) * tokens).tolist()
        codes = torch.empty(begin[-1], dtype=torch.uint8, device=self._device)
        where = [(at, x.data_ptr(), start) for (at, x), start in zip(batch, begin, strict=False)]
        jobs = self._jobs(where, placed)
        energy = torch.zeros((2, len(jobs.table)), device=self._device)
        ok = torch.ones(len(jobs.table), dtype=torch.uint8, device=self._device)
        for part in jobs.parts:
            self._project(part, jobs, codes, energy, ok)
        flags = self._judged(jobs, energy, ok, len(batch)).unbind()
        made = []
        for start, (at, _), p, good in zip(begin, batch, placed, flags, strict=False):
            part = Part(codes[start : start + p.rank * at.num_tokens], NARROW, p.rank)
            made.append(Fused([{}, {}], Quantized((part,), {}, (1, 1, at.num_tokens, p.rank)), None, good))
        return made

    def _project(self, part: _Part, jobs: _Jobs, codes: Tensor, energy: Tensor, ok: Tensor) -> None:
        """Codes of one basis; energies before and after, and whether codes fit into bytes."""
        from kvserve_plugins.kernels import triton_klt

        p, placed, count = part.product, part.placed, part.stop - part.start
        depth, wide = p.to.shape
        values = torch.empty((count * CELL, depth), dtype=torch.bfloat16, device=self._device)
        table, all_of = jobs.table[part.start : part.stop], energy[:, part.start : part.stop]
        turned = 0 if placed.part is None else placed.part.dim
        cos, sin = self._turning(placed, jobs.end, False)
        triton_klt.gather_kernel[(count, CELL // 8)](
            table, cos, sin, p.mean, p.scale, values, all_of[0], depth // placed.dim, _between(placed),
            turned=turned, rest=placed.dim - turned, rows=8, cell=CELL, exact=self._exact,
            num_warps=8,
        )  # fmt: skip
        n_block = N_BLOCK if wide % N_BLOCK == 0 else N_BLOCK // 2
        triton_klt.encode_kernel[(count * CELL // M_BLOCK * (wide // n_block),)](
            _tiles(values, M_BLOCK, K_BLOCK), _tiles(p.to, K_BLOCK, n_block), table, codes, all_of[1],
            ok[part.start : part.stop], depth, p.rank, wide, cell=CELL, m_block=M_BLOCK, n_block=n_block,
            k_block=K_BLOCK, near=8, ragged=jobs.ragged, stages=3, exact=self._exact, num_warps=8,
        )  # fmt: skip

    def _judged(self, jobs: _Jobs, energy: Tensor, ok: Tensor, segments: int) -> Tensor:
        """A bool a segment: all its codes fit, and all its bases saw what they were made for."""
        fine = ok.bool()
        if self._limit is not None:
            outside = (energy[0] - energy[1] * self._step**2).abs() / jobs.table[:, 2]
            fine &= outside <= jobs.drift * self._limit
        good = torch.ones(segments, dtype=torch.uint8, device=self._device)
        return good.scatter_reduce_(0, jobs.segment, fine.to(torch.uint8), "amin").bool()

    def reads(self, stages: Sequence[Params], parts: Sequence[PartMeta], at: Region) -> bool:
        """Whether it is one stream of bytes of this place's components."""
        if len(stages) != 2 or any(stages) or len(parts) != 1 or not 0 < at.num_tokens <= CELL:
            return False
        length = self._places[place_of(at)].rank * at.num_tokens
        return (parts[0].length, parts[0].width, parts[0].alphabet) == (length, 1, NARROW)

    def decode(
        self, batch: Sequence[tuple[Region, Sequence[Params], Sequence[Tensor]]]
    ) -> tuple[Sequence[Tensor], Tensor]:
        """A product for each basis."""
        placed = [self._places[place_of(at)] for at, _, _ in batch]
        base = batch[0][2][0]
        out = [
            torch.empty((*p.shape, at.num_tokens, p.dim), dtype=torch.bfloat16, device=self._device)
            for (at, _, _), p in zip(batch, placed, strict=True)
        ]
        where = [
            (at, x.data_ptr(), data[0].data_ptr() - base.data_ptr())
            for (at, _, data), x in zip(batch, out, strict=True)
        ]
        jobs = self._jobs(where, placed)
        for part in jobs.parts:
            self._restore(part, jobs, base)
        return out, torch.ones(len(batch), dtype=torch.bool, device=self._device)

    def _restore(self, part: _Part, jobs: _Jobs, codes: Tensor) -> None:
        from kvserve_plugins.kernels import triton_klt

        p, placed, count = part.product, part.placed, part.stop - part.start
        depth, wide = p.back.shape
        values = torch.empty((count * CELL, depth), dtype=torch.bfloat16, device=self._device)
        table = jobs.table[part.start : part.stop]
        triton_klt.turn_kernel[(count, depth // K_BLOCK, CELL // K_BLOCK)](
            table, codes, values, p.rank, depth, cell=CELL, block=K_BLOCK
        )
        turned = 0 if placed.part is None else placed.part.dim
        cos, sin = self._turning(placed, jobs.end, True)
        n_block = placed.dim if turned else next(n for n in (N_BLOCK, 128, 64) if wide % n == 0)
        triton_klt.decode_kernel[(count * CELL // M_BLOCK * (wide // n_block),)](
            _tiles(values, M_BLOCK, K_BLOCK), _tiles(p.back, K_BLOCK, n_block), p.back_bias, table, cos, sin,
            _between(placed), depth, wide, dim=placed.dim, cell=CELL, m_block=M_BLOCK, n_block=n_block,
            k_block=K_BLOCK, near=8, turned=turned, stages=3, exact=self._exact, num_warps=8,
        )  # fmt: skip

    def _jobs(self, where: Sequence[tuple[Region, int, int]], placed: Sequence[Placed]) -> _Jobs:
        """Rows of (address, first code, tokens, position), those of a basis one after the other."""
        found: dict[tuple[int, int, int], list[tuple[int, int, int, int, int]]] = {}
        about: dict[tuple[int, int, int], tuple[Product, Placed]] = {}
        for i, ((at, address, code), p) in enumerate(zip(where, placed, strict=True)):
            for k, product in enumerate(p.products):
                head = address + k * p.each * at.num_tokens * p.dim * 2
                key = (product.index, _between(p), p.dim)
                found.setdefault(key, []).append((head, code, at.num_tokens, at.start, i))
                about[key] = product, p
                code += product.rank * at.num_tokens
        ends = np.cumsum([len(rows) for rows in found.values()]).tolist()
        parts = [_Part(e - len(rows), e, *about[k]) for e, (k, rows) in zip(ends, found.items(), strict=True)]
        host = torch.tensor([row for rows in found.values() for row in rows], dtype=torch.int64)
        drift = torch.tensor([about[k][0].drift for k, rows in found.items() for _ in rows])
        whole = all(at.num_tokens == CELL for at, _, _ in where)
        on = [self._sent(t) for t in (host[:, :4].contiguous(), host[:, 4].contiguous(), drift)]
        return _Jobs(on[0], on[1], on[2], parts, not whole, max(at.stop for at, _, _ in where))

    def _sent(self, host: Tensor) -> Tensor:
        return host.to(self._device) if self._exact else host.pin_memory().to(self._device, non_blocking=True)

    def _turning(self, placed: Placed, end: int, apply: bool) -> tuple[Tensor, Tensor]:
        """Cosines and sines of all positions below ``end`` in f32."""
        if placed.part is None or placed.part.rope is None:
            some = placed.products[0].mean
            return some, some
        key = (placed.part, apply)
        if key not in self._angles or len(self._angles[key][0]) < end:
            cos, sin = rope.angles(placed.part.rope, 0, 1 << max(end - 1, 1023).bit_length(), self._device)
            factor = placed.part.rope.attn_factor if apply else 1 / placed.part.rope.attn_factor
            self._angles[key] = (cos * factor).contiguous(), (sin * factor).contiguous()
        return self._angles[key]


def _regular(parts: Sequence[PlanePart], turned: PlanePart | None) -> bool:
    """One part or two of one width, a power of two; only the first is turned, as a whole, in halves."""
    widths = {p.dim for p in parts}
    plain = all(p.rope is None for p in parts[1:]) or turned is None
    whole = turned is None or (
        turned.rope is not None and turned.rope.style == "neox" and turned.rope.rotary_dim == turned.dim
    )
    size = widths.pop()
    return not widths and len(parts) <= 2 and size >= 16 and size & (size - 1) == 0 and plain and whole


def _prepared(index: int, basis: Basis, step: float) -> Product:
    to, mean, scale = basis.to.float(), basis.mean.float(), basis.scale.float()
    n, rank = to.shape
    wide, depth = -(-rank // (N_BLOCK // 2)) * (N_BLOCK // 2), -(-rank // K_BLOCK) * K_BLOCK
    forth = torch.zeros((n, wide), device=to.device)
    forth[:, :rank] = scale[:, None] * to / step
    back = torch.zeros((depth, n), device=to.device)
    back[:rank] = to.T / scale * step
    return Product(index, rank, forth.to(torch.bfloat16), back.to(torch.bfloat16), mean, mean, scale, basis.drift)


def _between(placed: Placed) -> int:
    """Heads from one block of columns of a basis to the next."""
    return placed.shape[1] if placed.each == 1 else 1


def _tiles(x: Tensor, rows: int, columns: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(x, [rows, columns])
