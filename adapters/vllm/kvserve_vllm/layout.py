"""KV tensors of vLLM's attention backends as strided views ``[B, H, N, D]`` (block, head, token in block, dim).

Every known layout is a permutation of strides, so reading and writing are the same for all of them. What a layer's
tensor means is decided by its cache spec, its backend and its shape; a test at start-up writes through the backend and
reads back (``self_test.py``), so that a wrong guess cannot corrupt a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvserve_core.errors import UnsupportedSpecError

Views = dict[str, Tensor]
"""By plane of the KVSpec: ``k`` and ``v``, ``latent`` and ``rope``, or ``opaque`` (bytes)."""


@dataclass(frozen=True)
class Cell:
    """What one token of one layer holds on this rank. heads: K/V heads, or head slots of a packed cache."""

    heads: int
    key_dim: int
    value_dim: int = 0


def dense(cache: Tensor, cell: Cell) -> Views:
    """``[B, H, N, Dk + Dv]``, K beside V in each head, in any physical order (vLLM 0.28 and newer)."""
    _expect(cache, (None, cell.heads, None, cell.key_dim + cell.value_dim))
    return {"k": cache[..., : cell.key_dim], "v": cache[..., cell.key_dim :]}


def separate(cache: Tensor, cell: Cell, num_blocks: int) -> Views:
    """K and V in one 5-D tensor, ``[B, 2, N, H, D]`` or ``[2, B, N, H, D]`` (vLLM before 0.28).

    Raises:
        UnsupportedSpecError: another shape, or one that reads both ways.
    """
    ways = [axis for axis in (0, 1) if cache.shape[axis] == 2 and cache.shape[1 - axis] % num_blocks == 0]
    if len(ways) != 1:
        raise UnsupportedSpecError(
            f"a KV cache of shape {tuple(cache.shape)} for {num_blocks} blocks does not say which axis tells K from V"
        )
    _expect(cache.select(ways[0], 0), (None, None, cell.heads, cell.key_dim))
    k, v = (cache.select(ways[0], i).transpose(1, 2) for i in (0, 1))
    return {"k": k, "v": v}


def cpu(cache: Tensor, cell: Cell) -> Views:
    """The CPU backend (``vec``, ``vec16``): declared ``[B, H, N, 2D]``, holding ``K[D][N]`` then ``V[N][D]``."""
    _expect(cache, (None, cell.heads, None, 2 * cell.key_dim))
    blocks, heads, tokens, _ = cache.shape
    flat = cache.view(blocks, heads, 2 * tokens * cell.key_dim)
    k, v = flat.chunk(2, dim=-1)
    return {
        "k": k.view(blocks, heads, cell.key_dim, tokens).transpose(-1, -2),
        "v": v.view(blocks, heads, tokens, cell.key_dim),
    }


def latent(cache: Tensor, rank: int, rope: int) -> Views:
    """MLA: ``[B, 1, N, rank + rope]`` or ``[B, N, rank + rope]``."""
    cache = cache.unsqueeze(1) if cache.dim() == 3 else cache
    _expect(cache, (None, 1, None, rank + rope))
    return {"latent": cache[..., :rank], "rope": cache[..., rank:]}


def packed(cache: Tensor, cell: Cell) -> Views:
    """A quantized cache as bytes, ``[B, H, N, C]``: what its elements mean is the backend's business."""
    cache = cache.unsqueeze(1) if cache.dim() == 3 else cache
    raw = cache.view(torch.uint8)
    _expect(raw, (None, cell.heads, None, cell.key_dim))
    return {"opaque": raw}


def state(cache: Tensor | list[Tensor] | tuple[Tensor, ...], nbytes: int) -> Views:
    """Recurrent state as bytes, ``[B, 1, 1, C]``: one state a block.

    Raises:
        UnsupportedSpecError: states of a block that do not lie side by side.
    """
    parts = [cache] if isinstance(cache, Tensor) else list(cache)
    first = parts[0]
    at = 0
    for part in parts:
        offset = (part.data_ptr() - first.data_ptr()) - at
        if offset or not part[0].is_contiguous() or part.stride(0) * part.itemsize != first.stride(0) * first.itemsize:
            raise UnsupportedSpecError("the states of a block do not lie side by side in memory; they cannot be sent")
        at += part[0].numel() * part.itemsize
    if at != nbytes:
        raise UnsupportedSpecError(f"a block holds {at} bytes of state, its spec says {nbytes}")
    stride = first.stride(0) * first.itemsize
    raw = torch.empty(0, dtype=torch.uint8, device=first.device)
    raw.set_(first.untyped_storage(), first.storage_offset() * first.itemsize, (first.shape[0], nbytes), (stride, 1))
    return {"opaque": raw[:, None, None, :]}


def read(view: Tensor, blocks: Tensor, heads: list[int], start: int, stop: int) -> Tensor:
    """Tokens ``start`` to ``stop`` of ``heads`` as ``[H, T, D]``. ``blocks`` are those of tokens from the block that
    holds ``start`` on."""
    tokens = view.shape[2]
    rows = torch.cat([view[:, first:last][blocks] for first, last in _runs(heads)], dim=1)
    x = rows.transpose(0, 1).reshape(len(heads), -1, view.shape[3])
    skip = start % tokens
    return x[:, skip : skip + stop - start]


class Known:
    """Block numbers that are on their device already: the layers of a region have the same, and each copy waits."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], Tensor] = {}

    def on(self, device: torch.device, blocks: list[int]) -> Tensor:
        """As a tensor."""
        key = tuple(blocks)
        if key not in self._made:
            self._made[key] = torch.tensor(blocks, device=device)
        return self._made[key]


def write(
    view: Tensor,
    blocks: list[int],
    heads: list[int],
    start: int,
    x: Tensor,
    null: int | None = 0,
    known: Known | None = None,
) -> None:
    """The inverse of :func:`read`: put ``x [H, T, D]`` in its place. Blocks with the id ``null`` are skipped.

    Whole blocks are written in one go; only tokens of ``x`` are touched. known: shared by the layers of a region.
    """
    for (first, last), piece in zip(_runs(heads), torch.split(x, _lengths(heads)), strict=True):
        _write(view[:, first:last], blocks, start, piece, null, known or Known())


def _write(view: Tensor, blocks: list[int], start: int, x: Tensor, null: int | None, known: Known) -> None:
    size, count = view.shape[2], x.shape[1]
    head = min(-start % size, count)
    whole = (count - head) // size
    if head:
        _write_part(view, blocks[0], start % size, x[:, :head], null)
    ids = blocks[bool(head) :][:whole]
    kept = [i for i, block in enumerate(ids) if block != null]
    if kept:
        body = x[:, head : head + whole * size].reshape(x.shape[0], whole, size, x.shape[2]).transpose(0, 1)
        view[known.on(view.device, [ids[i] for i in kept])] = body if len(kept) == whole else body[kept]
    if head + whole * size < count:
        _write_part(view, blocks[bool(head) + whole], 0, x[:, head + whole * size :], null)


def _write_part(view: Tensor, block: int, offset: int, x: Tensor, null: int | None) -> None:
    if block != null:
        view[block, :, offset : offset + x.shape[1]] = x


def _runs(heads: list[int]) -> list[tuple[int, int]]:
    """Ascending numbers as half-open runs: ``[0, 1, 3]`` -> ``[(0, 2), (3, 4)]``."""
    runs: list[tuple[int, int]] = []
    for head in heads:
        if runs and runs[-1][1] == head:
            runs[-1] = (runs[-1][0], head + 1)
        else:
            runs.append((head, head + 1))
    return runs


def _lengths(heads: list[int]) -> list[int]:
    return [last - first for first, last in _runs(heads)]


def _expect(cache: Tensor, shape: tuple[int | None, ...]) -> None:
    if cache.dim() != len(shape) or any(want not in (None, got) for want, got in zip(shape, cache.shape, strict=True)):
        wanted = ", ".join("*" if n is None else str(n) for n in shape)
        raise UnsupportedSpecError(f"a KV cache of shape {tuple(cache.shape)}, expected [{wanted}]")


Layout = Callable[[Tensor], Views]
