"""KVSpec from configs."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from kvserve_core import model as core_model
from kvserve_core.errors import UnsupportedSpecError
from kvserve_core.model.rope import rope_spec, rope_style
from kvserve_core.model.rope_styles import HALVES, PAIRS
from kvserve_core.spec import DType
from kvserve_hf.spec import kv_spec
from tiny_models import SHAPE, WINDOW, gemma_config, llama_config


def test_llama_is_one_group() -> None:
    spec = kv_spec(llama_config(), DType.BF16, "id")
    (group,) = spec.groups
    assert (group.layers, group.window, spec.model_id) == ((0, 1, 2), None, "id")
    assert [(p.name, p.num_heads, p.dim, p.dtype) for p in group.planes] == [
        ("k", 2, 16, DType.BF16),
        ("v", 2, 16, DType.BF16),
    ]
    rope = group.plane("k").parts[0].rope
    assert rope is not None
    assert (rope.style, rope.rotary_dim, rope.attn_factor) == ("neox", 16, 1.0)
    assert group.plane("v").parts[0].rope is None


def test_gemma_has_a_windowed_group_with_a_rope_of_its_own() -> None:
    sliding, full = kv_spec(gemma_config(), DType.BF16, "id").groups
    assert (sliding.id, sliding.layers, sliding.window) == (0, (0, 1), WINDOW)
    assert (full.id, full.layers, full.window) == (1, (2,), None)
    assert sliding.plane("k").parts[0].rope != full.plane("k").parts[0].rope


@pytest.mark.parametrize(
    ("model_class", "config"), [(LlamaForCausalLM, llama_config), (Gemma3ForCausalLM, gemma_config)]
)
def test_frequencies_are_those_of_the_model(model_class: Any, config: Any) -> None:
    model = model_class(config())
    for group in kv_spec(model.config, DType.BF16, "id").groups:
        kind = "sliding_attention" if group.window else "full_attention"
        embedding = model.model.rotary_emb
        expected = getattr(embedding, f"{kind}_inv_freq", None)
        rope = group.plane("k").parts[0].rope
        assert rope is not None
        torch.testing.assert_close(torch.tensor(rope.inv_freq), embedding.inv_freq if expected is None else expected)


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
YARN_DEEPSEEK = {**YARN, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.5, "beta_fast": 16, "beta_slow": 2}


@pytest.mark.parametrize("params", [LLAMA3, YARN, YARN_DEEPSEEK, LINEAR])
def test_scaled_frequencies_are_those_of_the_model(params: dict[str, Any]) -> None:
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, rope_parameters=dict(params), **SHAPE))
    rope = rope_spec(model.config.to_dict(), "full_attention", 16)
    assert rope is not None
    torch.testing.assert_close(torch.tensor(rope.inv_freq), model.model.rotary_emb.inv_freq)
    assert rope.attn_factor == pytest.approx(model.model.rotary_emb.attention_scaling)


def test_a_rope_that_depends_on_length_is_left_out() -> None:
    params = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    spec = kv_spec(LlamaConfig(num_hidden_layers=1, rope_parameters=params, **SHAPE), DType.BF16, "id")
    assert spec.groups[0].plane("k").parts[0].rope is None


def test_pairs_are_told_from_halves() -> None:
    rope = rope_spec(CohereConfig(num_hidden_layers=1, **SHAPE).to_dict(), "full_attention", 16)
    assert rope is not None
    assert rope.style == "gptj"


def test_layers_without_positions_are_a_group_of_their_own() -> None:
    config = SmolLM3Config(num_hidden_layers=4, no_rope_layers=[1, 0, 1, 0], **SHAPE)
    groups = kv_spec(config, DType.BF16, "id").groups
    assert [(g.layers, g.plane("k").parts[0].rope is None) for g in groups] == [((0, 2), False), ((1, 3), True)]


def test_windows_of_other_families() -> None:
    assert (
        kv_spec(MistralConfig(num_hidden_layers=2, sliding_window=32, **SHAPE), DType.BF16, "").groups[0].window == 32
    )
    off = Qwen2Config(
        num_hidden_layers=2, use_sliding_window=False, **{k: v for k, v in SHAPE.items() if k != "head_dim"}
    )
    group = kv_spec(off, DType.BF16, "").groups[0]
    assert (group.window, group.plane("k").dim) == (None, 48 // 4)
    assert kv_spec(Qwen3Config(num_hidden_layers=2, **SHAPE), DType.BF16, "").groups[0].plane("v").dim == 16


def test_other_caches_are_refused_with_their_reason() -> None:
    with pytest.raises(UnsupportedSpecError, match="latent cache"):
        kv_spec(DeepseekV3Config(num_hidden_layers=1), DType.BF16, "id")
    config = llama_config()
    config.layer_types = ["linear_attention"] * 3
    with pytest.raises(UnsupportedSpecError, match="linear_attention"):
        kv_spec(config, DType.BF16, "id")


def test_the_style_of_every_known_model_type_is_that_of_its_code() -> None:
    """Types whose module has no ``rotate_half`` rotate with complex numbers, which turns pairs."""
    turned = {mt: _rotated(mt) for mt in HALVES | PAIRS}
    expected = {mt: (-3.0, -4.0, 1.0, 2.0) if mt in HALVES else (-2.0, 1.0, -4.0, 3.0) for mt in turned}
    # DeepSeek's code reorders each head's pairs into halves before it rotates; engines rotate pairs where they are.
    for name in ("deepseek_v3", "deepseek_v32"):
        assert (turned.pop(name), rope_style(name)) == ((-3.0, -4.0, 1.0, 2.0), "gptj")
    assert {mt: t for mt, t in turned.items() if t is not None and t != expected[mt]} == {}
    assert sum(t is not None for t in turned.values()) > 60
    assert rope_style("no_such_model") is None


def _rotated(model_type: str) -> tuple[float, ...] | None:
    config_class = CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else None  # noqa: SIM401  # no .get there
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(config_class, None) if config_class else None
    rotate = getattr(sys.modules[model_class.__module__], "rotate_half", None) if model_class else None
    return tuple(rotate(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist()) if rotate else None


def test_the_spelling_of_transformers_4_gives_the_same_spec() -> None:
    new = {**SHAPE, "num_hidden_layers": 2, "model_type": "gemma3_text", "sliding_window": 8}
    new["layer_types"] = ["sliding_attention", "full_attention"]
    old = {**new, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"type": "linear", "factor": 8.0}}
    new["rope_parameters"] = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    }
    specs = [core_model.kv_spec({"text_config": config}, DType.BF16, "id") for config in (old, new)]
    assert specs[0].fingerprint == specs[1].fingerprint
    assert all(g.plane("k").parts[0].rope is not None for g in specs[0].groups)


def test_mla_has_a_latent_and_a_rope_plane() -> None:
    config = DeepseekV2Config(num_hidden_layers=2, kv_lora_rank=512, qk_rope_head_dim=64).to_dict()
    (group,) = core_model.kv_spec(config, DType.BF16, "id").groups
    assert [(p.name, p.num_heads, p.dim) for p in group.planes] == [("latent", 1, 512), ("rope", 1, 64)]
    rope = group.plane("rope").parts[0].rope
    assert rope is not None
    assert (rope.rotary_dim, rope.style) == (64, "gptj")


def test_state_layers_are_left_to_the_adapter() -> None:
    config = {**SHAPE, "num_hidden_layers": 3, "model_type": "llama", "rope_theta": 1e4}
    config["layer_types"] = ["full_attention", "mamba", "full_attention"]
    with pytest.raises(UnsupportedSpecError, match="mamba"):
        core_model.kv_spec(config, DType.BF16, "id")
    assert core_model.kv_spec(config, DType.BF16, "id", without={1}).groups[0].layers == (0, 2)


def test_the_fingerprint_is_stable() -> None:
    """It is part of stored frames and of negotiation: a change here breaks both."""
    assert kv_spec(llama_config(), DType.BF16, "tiny").fingerprint == LLAMA_FINGERPRINT
    assert kv_spec(gemma_config(), DType.BF16, "tiny").fingerprint == GEMMA_FINGERPRINT
    assert kv_spec(llama_config(), DType.F16, "tiny").fingerprint != LLAMA_FINGERPRINT


LLAMA_FINGERPRINT = "2567fb2daea9c6f7b603d7f4909f9f6f6b6a1679bc593102660afa91f7ede9da"
GEMMA_FINGERPRINT = "471bcd03667301904610f95ced14df14b31d2322ec02af2317e2f8d326b01bb0"
