"""SGLang's host pool as pages addressed by plane, layer, head and token: Gather and Scatter of HiCache's storage.

Every layout of the pool becomes views ``[L, pages, tokens of a page, H, D]`` of the same memory; nothing is copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvserve_core.errors import UnsupportedSpecError
from kvserve_core.spec import KVSpec, Region, Shard
from kvserve_core.tensor import TORCH

PAGED = {
    "layer_first": (0, 1, 2, 3, 4),  # [L, pages, tokens, H, D]
    "page_first": (2, 0, 1, 3, 4),  # [pages, tokens, L, H, D]
    "page_first_direct": (1, 0, 2, 3, 4),  # [pages, L, tokens, H, D]
}
"""Layouts of a plane, with its slots cut into pages, as permutations that put the layer first."""
KINDS = frozenset({"MHATokenToKVPoolHost", "MLATokenToKVPoolHost"})


@dataclass(frozen=True)
class HostPages:
    """The pages of one rank. lanes: views by plane, side by side along D. first_layer: of this rank."""

    kv: KVSpec
    shard: Shard
    page_size: int
    first_layer: int
    lanes: Mapping[str, tuple[Tensor, ...]]

    def gather(self, at: Region, page: int, start: int) -> Tensor:
        """``[L, H, T, D]``. start: the number of the page's first token."""
        heads, rows = self._heads(at), slice(at.start - start, at.stop - start)
        read = [
            torch.stack([lane[layer - self.first_layer, page, rows] for layer in at.layers])[:, :, heads]
            for lane in self.lanes[at.plane]
        ]
        return torch.cat(read, dim=-1).transpose(1, 2).contiguous()

    def scatter(self, at: Region, page: int, start: int, x: Tensor) -> None:
        """Write ``x`` ``[L, H, T, D]``."""
        heads, rows = self._heads(at), slice(at.start - start, at.stop - start)
        lanes = self.lanes[at.plane]
        pieces = torch.split(x.transpose(1, 2), [lane.shape[-1] for lane in lanes], dim=-1)
        for lane, piece in zip(lanes, pieces, strict=True):
            for layer, values in zip(at.layers, piece, strict=True):
                lane[layer - self.first_layer, page, rows].index_copy_(1, heads, values.contiguous())

    def _heads(self, at: Region) -> Tensor:
        mine = self.shard.heads(self.kv.group(at.group).plane(at.plane).num_heads)
        return torch.tensor([mine.index(head) for head in at.heads])


def host_pages(pool: Any, kv: KVSpec, shard: Shard) -> HostPages:
    """The views of a host pool.

    Raises:
        UnsupportedSpecError: a pool, or a layout of one, that is not known; the message names it.
    """
    check_host_pool(pool)
    buffer = pool.kv_buffer.view(torch.uint8) if pool.dtype.itemsize == 1 else pool.kv_buffer
    halves = (buffer,) if type(pool).__name__.startswith("MLA") else (buffer[0], buffer[1])
    views = tuple(_paged(half, pool) for half in halves)
    pages = HostPages(kv, shard, pool.page_size, pool.start_layer, _by_plane(kv, views))
    _check_shapes(pages, pool)
    return pages


def check_host_pool(pool: Any) -> None:
    """Raise UnsupportedSpecError for a pool whose bytes this adapter does not know."""
    kind = type(pool).__name__
    refused = {
        f"the host pool {kind!r}": kind not in KINDS,
        f"the host layout {pool.layout!r}": pool.layout not in PAGED,
        "a draft model's layers in the host pool": getattr(pool, "target_layer_num", pool.layer_num) != pool.layer_num,
        "decode context parallelism": getattr(pool, "dcp_size", 1) > 1,
    }
    for what, found in refused.items():
        if found:
            raise UnsupportedSpecError(
                f"kvserve's HiCache storage does not know {what}; serve without it, or with"
                f" --hicache-mem-layout {', '.join(PAGED)}"
            )


def _paged(half: Tensor, pool: Any) -> Tensor:
    cut = {"layer_first": 1, "page_first": 0}.get(pool.layout)
    if cut is not None:
        whole = half.shape[cut] // pool.page_size * pool.page_size
        half = half.narrow(cut, 0, whole).unflatten(cut, (-1, pool.page_size))
    return half.permute(PAGED[pool.layout])


def _by_plane(kv: KVSpec, views: tuple[Tensor, ...]) -> dict[str, tuple[Tensor, ...]]:
    """All groups of a model have the same planes: those of MLA are cut out of one tensor, bytes stand side by side."""
    planes = kv.groups[0].planes
    if len(planes) == 1:
        return {planes[0].name: views}
    if len(views) == 1:
        views = torch.split(views[0], [plane.dim for plane in planes], dim=-1)
    return {plane.name: (view,) for plane, view in zip(planes, views, strict=True)}


def _check_shapes(pages: HostPages, pool: Any) -> None:
    for plane in pages.kv.groups[0].planes:
        lanes = pages.lanes[plane.name]
        heads = len(pages.shard.heads(plane.num_heads))
        expected = (len(pages.shard.layers), pages.page_size, heads, plane.dim, TORCH[plane.dtype])
        shape = lanes[0].shape
        found = (shape[0], shape[2], shape[3], sum(lane.shape[-1] for lane in lanes), lanes[0].dtype)
        if found != expected:
            raise UnsupportedSpecError(
                f"SGLang's {type(pool).__name__} holds {found} (layers, page, heads, dim, dtype) of plane"
                f" {plane.name!r}, the model's config says {expected}; this cache is laid out in a way that kvserve"
                " does not know"
            )
