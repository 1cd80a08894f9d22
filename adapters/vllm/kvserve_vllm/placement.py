"""Where a region of the KVSpec lies in the engine's blocks: gather and scatter by block table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvserve_core.spec import KVSpec, Region, Shard
from kvserve_vllm import paged_copy
from kvserve_vllm.layout import Known, Views, read, write
from kvserve_vllm.paged_copy import Stack

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
        self._stacks: dict[tuple[str, tuple[int, ...], tuple[int, ...]], Stack | None] = {}

    def gather(self, blocks: BlockIds, at: Region) -> Tensor:
        """A copy of a region, ``[L, H, T, D]``, contiguous."""
        heads, known = self._local_heads(at), Known()
        if (stack := self._stack(at, heads)) is not None:
            ids, start = _kernel_blocks(self.layers[at.layers[0]], blocks, at)
            return paged_copy.gather(stack, known.on(stack.like.device, ids), len(heads), start, at.num_tokens)
        return torch.stack([self._read(self.layers[layer], blocks, at, heads, known) for layer in at.layers])

    def scatter(self, blocks: BlockIds, at: Region, x: Tensor) -> None:
        """Write a region; tokens whose block is the null block are dropped: the engine does not keep them."""
        heads, known = self._local_heads(at), Known()
        if (stack := self._stack(at, heads)) is not None and stack.like.dtype == x.dtype:
            ids, start = _kernel_blocks(self.layers[at.layers[0]], blocks, at)
            paged_copy.scatter(stack, known.on(stack.like.device, ids), start, x, NULL_BLOCK)
            return
        for layer, rows in zip(at.layers, x, strict=True):
            cache = self.layers[layer]
            ids, start = _kernel_blocks(cache, blocks, at)
            write(cache.views[at.plane], ids, heads, start, rows, NULL_BLOCK, known)

    def unfilled(self, blocks: BlockIds, start: int, stop: int) -> set[int]:
        """Blocks of a request of one pool that hold one of these tokens, which did not arrive."""
        cache = next(iter(self.layers.values()))
        table = blocks[cache.pool]
        return set(table[start // cache.block_size : -(-stop // cache.block_size)]) - {NULL_BLOCK}

    def _read(self, cache: LayerCache, blocks: BlockIds, at: Region, heads: list[int], known: Known) -> Tensor:
        view = cache.views[at.plane]
        ids, start = _kernel_blocks(cache, blocks, at)
        return read(view, known.on(view.device, ids), heads, start, start + at.num_tokens)

    def _stack(self, at: Region, heads: list[int]) -> Stack | None:
        """How to copy all layers of a region at once; None: one by one."""
        key = (at.plane, at.layers, at.heads)
        if key not in self._stacks:
            caches = [self.layers[layer] for layer in at.layers]
            alike = len({(c.pool, c.block_size, c.state_at) for c in caches}) == 1 and caches[0].state_at is None
            self._stacks[key] = paged_copy.stacked([c.views[at.plane] for c in caches], heads) if alike else None
        return self._stacks[key]

    def _local_heads(self, at: Region) -> list[int]:
        held = self.shard.heads(self.kv.group(at.group).plane(at.plane).num_heads)
        return [held.index(head) for head in at.heads]


def _kernel_blocks(cache: LayerCache, blocks: BlockIds, at: Region) -> tuple[list[int], int]:
    """Blocks of the layer's views that hold the region, and where in the first one it starts."""
    table, size = blocks[cache.pool], cache.views[at.plane].shape[2]
    if cache.state_at is not None:
        return [table[cache.state_at]], 0
    ratio = cache.block_size // size
    first, last = at.start // size, -(-at.stop // size)
    return [_split(table[i // ratio], i % ratio, ratio) for i in range(first, last)], at.start % size


def _split(block: int, part: int, ratio: int) -> int:
    return NULL_BLOCK if block == NULL_BLOCK else block * ratio + part
