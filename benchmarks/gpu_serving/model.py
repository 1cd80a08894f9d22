"""Qwen2.5-7B's geometry with weights that vLLM makes up, and the same shape small enough for a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kvserve_core.model import kv_spec, model_id
from kvserve_core.spec import DType, KVSpec

QWEN: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
TINY = QWEN | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 1024,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write(config: dict[str, Any], folder: Path) -> Path:
    """A model folder: its config, and a file that gives it an identity. Weights are not read from it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"model.norm.weight": torch.ones(8)}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def spec_of(config: dict[str, Any], folder: Path) -> KVSpec:
    """As an engine that serves the folder sees it."""
    dtype = DType.BF16 if config["torch_dtype"] == "bfloat16" else DType.F32
    return kv_spec(config, dtype, model_id(folder))
