"""Tiny random models as Hugging Face folders, the same ones each time. Weights are wide, so that tokens differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

VOCAB = 1024
WINDOW = 64
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.12,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def llama() -> Any:
    """Three layers, two KV heads of 64."""
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, head_dim=64, **COMMON))


def gemma3() -> Any:
    """Two sliding layers and a full one."""
    types = ["sliding_attention", "sliding_attention", "full_attention"]
    config = Gemma3TextConfig(
        num_hidden_layers=3, head_dim=64, sliding_window=WINDOW, layer_types=types, query_pre_attn_scalar=64, **COMMON
    )
    return Gemma3ForCausalLM(config)


def deepseek() -> Any:
    """MLA without experts; latent and rope sizes are the only ones the CPU kernel takes.

    With YaRN, as every released DeepSeek: without it vLLM's CPU kernel rotates keys at wrong strides when it prefills,
    so that its own prefill and decode disagree.
    """
    common = {**COMMON, "num_key_value_heads": 4}
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    config = DeepseekV2Config(
        num_hidden_layers=2,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        head_dim=64,
        n_routed_experts=2,
        n_shared_experts=1,
        num_experts_per_tok=1,
        first_k_dense_replace=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=64,
        rope_parameters=yarn,
        **common,
    )
    return DeepseekV2ForCausalLM(config)


MODELS: dict[str, Callable[[], Any]] = {"llama": llama, "gemma3": gemma3, "deepseek": deepseek}


def save(name: str, folder: Path, seed: int = 7) -> Path:
    """Write the model to ``folder/name``; another seed gives other weights of the same shape."""
    torch.manual_seed(seed)
    target = folder / name
    MODELS[name]().to(torch.float32).save_pretrained(target)
    return target
