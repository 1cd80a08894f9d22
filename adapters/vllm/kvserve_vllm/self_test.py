"""At start-up: write known K and V through the attention backend, read them back through our views, compare.

A layout that is not what its shape suggests (the CPU backend's is not) becomes an error before the first request.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvserve_core.errors import UnsupportedSpecError
from kvserve_core.spec import LayerGroup, Region
from kvserve_vllm import compat
from kvserve_vllm.placement import LayerCache, Placement

log = logging.getLogger(__name__)
EXTRA = 3
"""Tokens in the second block."""


def check_layers(placement: Placement, modules: Mapping[str, Any], num_blocks: int) -> int:
    """Check one layer of every kind; returns how many were. The blocks used hold what they held before.

    Raises:
        UnsupportedSpecError: what comes back is not what was written.
    """
    checked: dict[tuple[object, ...], bool] = {}
    for group in placement.kv.groups:
        for layer in (n for n in group.layers if n in placement.layers):
            cache = placement.layers[layer]
            impl = getattr(modules.get(cache.name), "impl", None)
            key = (type(impl), *((name, v.shape[1:], v.stride()[1:]) for name, v in cache.views.items()))
            if key not in checked:
                checked[key] = _can_check(cache, impl, num_blocks)
                if checked[key]:
                    _check(placement, group, layer, modules[cache.name], num_blocks)
    return sum(checked.values())


def _can_check(cache: LayerCache, impl: Any, num_blocks: int) -> bool:
    if "opaque" in cache.views:
        return False  # bytes: whatever they mean, they come back as they were
    if getattr(impl, "do_kv_cache_update", None) is None or num_blocks < 3:
        log.warning(
            "the cache of layer %r and those like it are read as their shape says, which backend %s (%d blocks) gives"
            " no way to check; before you rely on it compare answers with and without a transfer, or choose another"
            " --attention-backend",
            cache.name,
            type(impl).__name__,
            num_blocks,
        )
        return False
    return True


def _check(placement: Placement, group: LayerGroup, layer: int, module: Any, num_blocks: int) -> None:
    cache = placement.layers[layer]
    ids = [num_blocks - 1, num_blocks - 2]
    table = [ids] * (cache.pool + 1)
    regions = [_region(placement, group, plane.name, layer, cache.block_size + EXTRA) for plane in group.planes]
    before = [placement.gather(table, at) for at in regions]
    written = [_pattern(x, seed) for seed, x in enumerate(before)]
    slots = torch.tensor(
        [ids[i // cache.block_size] * cache.block_size + i % cache.block_size for i in range(regions[0].num_tokens)],
        device=written[0].device,
    )
    _update(module, written, slots)
    found = [placement.gather(table, at) for at in regions]
    for at, x in zip(regions, before, strict=True):
        placement.scatter(table, at, x)
    for at, want, got in zip(regions, written, found, strict=True):
        if not torch.equal(want, got):
            raise UnsupportedSpecError(
                f"backend {type(module.impl).__name__} does not keep plane {at.plane!r} of layer {cache.name!r} as its"
                " shape says; kvserve cannot read this cache, please report the vLLM version and the device"
            )


def _region(placement: Placement, group: LayerGroup, plane: str, layer: int, tokens: int) -> Region:
    heads = placement.shard.heads(group.plane(plane).num_heads)
    return Region(group.id, plane, (layer,), heads, 0, tokens)


def _pattern(x: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(x.shape, generator=generator).to(x.device, x.dtype)


def _update(module: Any, written: list[Tensor], slots: Tensor) -> None:
    """``written``: planes ``[1, H, T, D]``; the backend takes ``[T, H, D]``."""
    first, second = (x[0].transpose(0, 1).contiguous() for x in written)
    cache = module.kv_cache if isinstance(module.kv_cache, Tensor) else module.kv_cache[0]
    update = module.impl.do_kv_cache_update
    if compat.takes_layer(update):
        update(module, first, second, cache, slots)
    else:
        update(first[:, 0], second, cache, slots, module.kv_cache_dtype, module._k_scale)
