"""Where a region of the KVSpec lies in the engine's blocks: gather and scatter by block table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvserve_core.spec import KVSpec, Region, Shard
from kvserve_vllm.layout import Views, read, write

BlockIds = Sequence[Sequence[int]]
"""Block ids of a request, per KV cache group of the engine. Id 0 is the null block: nothing is stored there."""
NULL_BLOCK = 0


@dataclass(frozen=True)
class LayerCache:
    """One layer's cache on this rank.

    pool: the engine's KV cache group. block_size: tokens of a block of its block table; the views may cut it into
    smaller kernel blocks. state_at: for state, which entry of the block table holds it (from the end).
    """

    name: str
    pool: int
    block_size: int
    views: Views
    state_at: int | None = None


class Placement:
    """All layers of this rank. Layers and heads are global numbers, tokens absolute."""

    def __init__(self, kv: KVSpec, shard: Shard, layers: Mapping[int, LayerCache]) -> None:
        self.kv, self.shard, self.layers = kv, shard, dict(layers)

    def gather(self, blocks: BlockIds, at: Region) -> Tensor:
        """A copy of a region, ``[L, H, T, D]``, contiguous."""
        heads = self._local_heads(at)
        return torch.stack([self._read(self.layers[layer], blocks, at, heads) for layer in at.layers])

    def scatter(self, blocks: BlockIds, at: Region, x: Tensor) -> None:
        """Write a region; tokens whose block is the null block are dropped: the engine does not keep them."""
        heads = self._local_heads(at)
        for layer, rows in zip(at.layers, x, strict=True):
            cache = self.layers[layer]
            view = cache.views[at.plane]
            ids, start = _kernel_blocks(cache, view.shape[2], blocks[cache.pool], at)
            write(view, ids, heads, start, rows, NULL_BLOCK)

    def _read(self, cache: LayerCache, blocks: BlockIds, at: Region, heads: list[int]) -> Tensor:
        view = cache.views[at.plane]
        ids, start = _kernel_blocks(cache, view.shape[2], blocks[cache.pool], at)
        return read(view, torch.tensor(ids, device=view.device), heads, start, start + at.num_tokens)

    def _local_heads(self, at: Region) -> list[int]:
        held = self.shard.heads(self.kv.group(at.group).plane(at.plane).num_heads)
        return [held.index(head) for head in at.heads]


def _kernel_blocks(cache: LayerCache, size: int, table: Sequence[int], at: Region) -> tuple[list[int], int]:
    """Kernel blocks of ``size`` tokens that hold the region, and where in the first one it starts."""
    if cache.state_at is not None:
        return [table[cache.state_at]], 0
    ratio = cache.block_size // size
    first, last = at.start // size, -(-at.stop // size)
    return [_split(table[i // ratio], i % ratio, ratio) for i in range(first, last)], at.start % size


def _split(block: int, part: int, ratio: int) -> int:
    return NULL_BLOCK if block == NULL_BLOCK else block * ratio + part
