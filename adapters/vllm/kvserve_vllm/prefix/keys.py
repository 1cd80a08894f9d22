"""Names of a prompt's cells in a store: everything that their KV depends on. And which models have such cells."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from blake3 import blake3
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from kvserve_core.errors import UnsupportedSpecError
from kvserve_core.prefix import cell_keys, check_storable, namespace
from kvserve_core.spec import SEGMENT_TOKENS, KVSpec, Shard
from kvserve_vllm.spec import ServedModel, Stored

Keys = tuple[tuple[str, ...], ...]
"""One key for each whole cell, by rank."""
SCALES = ("_k_scale", "_v_scale")
"""Where vLLM's attention layers hold the scales of a quantized cache, which the cache itself does not."""


def prompt_keys(request: Any, kv: KVSpec, shards: Sequence[Shard], scales: Sequence[str | None]) -> Keys | None:
    """The keys of a prompt's whole cells. None for prompts given as embeddings: their values are not to be named.

    scales: of each rank, see :func:`kv_scales`.
    """
    if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
        return None
    depends_on = {
        "lora": request.lora_request.lora_name if request.lora_request else None,
        "salt": request.cache_salt or None,
    }
    tokens, beside = list(request.prompt_token_ids), media(request)
    spaces = [namespace(kv, shard, kv_scales=scale, **depends_on) for shard, scale in zip(shards, scales, strict=True)]
    return tuple(tuple(cell_keys(tokens, space, per_token=beside)) for space in spaces)


def media(request: Any) -> dict[int, str]:
    """The hash of each image, sound or video, by the token where it begins: placeholders are the same for all."""
    return {int(feature.mm_position.offset): str(feature.identifier) for feature in request.mm_features or ()}


def kv_scales(layers: Iterable[Stored], modules: Mapping[str, Any]) -> str | None:
    """A digest of the scales of this rank's quantized layers, None where there are none."""
    digest, found = blake3(), False
    for stored in layers:
        module = modules.get(stored.name)
        if module is None or stored.is_state or not stored.is_packed:
            continue
        for name in SCALES:
            scale = getattr(module, name, None)
            if scale is not None:
                digest.update(repr((stored.layer, name, scale.detach().float().cpu().tolist())).encode())
                found = True
    return digest.hexdigest()[:32] if found else None


def check_windows(model: ServedModel) -> None:
    """Whether the engine knows that of a sliding window no more than the window is loaded.

    Raises:
        UnsupportedSpecError: it does not; the message says what to leave out.
    """
    windows = {layer for group in model.kv.groups if group.window is not None for layer in group.layers}
    if full := [s.name for s in model.layers if s.layer in windows and not isinstance(s.spec, SlidingWindowSpec)]:
        raise UnsupportedSpecError(
            f"layer {full[0]!r} has a sliding window, but the engine caches it as full attention, and would take blocks"
            " of which only the window was loaded for whole ones; leave out '--disable-hybrid-kv-cache-manager'"
        )


def check_prefixes(model: ServedModel, cache_config: Any) -> None:
    """Whether prefixes of this model can be kept cell by cell.

    Raises:
        UnsupportedSpecError: they cannot; the message says why and what to do.
    """
    check_storable(model.kv)
    if SEGMENT_TOKENS % model.whole_blocks:
        raise UnsupportedSpecError(
            f"blocks of {model.whole_blocks} tokens are only kept whole, and {SEGMENT_TOKENS}, the tokens of a cell, is"
            " no multiple of that; set '--block-size' to one that divides it"
        )
    check_windows(model)
    if getattr(cache_config, "calculate_kv_scales", False) and any(stored.is_packed for stored in model.layers):
        raise UnsupportedSpecError(
            "with '--calculate-kv-scales' each process scales its quantized cache differently, so that stored prefixes"
            " would be read wrongly; use scales from the checkpoint"
        )
