"""The planner covers every element once, on any spec, model and shard, and says no where it cannot."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_engine import dense, hybrid, mla
from kvserve_core.errors import UnsupportedSpecError
from kvserve_core.plan import RAW_CHAIN_ID, ChainTraits, Planned, lanes, plan
from kvserve_core.profile import PipelineSpec
from kvserve_core.spec import KVSpec, Region, Shard, base_planes, whole

CHAIN = {"quantizer": "identity", "codec": "raw"}


def spec(**fields: object) -> PipelineSpec:
    return PipelineSpec.model_validate({"planes": {"*": CHAIN}, "sink_tokens": 0} | fields)


def made(
    s: PipelineSpec,
    kv: KVSpec,
    total: int,
    shard: Shard | None = None,
    head_local: bool = True,
    multiple: int = 1,
    layer_local: bool = False,
) -> list[Planned]:
    traits = ChainTraits(1, head_local, layer_local, multiple)
    return list(plan(s, lanes(s, kv, shard or whole(kv), lambda _: traits), total))


def elements(planned: list[Planned]) -> Counter[tuple[int, str, int, int, int]]:
    return Counter(
        (p.at.group, plane, layer, head, token)
        for p in planned
        for plane in base_planes(p.at.plane)
        for layer in p.at.layers
        for head in p.at.heads
        for token in range(p.at.start, p.at.stop)
    )


def expected(kv: KVSpec, total: int, shard: Shard) -> Counter[tuple[int, str, int, int, int]]:
    out: Counter[tuple[int, str, int, int, int]] = Counter()
    for g in kv.groups:
        tokens = range(1) if g.unit == "state" else range(max(0, total - g.window) if g.window else 0, total)
        for p in g.planes:
            for layer in set(g.layers) & set(shard.layers):
                out.update((g.id, p.name, layer, h, t) for h in shard.heads(p.num_heads) for t in tokens)
    return out


@given(
    kv=st.sampled_from([dense(3, 2, 8), dense(2, 4, 8, window=70), mla(2), hybrid(2, 8)]),
    total=st.integers(1, 700),
    block=st.integers(1, 4),
    sinks=st.integers(0, 300),
    recent=st.integers(0, 300),
    multiple=st.sampled_from([1, 32]),
    raw=st.sampled_from([(), (0,), (-1, 0)]),
    composite=st.booleans(),
    size=st.sampled_from([1, 2]),
    grid=st.sampled_from([64, 256]),
)
def test_every_element_is_covered_exactly_once(
    kv: KVSpec,
    total: int,
    block: int,
    sinks: int,
    recent: int,
    multiple: int,
    raw: tuple[int, ...],
    composite: bool,
    size: int,
    grid: int,
) -> None:
    planes = {"kv": CHAIN} if composite else {"*": CHAIN}
    s = spec(
        planes=planes,
        layer_block=block,
        sink_tokens=sinks,
        recent_tokens=recent,
        raw_layers=raw,
        segment_tokens=grid,
    )
    for rank in range(size):
        shard = Shard(whole(kv).layers, rank, size)
        planned = made(s, kv, total, shard, multiple=multiple)
        assert elements(planned) == expected(kv, total, shard)
        assert [p.index for p in planned] == list(range(len(planned)))
        for p in planned:
            if p.chain != RAW_CHAIN_ID and kv.group(p.at.group).unit == "token":
                assert p.at.start >= min(sinks, total)
                assert p.at.stop <= max(sinks, total - recent)
                assert p.at.num_tokens % multiple == 0
                assert p.at.start // grid == (p.at.stop - 1) // grid


@given(total=st.integers(1, 900), cuts=st.lists(st.integers(0, 900), max_size=5))
def test_chunked_prefill_gives_out_each_segment_once_in_plan_order(total: int, cuts: list[int]) -> None:
    kv, s = hybrid(2, 8), spec(layer_block=2, sink_tokens=4)
    lanes_ = lanes(s, kv, whole(kv), lambda _: ChainTraits(1, True, True, 1))
    edges = sorted({0, total, *(c for c in cuts if c < total)})
    pieces = [p for a, b in pairwise(edges) for p in plan(s, lanes_, total, range(a, b))]
    assert pieces == list(plan(s, lanes_, total))


def test_plans_of_tensor_parallel_ranks_partition_the_plan_of_one() -> None:
    kv = dense(heads=4)
    one = {p.at for p in made(spec(), kv, 600)}
    two = [p.at for r in range(2) for p in made(spec(), kv, 600, Shard(whole(kv).layers, r, 2))]
    assert len(two) == len(set(two))
    assert set(two) == one


def test_chains_over_all_heads_have_one_group_and_refuse_a_cut_through_it() -> None:
    kv = dense(heads=4)
    assert {p.at.heads for p in made(spec(), kv, 10, head_local=False)} == {(0, 1, 2, 3)}
    with pytest.raises(UnsupportedSpecError, match="form one group, this rank holds") as caught:
        made(spec(), kv, 10, Shard(whole(kv).layers, 0, 2), head_local=False)
    assert caught.value.path == "head_groups"
    assert {p.at.heads for p in made(spec(head_groups=2), kv, 10, Shard(whole(kv).layers, 1, 2), False)} == {(2, 3)}


def test_a_pipeline_stage_must_hold_whole_layer_blocks() -> None:
    kv = dense(layers=4)
    assert {p.at.layers for p in made(spec(layer_block=2), kv, 10, Shard((2, 3)))} == {(2, 3)}
    with pytest.raises(UnsupportedSpecError, match="layer_block"):
        made(spec(layer_block=3), kv, 10, Shard((2, 3)))
    assert {p.at.layers for p in made(spec(layer_block=3), kv, 10, Shard((2, 3)), layer_local=True)} == {(2,), (3,)}


def test_head_groups_must_divide_the_heads() -> None:
    with pytest.raises(UnsupportedSpecError, match="3 heads do not divide into 2 groups"):
        made(spec(head_groups=2), dense(heads=3), 10)


def test_raw_layers_out_of_range_are_named() -> None:
    with pytest.raises(UnsupportedSpecError, match="layer 4 of a model with 4 layers"):
        made(spec(raw_layers=(4,)), dense(), 10)


def test_state_comes_last_and_with_the_last_token() -> None:
    kv = hybrid()
    planned = made(spec(), kv, 600)
    assert planned[-1].at == Region(2, "opaque", (5,), (0,), 0, 1)
    lanes_ = lanes(spec(), kv, whole(kv), lambda _: ChainTraits(1, True, True, 1))
    assert all(p.at.group != 2 for p in plan(spec(), lanes_, 600, range(599)))


def test_plans_do_not_depend_on_the_order_groups_are_declared_in() -> None:
    kv = hybrid()
    shuffled = replace(kv, groups=kv.groups[::-1])
    assert [p.at for p in made(spec(), kv, 300)] == [p.at for p in made(spec(), shuffled, 300)]
