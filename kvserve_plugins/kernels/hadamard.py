"""Walsh-Hadamard transform of the last axis, in natural (Sylvester) order.

Butterflies are the reference: additions in a fixed order, equal bits on every device. On a CPU a product with a small
matrix of +1 and -1 is faster (256 tokens, one core: dim 64 22 against 111 us, dim 128 60 against 159, dim 256 103
against 251; a dense product with the whole matrix needs 22, 80 and 309), so :func:`sums` may use it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from kvserve_plugins.kernels.shapes import split_last

DENSE_MAX = 64
"""Pieces up to this length are fastest as one dense product."""
RADIX = 16
"""Beyond it, the part done by a product; the rest is butterflies."""
GEMM_MIN_ROWS = 8
"""Products of fewer rows take another path in BLAS, whose sums depend on how many heads are computed together."""


def pieces(n: int) -> tuple[int, ...]:
    """Powers of two that make up ``n``, largest first: 96 -> (64, 32)."""
    return tuple(1 << b for b in reversed(range(n.bit_length())) if n >> b & 1)


@lru_cache(maxsize=32)
def matrix(n: int) -> Tensor:
    """``[n, n]`` of +1, -1 and 0: the Hadamard matrices of ``pieces(n)`` along the diagonal, not normalised."""
    whole, at = torch.zeros(n, n), 0
    for p in pieces(n):
        whole[at : at + p, at : at + p] = _sylvester(p)
        at += p
    return whole


def _sylvester(n: int) -> Tensor:
    h = torch.ones(1, 1)
    while len(h) < n:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h


@lru_cache(maxsize=32)
def norms(n: int) -> Tensor:
    """``[n]``: what makes :func:`sums` orthonormal, ``1 / sqrt(piece)`` for the channels of each piece."""
    return torch.cat([torch.full((p,), p**-0.5) for p in pieces(n)])


def butterflies(x: Tensor, down_to: int = 1, *, overwrite: bool = False) -> Tensor:
    """Sums and differences of halves, of halves of halves, and so on: ``[..., n]`` with n a power of two.

    ``overwrite`` lets it use a contiguous ``x`` as memory: two tensors then serve all steps.
    """
    n = half = x.shape[-1]
    spare = None
    while half > down_to:
        half //= 2
        shape = (*x.shape[:-1], n // (2 * half), 2, half)
        out = torch.empty_like(x, memory_format=torch.contiguous_format) if spare is None else spare
        pairs, into = x.reshape(shape), out.view(shape)
        torch.add(pairs[..., 0, :], pairs[..., 1, :], out=into[..., 0, :])
        torch.sub(pairs[..., 0, :], pairs[..., 1, :], out=into[..., 1, :])
        x, spare, overwrite = out, x if overwrite else None, True
    return x


def sums(x: Tensor, *, gemm: bool = False) -> Tensor:
    """``[..., T, n]`` in f32 times ``matrix(n)``. ``gemm`` allows products; see :func:`gemm_is_exact`."""
    if x.device.type == "cuda" and (fast := accelerated()) is not None:
        return _by_pieces(x, fast)
    allowed = gemm and x.device.type == "cpu" and x.shape[-2] >= GEMM_MIN_ROWS
    return _by_pieces(x, _product if allowed else butterflies)


@lru_cache(maxsize=1)
def accelerated() -> Callable[[Tensor], Tensor] | None:
    """The CUDA kernel of ``fast_hadamard_transform`` where that package is installed: same order, f32, not scaled."""
    try:
        kernel: Callable[[Tensor], Tensor] = importlib.import_module("fast_hadamard_transform").hadamard_transform
    except (ImportError, AttributeError):
        return None
    return kernel


def fwht(x: Tensor) -> Tensor:
    """The orthonormal transform of the last axis in f32; its own inverse. Lengths split as in :func:`pieces`."""
    return sums(x) * norms(x.shape[-1]).to(x.device)


def gemm_is_exact() -> bool:
    """Whether f32 products on the CPU are f32 here: an engine may have allowed bf16 or tf32 for them."""
    rows = torch.full((64, 64), 4097.0)  # 13 significant bits; bf16 has 8 and tf32 has 11
    return torch.equal(rows @ torch.ones(64, 64), rows * 64)


def _product(x: Tensor) -> Tensor:
    if x.shape[-1] <= DENSE_MAX:
        return x @ matrix(x.shape[-1])
    low = split_last(x, RADIX) @ matrix(RADIX)
    return butterflies(low.flatten(-2), RADIX, overwrite=True)


def _by_pieces(x: Tensor, transform: Callable[[Tensor], Tensor]) -> Tensor:
    sizes = pieces(x.shape[-1])
    if len(sizes) == 1:
        return transform(x)
    starts = accumulate(sizes, initial=0)
    return torch.cat([transform(x.narrow(-1, start, size)) for start, size in zip(starts, sizes, strict=False)], -1)
