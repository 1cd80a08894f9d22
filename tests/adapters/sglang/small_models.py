"""Caches of small models as the core describes them; nothing of SGLang is imported."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvserve_core.model import kv_spec
from kvserve_core.spec import DType, KVSpec
from kvserve_sglang.spec import State, transfer_spec

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_size": 64,
    "rope_theta": 10000.0,
}


def model(name: str = "tiny") -> KVSpec:
    """Two layers of two heads, bfloat16."""
    return kv_spec(CONFIG, DType.BF16, name)


def windowed(tokens: int) -> KVSpec:
    """The same with layers that only look back so far."""
    kv = model()
    return KVSpec(kv.model_id, tuple(replace(group, window=tokens) for group in kv.groups))


def transferred() -> KVSpec:
    """What two servers exchange: the cache, a state of 8 bytes, and an auxiliary row of 32."""
    return transfer_spec(model(), 32, 2, [State("mamba", (1,), 8, 1)])
