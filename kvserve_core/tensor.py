"""The values that pass between stages, and the map between kvserve's dtype names and torch's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from kvserve_core.errors import UnsupportedSpecError
from kvserve_core.spec import DType

Params: TypeAlias = Mapping[str, Tensor]
"""Small side tensors (scales, anchors); u8, i16, i32, bf16 or f32. They are digested and counted in the ratio."""

Shape: TypeAlias = tuple[int, int, int, int]
"""``(L, H, T, D)``."""

TORCH: dict[DType, torch.dtype] = {
    DType.BF16: torch.bfloat16,
    DType.F16: torch.float16,
    DType.F32: torch.float32,
    DType.U8: torch.uint8,
    DType.I16: torch.int16,
    DType.I32: torch.int32,
}
_NAMES = {v: k for k, v in TORCH.items()}


def dtype_of(x: Tensor) -> DType:
    """kvserve's name for a tensor's dtype.

    Raises:
        UnsupportedSpecError: the dtype is not in the closed set.
    """
    name = _NAMES.get(x.dtype)
    if name is None:
        raise UnsupportedSpecError(f"dtype {x.dtype} cannot be transferred; view it as uint8 (an opaque plane)")
    return name


@dataclass(frozen=True)
class Part:
    """One stream for a codec. Parts of one segment may differ in alphabet.

    codes: 1-D contiguous u8 or i16, values ``0 .. alphabet - 1``.
    rows: equal-length runs with statistics of their own (head-major or component-major).
    table: ``"<artefact blake3>/<name>"`` of a static integer table, None for the codec's own.
    """

    codes: Tensor
    alphabet: int
    rows: int = 1
    table: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the codes as they stand."""
        return self.codes.numel() * self.codes.element_size()


@dataclass(frozen=True)
class Quantized:
    """What a quantizer gives: streams of codes, side tensors, and the shape it quantized (``[L, H, T, D]``)."""

    parts: tuple[Part, ...]
    params: Params = field(default_factory=dict)
    shape: Shape = (0, 0, 0, 0)


@dataclass(frozen=True)
class Encoded:
    """A codec's output: u8 with capacity >= nbytes; ``nbytes`` is a 0-d i64, read after the fence.

    From ``encode`` it lies on data's device; for ``decode`` data is exactly the blob and nbytes repeats its length.
    """

    data: Tensor
    nbytes: Tensor


def on_host(pieces: Sequence[Tensor]) -> list[Tensor]:
    """The same tensors in host memory. Those on a GPU come together in one copy from pinned memory, with one wait."""
    if not any(p.is_cuda for p in pieces):
        return [p.contiguous() for p in pieces]
    flat = [p.contiguous().reshape(-1).view(torch.uint8) for p in pieces]
    starts = [0]
    for p in flat:
        starts.append(starts[-1] + -(-p.numel() // 16) * 16)
    device = next(p.device for p in pieces if p.is_cuda)
    staged = _in_place(flat, starts)
    if staged is None:
        staged = torch.empty(starts[-1], dtype=torch.uint8, device=device)
        rooms = [staged[at : at + p.numel()] for at, p in zip(starts, flat, strict=False)]
        torch._foreach_copy_(rooms, flat)
    host = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
    host.copy_(staged, non_blocking=True)
    torch.cuda.current_stream(device).synchronize()
    cut = (host[at : at + p.numel()] for at, p in zip(starts, flat, strict=False))
    return [c.view(p.dtype).reshape(p.shape) for c, p in zip(cut, pieces, strict=True)]


def _in_place(flat: Sequence[Tensor], starts: Sequence[int]) -> Tensor | None:
    """These slices as one, where they are the whole of one buffer already, each at its place in ``starts``."""
    whole = flat[0]._base
    if whole is None or whole.numel() != starts[-1] or whole.dtype != torch.uint8 or not whole.is_contiguous():
        return None
    there = all(p._base is whole and p.storage_offset() == at for p, at in zip(flat, starts, strict=False))
    return whole.reshape(-1) if there else None
