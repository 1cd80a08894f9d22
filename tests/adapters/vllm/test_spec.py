"""What the connector makes of an engine's configuration, for caches that no CPU engine of the tests can have."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVQuantMode,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvserve_core.deployment import Deployment
from kvserve_core.errors import UnsupportedSpecError
from kvserve_core.pipeline import Pipeline
from kvserve_core.profile import LOSSLESS_PIPELINE
from kvserve_core.settings import Settings
from kvserve_core.spec import DType
from kvserve_vllm import compat
from kvserve_vllm.connector import KVServeConnector
from kvserve_vllm.layout import read
from kvserve_vllm.spec import layer_cache, layer_number, served_model

FULL = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32)
FP8 = replace(FULL, dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)


def config(
    folder: Path, device: str = "cuda", cache_dtype: str = "auto", tp: int = 1, pp: int = 1, dcp: int = 1
) -> Any:
    text = json.loads((folder / "config.json").read_text())
    model = SimpleNamespace(
        hf_config=SimpleNamespace(to_dict=lambda: text), dtype=torch.float32, model=str(folder), revision=None
    )
    parallel = SimpleNamespace(tensor_parallel_size=tp, pipeline_parallel_size=pp, decode_context_parallel_size=dcp)
    return SimpleNamespace(
        model_config=model,
        parallel_config=parallel,
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        device_config=SimpleNamespace(device_type=device),
    )


def caches(specs: Sequence[Any]) -> Any:
    """A group for each spec, in the order of the layers."""
    groups = [KVCacheGroupSpec([f"model.layers.{i}.self_attn.attn"], spec) for i, spec in enumerate(specs)]
    return SimpleNamespace(kv_cache_groups=groups, num_blocks=5)


@pytest.fixture(scope="module")
def llama(folders: dict[str, Path]) -> Path:
    return folders["llama"]


def test_plain_caches_are_planes_of_k_and_v(llama: Path) -> None:
    model = served_model(config(llama), caches([FULL] * 3))
    (group,) = model.kv.groups
    assert [(p.name, p.num_heads, p.dim, p.dtype) for p in group.planes] == [
        ("k", 2, 64, DType.F32),
        ("v", 2, 64, DType.F32),
    ]
    assert model.sendable(100) == 99
    assert model.sendable(1) == 0


def test_layers_of_one_group_may_have_specs_of_their_own(llama: Path) -> None:
    names = [f"model.layers.{i}.self_attn.attn" for i in range(3)]
    specs = dict.fromkeys(names, FULL)
    group = KVCacheGroupSpec(names, UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs=specs))
    model = served_model(config(llama), SimpleNamespace(kv_cache_groups=[group], num_blocks=5))
    assert [(s.layer, s.pool, s.spec) for s in model.layers] == [(i, 0, FULL) for i in range(3)]


def test_quantized_caches_are_bytes_by_token_on_a_gpu(llama: Path) -> None:
    model = served_model(config(llama, cache_dtype="fp8_e4m3"), caches([FP8] * 3))
    (plane,) = model.kv.groups[0].planes
    assert (plane.name, plane.num_heads, plane.dim, plane.dtype) == ("opaque", 2, 128, DType.U8)
    assert model.sendable(100) == 99
    pipeline = Pipeline.build(LOSSLESS_PIPELINE, model.kv, model.shard(0, 0))
    assert pipeline.lossless
    exact = served_model(config(llama), caches([FULL] * 3))
    assert model.kv.fingerprint != exact.kv.fingerprint


def test_quantized_caches_of_the_cpu_only_go_by_whole_blocks(llama: Path) -> None:
    model = served_model(config(llama, device="cpu", cache_dtype="fp8_e4m3"), caches([FP8] * 3))
    assert model.sendable(100) == 96
    other = served_model(config(llama, device="cpu", cache_dtype="fp8_e4m3"), caches([replace(FP8, block_size=64)] * 3))
    assert model.kv.fingerprint != other.kv.fingerprint  # a block of another size holds the same bytes elsewhere


def test_a_deployment_sends_quantized_caches_without_loss_only(llama: Path) -> None:
    model = served_model(config(llama, cache_dtype="fp8_e4m3"), caches([FP8] * 3))
    deployment = Deployment.load(Settings(), model.kv)
    assert set(deployment.pipelines(model.shard(0, 0))) == {"raw", "lossless"}


def test_state_is_one_opaque_cell_a_request(llama: Path) -> None:
    state = MambaSpec(block_size=32, shapes=((4, 3), (2, 8)), dtypes=(torch.float32, torch.bfloat16))
    model = served_model(config(llama, tp=2), caches([FULL, state, FULL]))
    assert [(g.layers, g.unit) for g in model.kv.groups] == [((0, 2), "token"), ((1,), "state")]
    (plane,) = model.kv.groups[1].planes
    assert (plane.num_heads, plane.dim) == (2, 4 * 3 * 4 + 2 * 8 * 2)
    assert model.has_state
    stored = model.layers[1]
    page = torch.randint(0, 255, (5, plane.dim), dtype=torch.uint8)
    cache = layer_cache(stored, page.view(5, 1, 1, plane.dim), model, 5, None)
    assert torch.equal(read(cache.views["opaque"], torch.tensor([3]), [0], 0, 1)[0, 0], page[3])
    assert cache.state_at == -1


def test_shards_follow_ranks_and_stages(llama: Path) -> None:
    model = served_model(config(llama, tp=2, pp=3), caches([FULL] * 3))
    shards = model.everyone()
    assert [(s.layers, s.rank, s.size) for s in shards] == [((i,), r, 2) for i in range(3) for r in range(2)]


def test_layers_of_a_draft_model_are_left_out(llama: Path) -> None:
    model = served_model(config(llama), caches([FULL] * 4))
    assert [s.layer for s in model.layers] == [0, 1, 2]


def test_windows_are_those_of_the_model(folders: dict[str, Path]) -> None:
    sliding = SlidingWindowSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32, sliding_window=64)
    model = served_model(config(folders["gemma3"]), caches([sliding, sliding, FULL]))
    assert [(g.layers, g.window) for g in model.kv.groups] == [((0, 1), 64), ((2,), None)]


@pytest.mark.parametrize(
    ("given", "specs", "message"),
    [
        ({"dcp": 2}, [FULL] * 3, "decode context parallelism"),
        (
            {},
            [
                ChunkedLocalAttentionSpec(
                    block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32, attention_chunk_size=64
                )
            ]
            * 3,
            "known are full and sliding-window attention",
        ),
        ({"cache_dtype": "fp8"}, [FULL, FP8, FULL], "quantized in part"),
        ({"cache_dtype": "nvfp4"}, [replace(FP8, num_head_slots=4)] * 3, "slots of their own"),
        (
            {"pp": 2},
            [FULL, MambaSpec(block_size=32, shapes=((4,),), dtypes=(torch.float32,)), FULL],
            "several pipeline stages",
        ),
    ],
)
def test_what_cannot_be_sent_is_refused_at_start_up(
    llama: Path, given: dict[str, Any], specs: list[Any], message: str
) -> None:
    with pytest.raises(UnsupportedSpecError, match=message):
        served_model(config(llama, **given), caches(specs))


def test_a_consumer_refuses_windows_that_the_engine_caches_as_full_attention(folders: dict[str, Path]) -> None:
    given = config(folders["gemma3"])
    given.kv_transfer_config = SimpleNamespace(
        kv_connector_extra_config={}, is_kv_consumer=True, is_kv_producer=False, kv_role="kv_consumer"
    )
    with pytest.raises(UnsupportedSpecError, match="leave out '--disable-hybrid-kv-cache-manager'"):
        KVServeConnector(given, KVConnectorRole.SCHEDULER, caches([FULL] * 3))


def test_an_old_engine_with_several_pools_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "TransferResults", None)
    with pytest.raises(UnsupportedSpecError, match=r"use vLLM 0\.31 or newer") as error:
        compat.check_groups()
    assert "--disable-hybrid" not in str(error.value)


def test_tiles_of_the_cpu_backend_are_refused(llama: Path) -> None:
    model = served_model(config(llama, device="cpu"), caches([FULL] * 3))
    cache = torch.zeros(5, 2, 32, 128)
    with pytest.raises(UnsupportedSpecError, match="'amx' kernels keep K and V in tiles"):
        layer_cache(model.layers[0], cache, model, 5, "amx")


def test_a_layer_without_a_number_is_refused() -> None:
    assert layer_number("language_model.model.layers.12.self_attn.attn") == 12
    with pytest.raises(UnsupportedSpecError, match="no number"):
        layer_number("encoder.attn")
