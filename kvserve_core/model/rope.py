"""Rotary embeddings as a :class:`RopeSpec`, from a model's config as plain values.

Frequencies enter the fingerprint of a KVSpec, so they must be equal on every machine and engine: they are computed in
double precision and rounded to float32 once. (float32 ``pow`` differs in its last bit between CPUs.)
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any, Literal

from kvserve_core.model.rope_styles import HALVES, PAIRS
from kvserve_core.spec import RopeSpec

Style = Literal["neox", "gptj"]
Scaled = tuple[list[float], float]
"""Inverse frequencies and the factor on cosine and sine."""
SLIDING = "sliding_attention"


def rope_spec(config: Mapping[str, Any], layer_type: str, head_dim: int) -> RopeSpec | None:
    """The rotary embedding of the layers of one type, None where there is none or it is not a known fixed rotation.

    ``dynamic`` and ``longrope`` change their frequencies with the length of a request, so no spec can name them.
    """
    style = rope_style(str(config.get("model_type", "")))
    params = rope_parameters(config, layer_type)
    if style is None or params.get("rope_theta") is None:
        return None
    factor = params.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    rotary_dim = int(head_dim * factor)
    scaled = _scaled(params, rotary_dim, config.get("max_position_embeddings"))
    if scaled is None:
        return None
    inv_freq, attention = scaled
    return RopeSpec(tuple(map(_f32, inv_freq)), rotary_dim, style, attention)


def rope_style(model_type: str) -> Style | None:
    """Whether a model type rotates halves (``neox``) or pairs (``gptj``); None for one that is not in the tables."""
    if model_type in PAIRS:
        return "gptj"
    return "neox" if model_type in HALVES else None


def rope_parameters(config: Mapping[str, Any], layer_type: str) -> dict[str, Any]:
    """The parameters of one layer type in the spelling of transformers 5, from either spelling; empty without RoPE."""
    given = config.get("rope_parameters") or {}
    if given:
        nested = given.get(layer_type)
        return dict(nested if isinstance(nested, Mapping) else given)
    if layer_type == SLIDING and config.get("rope_local_base_freq"):
        return {"rope_type": "default", "rope_theta": config["rope_local_base_freq"]}
    if config.get("rope_theta") is None:
        return {}
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    return {**scaling, "rope_type": kind, "rope_theta": config["rope_theta"]}


def default_inv_freq(theta: float, rotary_dim: int) -> list[float]:
    """``theta^(-2i / rotary_dim)``: RoFormer, https://arxiv.org/abs/2104.09864, section 3.2.2."""
    return [theta ** (-2.0 * i / rotary_dim) for i in range(rotary_dim // 2)]


def llama3_inv_freq(inv_freq: list[float], params: Mapping[str, Any]) -> list[float]:
    """Llama 3.1: long wavelengths divided by ``factor``, those between the two bounds blended."""
    low, high = params["low_freq_factor"], params["high_freq_factor"]
    length, factor = params["original_max_position_embeddings"], params["factor"]

    def one(f: float) -> float:
        turns: float = length * f / (2 * math.pi)
        blend: float = min(1.0, max(0.0, (turns - low) / (high - low)))
        return (1 - blend) * f / float(factor) + blend * f

    return [one(f) for f in inv_freq]


def yarn(params: Mapping[str, Any], rotary_dim: int, max_positions: int | None) -> Scaled:
    """YaRN, https://arxiv.org/abs/2309.00071, section 3: low frequencies interpolated, high ones kept."""
    theta = float(params["rope_theta"])
    original = float(params.get("original_max_position_embeddings") or max_positions or 2048)
    factor = float(params.get("factor") or (max_positions or original) / original)
    low, high = (
        rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (params.get("beta_fast") or 32, params.get("beta_slow") or 1)
    )
    if params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    width = (high - low) or 0.001
    kept = [1 - min(1.0, max(0.0, (i - low) / width)) for i in range(rotary_dim // 2)]
    base = default_inv_freq(theta, rotary_dim)
    return [f / factor * (1 - k) + f * k for f, k in zip(base, kept, strict=True)], _yarn_attention(params, factor)


def _yarn_attention(params: Mapping[str, Any], factor: float) -> float:
    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])
    if params.get("mscale") and params.get("mscale_all_dim"):
        return scale(params["mscale"]) / scale(params["mscale_all_dim"])
    return scale(1.0)


def _scaled(params: Mapping[str, Any], rotary_dim: int, max_positions: int | None) -> Scaled | None:
    kind = params.get("rope_type", "default")
    base = default_inv_freq(params["rope_theta"], rotary_dim)
    if kind == "default":
        return base, 1.0
    if kind == "linear":
        return [f / params["factor"] for f in base], 1.0
    if kind == "llama3":
        return llama3_inv_freq(base, params), 1.0
    if kind == "yarn":
        return yarn(params, rotary_dim, max_positions)
    return None


def _f32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])
