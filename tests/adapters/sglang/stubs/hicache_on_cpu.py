"""Lets SGLang's HiCache run where there is no GPU: host memory that no driver registers, and copies by indexing.

SGLang loads it as a plugin; it does nothing unless ``HICACHE_ON_CPU`` is set.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def install() -> None:
    """Replace what needs a GPU's driver or kernels."""
    if not os.environ.get("HICACHE_ON_CPU"):
        return
    from sglang.srt.mem_cache import memory_pool_host
    from sglang.srt.mem_cache.pool_host import base, common, mha, mla

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate
    for module in (mha, mla, memory_pool_host):
        module.transfer_kv_direct = transfer
        module.transfer_kv_all_layer_direct_lf_pf = all_layers_to_pages
        module.transfer_kv_per_layer_direct_pf_lf = layer_from_pages


def allocate(dims: Sequence[int], dtype: torch.dtype, device: str, pin_memory: bool, **others: Any) -> Tensor:
    """Plain memory."""
    del pin_memory, others
    return torch.zeros(tuple(dims), dtype=dtype, device=device)


def transfer(
    src_layers: Sequence[Tensor],
    dst_layers: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """Slots to slots, layer by layer."""
    del page_size
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices.long()] = source[src_indices.long()]


def all_layers_to_pages(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """Slots of all layers, K then V, into pages ``[pages, L, tokens, H, D]``."""
    pages = dst_indices[::page_size].long() // page_size
    each = len(src_ptrs) // len(dst_ptrs)
    for i, source in enumerate(src_ptrs):
        rows = source[src_indices.long()].unflatten(0, (-1, page_size))
        dst_ptrs[i // each][pages, i % each] = rows


def layer_from_pages(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """One layer's slots, K and V, out of such pages."""
    pages = src_indices[::page_size].long() // page_size
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices.long()] = source[pages, layer_id].flatten(0, 1)
