"""Every difference between vLLM releases that the connector must know of (0.28 to 0.33), in one place."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import signature
from typing import Any, NamedTuple

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from kvserve_core.errors import UnsupportedSpecError

SUPPORTED = ("0.28", "0.33")
"""The oldest and the newest release this connector was read against."""
RUN = ("0.28", "0.32")
"""Of these, the releases that its tests ran on."""
TransferResults: Any = getattr(base, "KVConnectorTransferResults", None)
"""0.31 and newer: lets a worker say which requests failed; before, only which blocks."""
HIT_SOURCE: Any = None
"""How hits are labelled in the engine's metrics (0.32 and newer)."""
if hasattr(base, "CacheHitSource"):
    HIT_SOURCE = base.CacheHitSource.P2P


class Scheduled(NamedTuple):
    """One request in a step. blocks: ids new to it per group, or all of them when it was resumed."""

    req_id: str
    blocks: tuple[list[int], ...] | None
    num_computed: int
    fresh: bool


def version() -> tuple[int, int]:
    """Major and minor version of the engine; (0, 0) when it does not say."""
    parts = str(getattr(vllm, "__version__", "")).split(".")
    return (int(parts[0]), int(parts[1])) if len(parts) > 1 and parts[0].isdigit() and parts[1].isdigit() else (0, 0)


def unsupported() -> str | None:
    """A sentence for the log when this release is outside the supported range."""
    low, high = (tuple(map(int, text.split("."))) for text in SUPPORTED)
    if low <= version() <= high:
        return None
    return (
        f"vLLM {vllm.__version__} is outside {SUPPORTED[0]} to {SUPPORTED[1]}, which kvserve supports (tests run on"
        f" {' and '.join(RUN)}); use one of those, or compare answers with and without a transfer first"
    )


def check_groups() -> None:
    """A model with several cache groups can only be fetched where a failed load can be told to the engine.

    Raises:
        UnsupportedSpecError: this release cannot be told.
    """
    if TransferResults is None:
        raise UnsupportedSpecError(
            f"this model has several KV cache groups, and vLLM {vllm.__version__} cannot be told that a load of such a"
            " model failed; use vLLM 0.31 or newer"
        )


def scheduled(output: Any) -> Iterator[Scheduled]:
    """All requests of a step. ``fresh``: their block list starts anew (first time, or resumed after preemption)."""
    for new in output.scheduled_new_reqs:
        yield Scheduled(new.req_id, tuple(list(ids) for ids in new.block_ids), new.num_computed_tokens, True)
    cached = output.scheduled_cached_reqs
    for req_id, blocks, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
        ids = None if blocks is None else tuple(list(b) for b in blocks)
        yield Scheduled(req_id, ids, computed, req_id in cached.resumed_req_ids)


def preempted(output: Any) -> frozenset[str]:
    """Requests that lost their blocks in this step."""
    return frozenset(output.preempted_req_ids or ())


def layout_preference(device: str, is_mla: bool) -> str | None:
    """The cache layout that suits transfers: heads of a block contiguous. The CPU has only one."""
    if device == "cpu" or is_mla:
        return None
    return "LBHNC" if version() >= (0, 31) else "HND"


def layer_spec(group_spec: Any, layer: str) -> Any:
    """The cache spec of one layer: groups of layers that differ in size hold one for each."""
    return getattr(group_spec, "kv_cache_specs", {}).get(layer, group_spec)


def cpu_isa(layer: Any) -> str | None:
    """Which kernels an attention layer of the CPU backend uses; None for other layers. 0.28 keeps it with the impl."""
    return getattr(layer, "isa", None) or getattr(getattr(layer, "impl", None), "isa", None)


def evict(block_pool: Any, block_ids: set[int]) -> None:
    """Take blocks out of the engine's prefix cache; who uses them now keeps them."""
    block_pool.evict_blocks(block_ids)


def takes_layer(update: Any) -> bool:
    """Whether an attention backend's ``do_kv_cache_update`` is the one of K and V (with its layer), not of MLA."""
    return "layer" in signature(update).parameters
