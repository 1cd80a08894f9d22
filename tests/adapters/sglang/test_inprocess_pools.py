"""Pools beyond plain caches: fp8, sliding windows, recurrent state; and what is refused, by name."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import inprocess
import numpy as np
import pytest
import torch
from inprocess import LAYERS, MHA, MLA, Pair, mha_pool, mla_pool, pages_of
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.disaggregation.base.conn import StateType
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MambaPool, NoOpMHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from kvserve_core.errors import UnsupportedSpecError
from kvserve_core.spec import DType
from kvserve_sglang import pools

FP8 = torch.float8_e4m3fn
WINDOW = 100


@pytest.mark.parametrize(("make", "config"), [(mha_pool, MHA), (mla_pool, MLA)], ids=["mha", "mla"])
def test_an_fp8_pool_arrives_byte_for_byte_as_an_opaque_plane(make: Any, config: dict[str, Any]) -> None:
    total, room = 300, 50
    source, target = pages_of(total, 1, 16), pages_of(total, 2, 16)
    with Pair(partial(make, dtype=FP8), config, 16) as pair:
        kv = pair.prefill.manager.setup.model
        assert [(p.name, p.dtype) for p in kv.groups[0].planes] == [("opaque", DType.U8)]
        (sender,), (receiver,) = pair.request(room, target)
        pair.write_aux(room)
        sender.init(len(source), aux_index=1)
        sender.send(source, num_kv_tokens=total)
        assert pair.settle(receiver, sender) == ["Success", "Success"]
        assert pair.same(source, target, total)


def swa_pool(page_size: int, ranks: int) -> SWAKVPool:
    del ranks
    layers = {"swa_attention_layer_ids": [0, 2], "full_attention_layer_ids": [1]}
    size = inprocess.SIZE
    return SWAKVPool(size, size // 2, page_size, torch.bfloat16, inprocess.HEADS, inprocess.DIM, **layers, device="cpu")


@pytest.mark.parametrize("page_size", [1, 16])
def test_sliding_window_layers_send_their_last_tokens_from_a_pool_of_their_own(page_size: int) -> None:
    total, room = 700, 51
    config = MHA | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 101}
    source, target = pages_of(total, 1, page_size), pages_of(total, 2, page_size)
    start = (total - WINDOW) // page_size * page_size  # SGLang lists whole pages
    windows = [pages_of(total - start, seed, page_size, inprocess.SIZE // 2) for seed in (3, 4)]
    with Pair(swa_pool, config, page_size, window=WINDOW) as pair:
        (sender,), (receiver,) = pair.request(room, target, states=[windows[1]])
        pair.write_aux(room)
        sender.init(len(source), aux_index=1)
        sender.describe(total, inprocess.OPTIONS)
        half = 320 // page_size
        sender.send(source[:half], num_kv_tokens=320)
        sender.send(source[half:], [windows[0]], num_kv_tokens=total - 320)
        assert pair.settle(receiver, sender) == ["Success", "Success"]
        full, sliding = ((p.pool.full_kv_pool, p.pool.swa_kv_pool) for p in (pair.prefill, pair.decode))
        assert equal(full[0], sliding[0], source, target, page_size, range(total))
        assert equal(full[1], sliding[1], *windows, page_size, range(total - WINDOW - start, total - start))


def equal(mine: Any, theirs: Any, source: np.ndarray, target: np.ndarray, page_size: int, tokens: range) -> bool:
    rows = [inprocess.slots(p, page_size, tokens.stop)[tokens.start :] for p in (source, target)]
    pairs = zip(inprocess.tensors(mine), inprocess.tensors(theirs), strict=True)
    return all(torch.equal(a[rows[0]], b[rows[1]]) for a, b in pairs)


def hybrid_pool(page_size: int, ranks: int) -> HybridLinearKVPool:
    sizes = {"intermediate_size": 64, "n_groups": 2, "num_heads": 4, "head_dim": 16, "state_size": 8, "conv_kernel": 4}
    shape = Mamba2StateShape.create(tp_world_size=ranks, **sizes)
    params = Mamba2CacheParams(shape=shape, layers=[0, 2])
    state = MambaPool(size=16, spec_state_size=0, cache_params=params, mamba_layer_ids=[0, 2], device="cpu")
    return HybridLinearKVPool(
        size=inprocess.SIZE,
        dtype=torch.bfloat16,
        page_size=page_size,
        head_num=inprocess.HEADS // ranks,
        head_dim=inprocess.DIM,
        full_attention_layer_ids=[1],
        device="cpu",
        mamba_pool=state,
    )


HYBRID = MHA | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}


@pytest.mark.parametrize("ranks", [(1, 1), (2, 2)], ids=["1to1", "2to2"])
def test_recurrent_state_arrives_byte_for_byte(ranks: tuple[int, int]) -> None:
    total, room = 300, 52
    source, target = pages_of(total, 1, 16), pages_of(total, 2, 16)
    rows = (np.array([3], np.int32), np.array([7], np.int32))
    with Pair(hybrid_pool, HYBRID, 16, ranks=ranks) as pair:
        for i, side in enumerate(pair.prefills):
            for j, state in enumerate(states(side.pool)):
                inprocess.fill(state, 100 * i + j)
        senders, receivers = pair.request(room, target, states=[rows[1]])
        pair.write_aux(room)
        for sender in senders:
            sender.init(len(source), aux_index=1)
            sender.send(source, [rows[0]], num_kv_tokens=total)
        assert set(pair.settle(*receivers, *senders)) == {"Success"}
        assert pair.same(source, target, total)
        for mine, theirs in zip(pair.prefills, pair.decodes, strict=True):
            for a, b in zip(states(mine.pool), states(theirs.pool), strict=True):
                assert torch.equal(bits(a)[:, 3], bits(b)[:, 7])


def states(pool: HybridLinearKVPool) -> list[torch.Tensor]:
    cache = pool.mamba_pool.mamba_cache
    return [*cache.conv, cache.temporal]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


def test_recurrent_state_over_another_number_of_ranks_is_refused() -> None:
    target = pages_of(300, 2, 16)
    with Pair(hybrid_pool, HYBRID, 16, ranks=(2, 1)) as pair:
        _, (receiver,) = pair.request(53, target, states=[np.array([7], np.int32)])
        assert pair.settle(receiver) == ["Failed"]
        assert "state over tensor-parallel ranks is '2' here and '1' there" in inprocess.failure(receiver)


def test_servers_with_other_metadata_buffers_are_told_so() -> None:
    target = pages_of(300, 2, 16)
    with Pair(mha_pool, MHA, 16, hidden=(16, 32)) as pair:
        (sender,), (receiver,) = pair.request(54, target)
        assert pair.settle(sender, receiver) == ["Failed", "Failed"]
        for end in (sender, receiver):
            assert "metadata buffers" in inprocess.failure(end)


@pytest.mark.parametrize("kind", sorted(set(StateType) - {StateType.SWA, StateType.MAMBA}), ids=lambda k: k.value)
def test_other_state_components_are_refused_by_name(kind: StateType) -> None:
    args = SimpleNamespace(state_types=[kind], state_layer_ids=[[]], state_item_lens=[[]])
    with pytest.raises(UnsupportedSpecError, match=kind.value):
        pools.states(args, 1)


def test_pools_and_layouts_that_are_not_known_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedSpecError, match="NoOpMHATokenToKVPool"):
        pools.check_pool(NoOpMHATokenToKVPool(16, 1, torch.bfloat16, 4, 64, LAYERS, "cpu", False))
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    with pytest.raises(UnsupportedSpecError, match="hnd"):
        pools.check_pool(mha_pool(16, 1))


def test_a_pool_that_does_not_hold_what_the_config_says_is_refused() -> None:
    with pytest.raises(UnsupportedSpecError, match=r"pool holds \(4, 64"), Pair(mha_pool, MHA | {"head_dim": 32}, 16):
        pass
