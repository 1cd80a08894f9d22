"""Lossy KV in the engine's prefix cache: vLLM caches what was loaded like what it computed, for any later request.

``forbid`` takes blocks that a lossy load filled, and those computed after them, out of the prefix cache again; the
request itself goes on with them. ``allow`` leaves them and counts the tokens that other requests take from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from kvserve_vllm import compat
from kvserve_vllm.metadata import Blocks
from kvserve_vllm.placement import NULL_BLOCK
from kvserve_vllm.stats import StatsBuffer

Policy = Literal["forbid", "allow"]


class Pollution:
    """Follows requests whose prompt was loaded with loss. block_sizes: tokens of a block, per pool."""

    def __init__(self, policy: Policy, block_sizes: Sequence[int], stats: StatsBuffer) -> None:
        self._policy, self._block_sizes, self._stats = policy, tuple(block_sizes), stats
        self._pool: Any = None
        self._lossy: dict[str, list[set[int]]] = {}
        self._starts: dict[str, int] = {}
        self._counted: set[str] = set()
        self._tainted: dict[int, Any] = {}

    def bind(self, block_pool: Any) -> None:
        """The engine's pool of blocks, which knows what is cached."""
        self._pool = block_pool

    def loading(self, req_id: str, blocks: Blocks, start: int) -> None:
        """A request loads tokens from ``start`` on with loss."""
        self._starts[req_id] = start
        self._lossy[req_id] = self._from(blocks, start)
        self._clean(req_id)

    def failed(self, req_id: str, stop: int) -> None:
        """A load ended with tokens ``[0, stop)`` in place: with none of those that lose something, nothing is lost."""
        if stop <= self._starts.get(req_id, 0):
            self._forget(req_id)

    def _from(self, blocks: Blocks, start: int) -> list[set[int]]:
        """Blocks that hold a token from ``start`` on, per pool."""
        kept = zip(blocks, self._block_sizes, strict=True)
        return [set(ids[start // size :]) - {NULL_BLOCK} for ids, size in kept]

    def _forget(self, req_id: str) -> None:
        self._lossy.pop(req_id, None)
        self._starts.pop(req_id, None)

    def allocated(self, req_id: str, blocks: Blocks) -> None:
        """A request got its blocks; the engine may have cached some of them just now."""
        if req_id in self._lossy:
            self._clean(req_id)
        elif self._tainted and req_id not in self._counted:  # the engine tells of a load twice: before and after it
            self._counted.add(req_id)
            shared = sum(self._is_tainted(block) for block in blocks[0])
            if shared:
                self._stats.add("lossy_cache_tokens", shared * self._block_sizes[0])

    def tainted(self, blocks: Blocks) -> bool:
        """Whether a request was given blocks of the prefix cache that hold lossy KV."""
        return bool(self._tainted) and any(self._is_tainted(block) for pool in blocks for block in pool)

    def plan(self, output: Any) -> None:
        """Blocks that were filled since the last step."""
        if not self._lossy:
            return
        entries = list(compat.scheduled(output))
        given = {block for entry in entries for pool in entry.blocks or () for block in pool}
        for req_id in compat.preempted(output) & self._lossy.keys():
            self._lossy[req_id] = [held - given for held in self._lossy[req_id]]  # some are another's by now
            self._clean(req_id)
            self._forget(req_id)
        for entry in entries:
            if entry.req_id in self._lossy and entry.blocks is not None:
                self._filled(entry.req_id, entry.blocks, entry.fresh)
        for req_id in self._lossy:
            self._clean(req_id)

    def _filled(self, req_id: str, blocks: Blocks, fresh: bool) -> None:
        """fresh: these are all of its blocks; after a load that failed they are not those of before."""
        if fresh:
            self._lossy[req_id] = self._from(blocks, self._starts[req_id])
            return
        for held, new in zip(self._lossy[req_id], blocks, strict=True):
            held.update(set(new) - {NULL_BLOCK})

    def finished(self, req_id: str) -> None:
        """The last chance: after this its blocks belong to nobody."""
        self._counted.discard(req_id)
        if req_id in self._lossy:
            self._clean(req_id)
            self._forget(req_id)

    def _clean(self, req_id: str) -> None:
        if self._pool is None:
            return
        blocks = set[int]().union(*self._lossy[req_id])
        if self._policy == "forbid":
            compat.evict(self._pool, blocks)
            return
        hashes = {block: self._pool.blocks[block].block_hash for block in blocks}
        self._tainted.update({block: found for block, found in hashes.items() if found is not None})

    def _is_tainted(self, block: int) -> bool:
        found = self._pool.blocks[block].block_hash
        return found is not None and self._tainted.get(block) == found
