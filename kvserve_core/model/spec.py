"""A model's :class:`KVSpec` from its Hugging Face config as plain values: no engine and no transformers in it.

Two engines that serve the same folder build equal specs, so their fingerprints agree: groups are told apart by what
the model's layers are, never by how an engine pools them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from kvserve_core.errors import UnsupportedSpecError
from kvserve_core.model.rope import SLIDING, rope_spec
from kvserve_core.spec import DType, KVSpec, LayerGroup, PlanePart, PlaneSpec, RopeSpec

FULL = "full_attention"
Config = Mapping[str, Any]


def kv_spec(config: Config, dtype: DType, model_id: str, *, without: Collection[int] = ()) -> KVSpec:
    """The token cache of a model: planes ``k`` (with its RoPE) and ``v``, or MLA's ``latent`` and ``rope``.

    Layers that differ in window or RoPE are groups of their own, numbered by their first layer. ``config`` is that of
    the text model or holds it, in the spelling of transformers 4 or 5; ``without``: layers whose cache is not one of
    tokens (state-space layers), which an adapter adds as it stores them.

    Raises:
        UnsupportedSpecError: layers that share a cache, or of a type that is not known.
    """
    text = text_config(config)
    _refuse_shared(text)
    members: dict[tuple[int | None, RopeSpec | None], list[int]] = {}
    for layer, kind in enumerate(layer_types(text, without)):
        if layer not in without:
            rope = rope_spec(text, kind, _rope_dim(text)) if _has_rope(text, layer) else None
            window = int(text["sliding_window"]) if kind == SLIDING else None
            members.setdefault((window, rope), []).append(layer)
    groups = [
        LayerGroup(i, tuple(layers), _planes(text, rope, dtype), window)
        for i, ((window, rope), layers) in enumerate(members.items())
    ]
    return KVSpec(model_id, tuple(groups))


def text_config(config: Config) -> Config:
    """The part of a config that describes the decoder."""
    for name in ("text_config", "llm_config", "thinker_config"):
        if isinstance(config.get(name), Mapping):
            return text_config(config[name])
    return config


def layer_types(config: Config, without: Collection[int] = ()) -> list[str]:
    """``full_attention`` or ``sliding_attention`` per layer, inferred as transformers does where it is not given.

    Raises:
        UnsupportedSpecError: a layer of another type that is not in ``without``.
    """
    given = config.get("layer_types")
    default = SLIDING if config.get("sliding_window") and config.get("use_sliding_window", True) else FULL
    types = list(given) if given else [default] * int(config["num_hidden_layers"])
    other = sorted({t for i, t in enumerate(types) if t not in (FULL, SLIDING) and i not in without})
    if other:
        raise UnsupportedSpecError(
            f"model type {config.get('model_type')!r} has layers of type {other}; known are {FULL!r} and {SLIDING!r}"
        )
    return types


def is_mla(config: Config) -> bool:
    """Whether the cache is one latent vector a token (multi-head latent attention)."""
    return bool(text_config(config).get("kv_lora_rank"))


def head_dim(config: Config) -> int:
    """Elements of one K head."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _planes(config: Config, rope: RopeSpec | None, dtype: DType) -> tuple[PlaneSpec, ...]:
    if is_mla(config):
        latent = PlanePart("latent", int(config["kv_lora_rank"]))
        positions = PlanePart("rope", int(config["qk_rope_head_dim"]), rope)
        return PlaneSpec("latent", 1, (latent,), dtype), PlaneSpec("rope", 1, (positions,), dtype)
    heads = int(config.get("num_key_value_heads") or config["num_attention_heads"])
    dim = head_dim(config)
    return (
        PlaneSpec("k", heads, (PlanePart("k", dim, rope),), dtype),
        PlaneSpec("v", heads, (PlanePart("v", int(config.get("v_head_dim") or dim)),), dtype),
    )


def _rope_dim(config: Config) -> int:
    return int(config["qk_rope_head_dim"]) if is_mla(config) else head_dim(config)


def _has_rope(config: Config, layer: int) -> bool:
    # SmolLM3 and others leave some layers without positions: 0 marks such a layer.
    marks = config.get("no_rope_layers")
    return not marks or bool(marks[layer])


def _refuse_shared(config: Config) -> None:
    if config.get("num_kv_shared_layers") or config.get("kv_sharing_modes"):
        raise UnsupportedSpecError(
            f"model type {config.get('model_type')!r} has layers that share a cache, which no plane can name yet"
        )
