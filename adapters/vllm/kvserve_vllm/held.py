"""Blocks of a request that an encode thread still reads, with copies of what the engine lets go of before that."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from kvserve_core.errors import TransferCancelled
from kvserve_core.session import Event
from kvserve_core.session.coverage import clip, cut
from kvserve_core.spec import LayerGroup, Region
from kvserve_vllm.metadata import Blocks
from kvserve_vllm.placement import Placement

Fence = Callable[[], Event | None]
"""Records an event in the engine's stream, which fires when all that was queued so far is done; None where work is done
in order anyway."""


@dataclass
class Held:
    """kept: copies, under ``lock``. closed: the engine has its blocks back, so that nothing may be read any more."""

    blocks: Blocks
    kept: list[tuple[Region, Tensor]] = field(default_factory=list, kw_only=True)
    lock: threading.Lock = field(default_factory=threading.Lock, kw_only=True)
    closed: bool = field(default=False, kw_only=True)

    def gather(self, placement: Placement, at: Region) -> Tensor:
        """A region, ``[L, H, T, D]``, from the copies where one holds all of it.

        Raises:
            TransferCancelled: the engine took the blocks back.
        """
        with self.lock:
            if self.closed:
                raise TransferCancelled(f"the engine took back the blocks of {at}")
            for kept_at, x in self.kept:
                if clip(at, kept_at) == at:
                    return cut(x, kept_at, at).contiguous()
            return placement.gather(self.blocks, at)

    def close(self) -> None:
        """After this call no thread reads the blocks."""
        with self.lock:
            self.closed = True
            self.kept.clear()


def kept_region(placement: Placement, group: LayerGroup, plane: str, total: int, start: int = 0) -> Region:
    """All of a group's plane on this rank that is ever sent of tokens ``start`` to ``total`` of a prompt."""
    layers = tuple(layer for layer in group.layers if layer in placement.layers)
    heads = placement.shard.heads(group.plane(plane).num_heads)
    if group.unit == "state":
        return Region(group.id, plane, layers, heads, 0, 1)
    return Region(group.id, plane, layers, heads, max(start, total - (group.window or total)), total)
