"""Models, places, tensors and streams to test with: seeded, small, and one of each kind of trouble."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from kvserve_core.spec import (
    COMPOSITE,
    SEGMENT_TOKENS,
    DType,
    KVSpec,
    LayerGroup,
    PlanePart,
    PlaneSpec,
    Region,
    RopeSpec,
)
from kvserve_core.tensor import TORCH, Encoded, Part

LAYERS, HEADS = 3, 4
START = 512
DIMS = (32, 64, 80, 96, 128, 256, 576)
TOKENS = (0, 1, 17, 255, 256)
FLOATS = (DType.BF16, DType.F16, DType.F32)
KINDS = ("normal", "zeros", "constant", "large", "outlier", "tiny")
LENGTHS = (0, 1, 2, 7, 16, 1000)
ALPHABETS = (1, 2, 3, 5, 6, 7, 8, 12, 16, 17, 100, 255, 256, 257, 1000, 32767, 32768)
ROTATED = frozenset({"k", "rope"})


def rope(dim: int) -> RopeSpec:
    """The rotary embedding that most models use: base 10000 over all of a head."""
    return RopeSpec(tuple(10000.0 ** (-2 * i / dim) for i in range(dim // 2)), dim, "neox")


@lru_cache(maxsize=256)
def model(dtype: DType = DType.BF16, dim: int = 64, plane: str = "k", heads: int = HEADS) -> KVSpec:
    """A model of ``LAYERS`` layers whose plane ``plane`` has ``dim`` channels; a composite shares them evenly."""
    members = COMPOSITE.get(plane, (plane,))
    each = dim // len(members)
    planes = tuple(
        PlaneSpec(name, heads, (PlanePart(name, each, rope(each) if name in ROTATED else None),), dtype)
        for name in members
    )
    return KVSpec("checks", (LayerGroup(0, tuple(range(LAYERS)), planes),))


def place(
    tokens: int, layers: tuple[int, ...] = (0, 1, 2), heads: tuple[int, ...] = (0, 1, 2, 3), plane: str = "k"
) -> Region:
    """The first ``tokens`` tokens of a cell of :func:`model`."""
    return Region(0, plane, layers, heads, START, START + tokens)


def cell(at: Region) -> Region:
    """The whole token cell that ``bind`` is given for ``at``."""
    return replace(at, start=0, stop=SEGMENT_TOKENS)


def generator(seed: int) -> torch.Generator:
    """A seeded source of random numbers."""
    return torch.Generator().manual_seed(seed)


def filled(kind: str, dtype: DType, shape: tuple[int, int, int, int], seed: int = 0) -> Tensor:
    """``[L, H, T, D]`` of one of ``KINDS``; integers are any bits."""
    if not dtype.is_float:
        return any_bits(dtype, shape, seed)
    x = torch.randn(shape, generator=generator(seed))
    if kind == "zeros":
        x = torch.zeros_like(x)
    elif kind == "constant":
        x = torch.full_like(x, -3.140625)
    elif kind == "large":
        x = x * (1e5 if dtype != DType.F16 else 1e4)
    elif kind == "outlier":
        x[:, min(1, shape[1] - 1), :, : shape[3] // 8] *= 1000
    elif kind == "tiny":
        x = x * 1e-7
    return x.to(TORCH[dtype])


def values(kind: str, dtype: DType, tokens: int, dim: int, seed: int = 0) -> Tensor:
    """``[LAYERS, HEADS, tokens, dim]`` of one of ``KINDS``."""
    return filled(kind, dtype, (LAYERS, HEADS, tokens, dim), seed)


def any_bits(dtype: DType, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Random bit patterns: NaNs with payloads, infinities, subnormals, both zeros."""
    data = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), generator=generator(seed))
    return data.to(torch.uint8).view(TORCH[dtype])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and bits, NaN included."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))


def _bytes(x: Tensor) -> Tensor:
    return x.detach().cpu().reshape(-1).contiguous().view(torch.uint8)


def sparse(x: Tensor) -> Tensor:
    """``[L, H, T, D]`` with seven of eight channels zero: codes that any codec makes smaller."""
    return x * (torch.arange(x.shape[3], device=x.device) % 8 == 0).to(x.dtype)


def scattered(x: Tensor) -> Tensor:
    """The same values in a view that is not contiguous: ``[T, H, L, D]`` memory with gaps between rows."""
    wide = torch.zeros((*(x.shape[i] for i in (2, 1, 0)), x.shape[3] + 5), dtype=x.dtype, device=x.device)
    view = wide.permute(2, 1, 0, 3)[..., 2:-3]
    view.copy_(x)
    return view


def recipe(at: Region, dim: int) -> Tensor:
    """``[L, H, T, D]`` in f32 from integers alone: the same on every machine and with every torch."""
    shape = (len(at.layers), len(at.heads), at.num_tokens, dim)
    n = torch.arange(prod(shape), dtype=torch.int64) + 7919 * (at.start + 31 * sum(at.layers))
    noise = (n * 1103515245 + 12345 + 977 * len(at.plane)) % 2**31 // 2**15 % 509 - 254
    channel = n % dim
    return (noise * (1 + 7 * (channel == 3)) + 16 * channel).reshape(shape).to(torch.float32).div_(64)


def codes(length: int, alphabet: int, seed: int = 0, rows: int = 1) -> Part:
    """A stream of random codes."""
    dtype = torch.uint8 if alphabet <= 256 else torch.int16
    return Part(torch.randint(0, alphabet, (length,), generator=generator(seed)).to(dtype), alphabet, rows)


def peaked(length: int, alphabet: int, seed: int = 0, rows: int = 1) -> Part:
    """Codes of a Gaussian around the middle of the alphabet, as quantizers give them."""
    x = torch.randn((length,), generator=generator(seed)) * max(alphabet, 4) / 12 + (alphabet - 1) // 2
    dtype = torch.uint8 if alphabet <= 256 else torch.int16
    return Part(x.round().clamp(0, alphabet - 1).to(dtype), alphabet, rows)


def shell(part: Part) -> Part:
    """What decode is told of a part: everything but the codes."""
    return replace(part, codes=torch.empty(part.codes.numel(), dtype=part.codes.dtype, device="meta"))


def exactly(e: Encoded) -> Encoded:
    """A blob as it comes from the wire: a copy of its bytes and nothing after them."""
    return Encoded(e.data[: int(e.nbytes)].clone(), torch.tensor(int(e.nbytes)))


def padded(e: Encoded, misaligned: bool = False) -> Encoded:
    """The same blob with spare capacity, at an odd address if asked."""
    n, shift = int(e.nbytes), int(misaligned)
    room = torch.full((n + 9 + shift,), 0xA5, dtype=torch.uint8, device=e.data.device)
    room[shift : shift + n] = e.data[:n]
    return Encoded(room[shift:], e.nbytes)
