"""Rotary embeddings as a :class:`RopeSpec`, from a model's config.

Frequencies enter the fingerprint of a KVSpec, so they must be equal on every machine: they are computed in double
precision and rounded to float32 once. (float32 ``pow`` differs in its last bit between CPUs.)
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Mapping
from typing import Any, Literal

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from kvserve_core.spec import RopeSpec

Style = Literal["neox", "gptj"]


def rope_spec(config: Any, layer_type: str, head_dim: int) -> RopeSpec | None:
    """The rotary embedding of the layers of one type, None where there is none or it is not a fixed rotation.

    ``dynamic`` and ``longrope`` change their frequencies with the length of a request, so no spec can name them.
    """
    given = getattr(config, "rope_parameters", None) or {}
    params = given.get(layer_type, given) if isinstance(given.get(layer_type), Mapping) else given
    style = rope_style(config)
    if not params or style is None:
        return None
    factor = params.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    rotary_dim = int(head_dim * factor)
    scaled = (
        _scaled(default_inv_freq(params["rope_theta"], rotary_dim), params, config) if "rope_theta" in params else None
    )
    if scaled is None:
        return None
    inv_freq, attention = scaled
    return RopeSpec(tuple(map(_f32, inv_freq)), rotary_dim, style, attention)


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


def rope_style(config: Any) -> Style | None:
    """Whether the model rotates halves (``neox``) or pairs (``gptj``), read off its own ``rotate_half``."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    rotate = getattr(sys.modules[model_class.__module__], "rotate_half", None) if model_class else None
    if rotate is None:
        return None
    turned = rotate(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist()
    known: dict[tuple[float, ...], Style] = {(-3.0, -4.0, 1.0, 2.0): "neox", (-2.0, 1.0, -4.0, 3.0): "gptj"}
    return known.get(tuple(turned))


def _scaled(base: list[float], params: Mapping[str, Any], config: Any) -> tuple[list[float], float] | None:
    kind = params.get("rope_type", "default")
    if kind == "default":
        return base, 1.0
    if kind == "linear":
        return [f / params["factor"] for f in base], 1.0
    if kind == "llama3":
        return llama3_inv_freq(base, params), 1.0
    if kind == "yarn" and "rope_theta" in (config.rope_parameters or {}):
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        inv_freq, attention = ROPE_INIT_FUNCTIONS["yarn"](config)
        return inv_freq.tolist(), float(attention)
    return None


def _f32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])
