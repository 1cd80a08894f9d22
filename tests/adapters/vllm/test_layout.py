"""Views of cache tensors, on tensors made by vLLM's own helpers for every physical layout it has."""

from __future__ import annotations

from math import prod

import pytest
import torch
from torch import Tensor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheTensor, MLAAttentionSpec, create_kv_cache_views
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvserve_core.errors import UnsupportedSpecError
from kvserve_vllm import layout
from kvserve_vllm.layout import Cell, Views, read, write

BLOCKS, HEADS, TOKENS, DIM, LAYERS = 7, 4, 16, 8, 3
CELL = Cell(HEADS, DIM, DIM)
ORDERS = list(KVCacheLayout)


def views_of(order: KVCacheLayout, spec: FullAttentionSpec) -> list[Tensor]:
    page = spec.num_heads * spec.block_size * spec.state_content_size_bytes
    outer = order.is_layer_compact
    layer_stride, block_stride = (page * BLOCKS, page) if outer else (page, page * LAYERS)
    if order is KVCacheLayout.LHBNC:
        block_stride = page // spec.num_heads
    if order is KVCacheLayout.BHLNC:
        layer_stride = page // spec.num_heads
    raw = torch.zeros(page * BLOCKS * LAYERS, dtype=torch.int8)
    tensor = KVCacheTensor(raw.numel(), [f"layers.{i}" for i in range(LAYERS)], layer_stride, block_stride)
    return create_kv_cache_views(raw, spec, BLOCKS, order, tensor)


def dense_spec() -> FullAttentionSpec:
    return FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=DIM, dtype=torch.float32)


def fill(cache: Tensor) -> Tensor:
    """Every element its own number, so that each one that is moved is told from all others."""
    cache.copy_(torch.arange(prod(cache.shape), dtype=cache.dtype).view(cache.shape))
    return cache


def token(cache: Tensor, blocks: list[int], head: int, at: int) -> Tensor:
    return cache[blocks[at // TOKENS], head, at % TOKENS]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.name)
def test_dense_views_read_the_same_in_every_physical_order(order: KVCacheLayout) -> None:
    for cache in views_of(order, dense_spec()):
        views = layout.dense(fill(cache), CELL)
        blocks, heads = [5, 2, 6], [1, 2]
        k = read(views["k"], torch.tensor(blocks), heads, 3, 40)
        v = read(views["v"], torch.tensor(blocks), heads, 3, 40)
        assert k.shape == v.shape == (2, 37, DIM)
        for h, head in enumerate(heads):
            for at in (3, 15, 16, 39):
                assert torch.equal(torch.cat([k[h, at - 3], v[h, at - 3]]), token(cache, blocks, head, at))


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.name)
def test_what_is_written_is_read_back_and_nothing_else_changes(order: KVCacheLayout) -> None:
    cache, other, _ = views_of(order, dense_spec())
    fill(cache), fill(other)
    before, beside = cache.clone(), other.clone()
    views = layout.dense(cache, CELL)
    x = -torch.rand(2, 37, DIM) - 1
    write(views["k"], [5, 2, 6], [1, 3], 3, x)
    assert torch.equal(read(views["k"], torch.tensor([5, 2, 6]), [1, 3], 3, 40), x)
    assert int((cache != before).sum()) == x.numel()
    assert torch.equal(other, beside)


def test_unaligned_writes_touch_only_their_tokens() -> None:
    view = torch.zeros(BLOCKS, HEADS, TOKENS, DIM)
    for start, stop in [(0, 1), (5, 9), (15, 17), (0, 16), (16, 33), (3, 48), (31, 32)]:
        view.zero_()
        write(view, [4, 1, 3][start // TOKENS :], [0, 1, 2, 3], start % TOKENS, torch.ones(HEADS, stop - start, DIM))
        got = read(view, torch.tensor([4, 1, 3]), [0, 1, 2, 3], 0, 48)
        assert torch.equal(got[:, start:stop], torch.ones(HEADS, stop - start, DIM))
        assert int((view != 0).sum()) == HEADS * (stop - start) * DIM


def test_the_null_block_is_never_written() -> None:
    view = torch.zeros(BLOCKS, HEADS, TOKENS, DIM)
    write(view, [0, 0, 3], [0, 1, 2, 3], 5, torch.ones(HEADS, 2 * TOKENS, DIM))
    assert int(view[0].sum()) == 0
    assert int(view[3].sum()) == HEADS * 5 * DIM


@pytest.mark.parametrize("axis", [0, 1])
def test_separate_k_and_v_of_older_releases(axis: int) -> None:
    shape = [BLOCKS, TOKENS, HEADS, DIM]
    shape.insert(axis, 2)
    cache = fill(torch.empty(shape))
    views = layout.separate(cache, CELL, BLOCKS)
    for i, name in enumerate(("k", "v")):
        part = cache.select(axis, i)
        assert torch.equal(views[name][3, 1, 7], part[3, 7, 1])


def test_separate_refuses_a_shape_that_reads_both_ways() -> None:
    with pytest.raises(UnsupportedSpecError, match="does not say which axis"):
        layout.separate(torch.empty(2, 2, TOKENS, HEADS, DIM), CELL, 2)


def test_mla_views_of_both_ranks() -> None:
    spec = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=24, dtype=torch.float32)
    cache = fill(views_of(KVCacheLayout.LBNHC, spec)[0])
    three_d = cache.squeeze(1)
    for given in (cache, three_d):
        views = layout.latent(given, 16, 8)
        assert torch.equal(torch.cat([views["latent"][2, 0, 5], views["rope"][2, 0, 5]]), three_d[2, 5])


def test_packed_caches_are_bytes_in_their_own_order() -> None:
    spec = FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=HEADS, head_size=DIM, dtype=torch.uint8, state_content_bytes=2 * DIM + 8
    )
    for order in (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC):
        cache = views_of(order, spec)[1]
        cache.copy_(torch.randint(0, 255, cache.shape, dtype=torch.uint8))
        views: Views = layout.packed(cache, Cell(HEADS, 2 * DIM + 8))
        assert torch.equal(read(views["opaque"], torch.tensor([4, 2]), [2], 9, 20)[0, 8], cache[2, 2, 1])


def test_states_of_a_block_side_by_side_are_one_row_of_bytes() -> None:
    page = torch.randint(0, 255, (BLOCKS, 96), dtype=torch.uint8)
    conv = page[:, :32].view(torch.float32).unflatten(1, (2, 4))
    ssm = page[:, 32:].view(torch.float32).unflatten(1, (4, 4))
    assert torch.equal(layout.state([conv, ssm], 96)["opaque"][:, 0, 0], page)
    assert torch.equal(layout.state(page.view(BLOCKS, 1, 1, 96), 96)["opaque"][:, 0, 0], page)


def test_states_that_lie_apart_are_refused() -> None:
    with pytest.raises(UnsupportedSpecError, match="side by side"):
        layout.state([torch.zeros(BLOCKS, 8), torch.zeros(BLOCKS, 8)], 64)


def test_another_shape_than_the_spec_allows_is_refused() -> None:
    with pytest.raises(UnsupportedSpecError, match=r"shape \(7, 4, 16, 9\), expected \[\*, 4, \*, 16\]"):
        layout.dense(torch.empty(BLOCKS, HEADS, TOKENS, 9), CELL)
