"""A model's :class:`KVSpec` from its transformers config: Llama, Qwen, Mistral, Gemma and others of their build."""

from __future__ import annotations

from typing import Any

from kvserve_core.errors import UnsupportedSpecError
from kvserve_core.spec import DType, KVSpec, LayerGroup, PlanePart, PlaneSpec, RopeSpec
from kvserve_hf.rope import rope_spec

SLIDING = "sliding_attention"
FULL = "full_attention"


def kv_spec(model_config: Any, dtype: DType, model_id: str) -> KVSpec:
    """The cache of a model: planes ``k`` (with its RoPE) and ``v``; layers that differ in window or RoPE are groups
    of their own, numbered by their first layer.

    Raises:
        UnsupportedSpecError: a cache that is not one K and one V per layer (MLA, shared layers, state-space layers).
    """
    config = model_config.get_text_config(decoder=True)
    _refuse_other_caches(config)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    members: dict[tuple[int | None, RopeSpec | None], list[int]] = {}
    for layer, kind in enumerate(layer_types(config)):
        window = config.sliding_window if kind == SLIDING else None
        rope = rope_spec(config, kind, dim) if _has_rope(config, layer) else None
        members.setdefault((window, rope), []).append(layer)
    groups = []
    for i, ((window, rope), layers) in enumerate(members.items()):
        k = PlaneSpec("k", heads, (PlanePart("k", dim, rope),), dtype)
        v = PlaneSpec("v", heads, (PlanePart("v", dim),), dtype)
        groups.append(LayerGroup(i, tuple(layers), (k, v), window))
    return KVSpec(model_id, tuple(groups))


def layer_types(config: Any) -> list[str]:
    """``full_attention`` or ``sliding_attention`` per layer, inferred as transformers does where it is not given.

    Raises:
        UnsupportedSpecError: a layer of another type.
    """
    given = getattr(config, "layer_types", None)
    default = SLIDING if getattr(config, "sliding_window", None) else FULL
    types = list(given) if given else [default] * config.num_hidden_layers
    other = sorted(set(types) - {SLIDING, FULL})
    if other:
        raise UnsupportedSpecError(
            f"model type {config.model_type!r} has layers of type {other}; the reference engine takes {FULL!r} and"
            f" {SLIDING!r}"
        )
    return types


def _has_rope(config: Any, layer: int) -> bool:
    # SmolLM3 and others leave some layers without positions: 0 marks such a layer.
    marks = getattr(config, "no_rope_layers", None)
    return not marks or bool(marks[layer])


def _refuse_other_caches(config: Any) -> None:
    latent = bool(getattr(config, "kv_lora_rank", None))
    shared = bool(getattr(config, "num_kv_shared_layers", 0)) or bool(getattr(config, "kv_sharing_modes", None))
    if latent or shared:
        what = "a latent cache (MLA)" if latent else "layers that share a cache"
        raise UnsupportedSpecError(
            f"model type {config.model_type!r} has {what}; the reference engine takes models with one K and one V"
            " cache per layer"
        )
