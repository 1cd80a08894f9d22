"""Which tensors of SGLang's pools hold which layer, and which pools this adapter understands.

Everything else is refused by name at start-up: a cache that is only nearly understood would be sent wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvserve_core.errors import UnsupportedSpecError
from kvserve_core.spec import KVSpec, LayerGroup, Shard
from kvserve_sglang.layout import Lanes, Place
from kvserve_sglang.memory import rows
from kvserve_sglang.slots import Pages, numbered
from kvserve_sglang.spec import AUX_GROUP, STATE_GROUPS, State

PLAIN = frozenset({"MHATokenToKVPool", "MLATokenToKVPool"})
HYBRID = {"SWAKVPool": ("full_kv_pool", "swa_kv_pool"), "HybridLinearKVPool": ("full_kv_pool",)}
TOKEN_STATES = frozenset({"swa"})
"""State components of SGLang whose elements belong to tokens: they are planes here."""
REQUEST_STATES = frozenset({"mamba"})
"""One cell a request and layer."""


def check_pool(pool: Any) -> None:
    """Raise UnsupportedSpecError for a pool whose bytes this adapter does not know."""
    name = type(pool).__name__
    parts = [getattr(pool, part) for part in HYBRID.get(name, ())] or [pool]
    for part in parts:
        kind = type(part).__name__
        if kind not in PLAIN:
            raise _unsupported(f"KV pool {kind!r}")
        if getattr(part, "kv_cache_layout", "nhd") != "nhd":
            raise _unsupported(f"KV layout {part.kv_cache_layout!r}")
        if getattr(part, "is_quantized_kv_cache", False) is True or getattr(part, "layer_shard_enabled", False):
            raise _unsupported(f"KV pool {kind!r} with quantized or sharded layers")


def _unsupported(what: str) -> UnsupportedSpecError:
    return UnsupportedSpecError(
        f"SGLang keeps this model's cache in a {what}, which kvserve does not carry; serve without it, or with another"
        " transfer backend"
    )


def windowed(pool: Any) -> bool:
    """Whether sliding-window layers have a pool, and slots, of their own."""
    return hasattr(pool, "swa_kv_pool")


def cache_layers(pool: Any) -> tuple[int, ...]:
    """The layers of this rank that have a token cache."""
    for mapping in ("layers_mapping", "full_attention_layer_id_mapping"):
        if hasattr(pool, mapping):
            return tuple(sorted(getattr(pool, mapping)))
    return tuple(range(pool.start_layer, pool.start_layer + pool.layer_num))


def store_dtype(pool: Any) -> torch.dtype:
    """The element type as stored: uint8 for fp8."""
    found: torch.dtype = getattr(pool, "full_kv_pool", pool).store_dtype
    return found


def states(kv_args: Any, ranks: int) -> list[State]:
    """The state components that are sent as cells.

    Raises:
        UnsupportedSpecError: a component that is neither tokens of a pool nor one cell a request.
    """
    found = []
    for i, kind in enumerate(kv_args.state_types):
        if kind.value in TOKEN_STATES:
            continue
        if kind.value not in REQUEST_STATES:
            raise _unsupported(f"state component {kind.value!r}")
        layers = tuple(dict.fromkeys(kv_args.state_layer_ids[i]))
        sizes = {layer: sum(_items(kv_args, i, layer)) for layer in layers}
        if len(set(sizes.values())) != 1:
            raise _unsupported(f"state component {kind.value!r} whose layers differ in size")
        found.append(State(kind.value, tuple(sorted(layers)), next(iter(sizes.values())), ranks))
    return found


def _items(kv_args: Any, component: int, layer: int) -> list[int]:
    pairs = zip(kv_args.state_layer_ids[component], kv_args.state_item_lens[component], strict=True)
    return [size for at, size in pairs if at == layer]


def lanes(pool: Any, kv: KVSpec, shard: Shard, kv_args: Any) -> Lanes:
    """Every lane of this rank: the cache, states, and the auxiliary row."""
    found: dict[Place, tuple[Tensor, ...]] = {}
    for group in kv.groups:
        for layer in sorted(set(group.layers) & set(shard.layers)):
            if group.unit == "token":
                found.update(_token_lanes(pool, group, layer))
            else:
                found[group.id, "opaque", layer] = tuple(_cells(pool, group.id, layer, kv_args))
    return found


def _token_lanes(pool: Any, group: LayerGroup, layer: int) -> dict[Place, tuple[Tensor, ...]]:
    part, index = _locate(pool, layer)
    if hasattr(part, "kv_buffer"):
        tensors: Sequence[Tensor] = torch.split(
            part.kv_buffer[index], [part.kv_lora_rank, part.qk_rope_head_dim], dim=-1
        )
    else:
        tensors = (part.k_buffer[index], part.v_buffer[index])
    if len(group.planes) == 1:
        return {(group.id, group.planes[0].name, layer): tuple(tensors)}
    return {(group.id, p.name, layer): (x,) for p, x in zip(group.planes, tensors, strict=True)}


def _locate(pool: Any, layer: int) -> tuple[Any, int]:
    """The plain pool that holds a layer, and the layer's place in it."""
    if hasattr(pool, "layers_mapping"):
        index, sliding = pool.layers_mapping[layer]
        return (pool.swa_kv_pool if sliding else pool.full_kv_pool), index
    if hasattr(pool, "full_attention_layer_id_mapping"):
        return pool.full_kv_pool, pool.full_attention_layer_id_mapping[layer]
    return pool, layer - pool.start_layer


def _cells(pool: Any, group_id: int, layer: int, kv_args: Any) -> Iterator[Tensor]:
    if group_id == AUX_GROUP:
        pairs = zip(kv_args.aux_data_ptrs, kv_args.aux_data_lens, kv_args.aux_item_lens, strict=True)
        yield from (rows(*each, torch.device("cpu")) for each in pairs)
        return
    i = component(kv_args, group_id)
    every = zip(
        kv_args.state_layer_ids[i],
        kv_args.state_data_ptrs[i],
        kv_args.state_data_lens[i],
        kv_args.state_item_lens[i],
        strict=True,
    )
    device = torch.device(pool.device)
    yield from (rows(address, nbytes, item, device) for at, address, nbytes, item in every if at == layer)


def component(kv_args: Any, group_id: int) -> int:
    """The index of SGLang's state component that a state group stands for."""
    return cell_components(kv_args)[group_id - STATE_GROUPS]


def cell_components(kv_args: Any) -> list[int]:
    """Indices of the components that are one cell a request and layer, in the order of their groups."""
    return [i for i, kind in enumerate(kv_args.state_types) if kind.value in REQUEST_STATES]


def window_component(kv_args: Any) -> int | None:
    """The index of the component that lists the slots of sliding-window layers."""
    found = [i for i, kind in enumerate(kv_args.state_types) if kind.value in TOKEN_STATES]
    return found[0] if found else None


def as_pages(indices: Any) -> Pages:
    """Page numbers as this adapter keeps them, from an array or a tensor of any device."""
    return numbered(indices.cpu() if isinstance(indices, Tensor) else indices)
