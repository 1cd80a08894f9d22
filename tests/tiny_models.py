"""Tiny random models for tests. Weights are wide (std 0.12) so that attention is not flat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from kvserve_core.spec import DType
from kvserve_hf.engine import Engine

VOCAB = 211
WINDOW = 16
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.12,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,  # tied, a random model repeats its input for ever
}


def llama_config() -> LlamaConfig:
    """Three layers, two KV heads."""
    return LlamaConfig(num_hidden_layers=3, **SHAPE)


def gemma_config() -> Gemma3TextConfig:
    """Sliding, sliding, full."""
    types = ["sliding_attention", "sliding_attention", "full_attention"]
    return Gemma3TextConfig(
        num_hidden_layers=3, layer_types=types, sliding_window=WINDOW, query_pre_attn_scalar=16, **SHAPE
    )


def build(model_class: Callable[[Any], Any], config: Any, kv_dtype: DType) -> Engine:
    """An engine around random weights, the same ones each time."""
    torch.manual_seed(7)
    return Engine(model_class(config), None, "tiny", kv_dtype)


def make(name: str, kv_dtype: DType) -> Engine:
    """``llama`` or ``gemma``."""
    if name == "llama":
        return build(LlamaForCausalLM, llama_config(), kv_dtype)
    return build(Gemma3ForCausalLM, gemma_config(), kv_dtype)
