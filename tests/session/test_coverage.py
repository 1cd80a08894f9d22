"""A consumer counts every element: nothing twice, nothing missing, and no prefix that cannot be continued from."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fake_engine import dense, hybrid
from kvserve_core.errors import ConfigError, FrameError, UnsupportedSpecError
from kvserve_core.session import Consumer
from kvserve_core.session.coverage import Coverage, clip, cut
from kvserve_core.session.routing import route, share
from kvserve_core.spec import KVSpec, Region, Shard, whole
from kvserve_core.transport import Endpoint


def region(plane: str, start: int, stop: int, heads: tuple[int, ...] = (0, 1), group: int = 0, **kw: object) -> Region:
    return Region(group, plane, kw.get("layers", (0, 1, 2, 3)), heads, start, stop)


def add(coverage: Coverage, at: Region) -> None:
    """It arrived and is in place."""
    coverage.claim(at)
    coverage.count(at)


def test_all_of_it_is_complete_and_less_is_named() -> None:
    kv = dense()
    coverage = Coverage(kv, whole(kv), range(100, 300), 300)
    add(coverage, region("k", 100, 300))
    add(coverage, region("v", 100, 256))
    assert coverage.valid() == range(100, 256)
    with pytest.raises(FrameError, match="group 0 token 256"):
        coverage.require_complete()
    add(coverage, region("v", 256, 300))
    coverage.require_complete()
    assert coverage.valid() == range(100, 300)


def test_twice_is_not_two() -> None:
    kv = dense()
    coverage = Coverage(kv, whole(kv), range(100), 100)
    add(coverage, region("k", 0, 50, heads=(0,)))
    with pytest.raises(FrameError, match="arrived twice"):
        add(coverage, region("k", 40, 60, heads=(0,)))
    with pytest.raises(FrameError, match="cut in two ways"):
        add(coverage, region("k", 50, 60, heads=(0, 1)))


def test_what_arrived_but_is_not_in_place_does_not_count() -> None:
    kv = dense()
    coverage = Coverage(kv, whole(kv), range(100), 100)
    add(coverage, region("k", 0, 100))
    add(coverage, region("v", 0, 40))
    coverage.claim(region("v", 40, 100))
    assert coverage.valid() == range(40)
    with pytest.raises(FrameError, match="group 0 token 40"):
        coverage.require_complete()
    with pytest.raises(FrameError, match="arrived twice"):
        coverage.claim(region("v", 90, 100))


def test_no_prefix_is_valid_where_a_window_holds_the_end_only() -> None:
    kv = dense(window=100)
    group = kv.groups[0]
    kv = KVSpec("two", (replace(group, window=None, layers=(0, 1)), replace(group, id=1, layers=(2, 3))))
    coverage = Coverage(kv, whole(kv), range(1000), 1000)
    for plane in ("k", "v"):
        add(coverage, region(plane, 0, 950, layers=(0, 1)))
        add(coverage, region(plane, 900, 1000, group=1, layers=(2, 3)))
    assert coverage.valid() == range(0)
    for plane in ("k", "v"):
        add(coverage, region(plane, 950, 1000, layers=(0, 1)))
    assert coverage.valid() == range(1000)


def test_a_window_that_holds_everything_does_not_hinder() -> None:
    kv = dense(window=100)
    coverage = Coverage(kv, whole(kv), range(80), 80)
    for plane in ("k", "v"):
        add(coverage, region(plane, 0, 60))
    assert coverage.valid() == range(60)


def test_without_its_state_nothing_is_valid() -> None:
    kv = hybrid()
    coverage = Coverage(kv, whole(kv), range(50), 50)
    for group in kv.groups[:2]:
        for plane in ("k", "v"):
            add(coverage, Region(group.id, plane, group.layers, (0, 1), 0, 50))
    assert coverage.valid() == range(0)
    add(coverage, Region(2, "opaque", (5,), (0,), 0, 1))
    assert coverage.valid() == range(50)


def test_clip_and_cut_agree() -> None:
    at = Region(0, "k", (0, 2, 4), (0, 1, 2), 10, 20)
    x = torch.arange(3 * 3 * 10 * 2).view(3, 3, 10, 2)
    part = clip(at, Region(0, "k", (4, 0), (2, 0, 7), 15, 99))
    assert part == Region(0, "k", (0, 4), (0, 2), 15, 20)
    assert torch.equal(cut(x, at, part), x[[0, 2]][:, [0, 2]][:, :, 5:])
    assert clip(at, Region(0, "v", (0,), (0,), 10, 20)) is None
    assert clip(at, Region(0, "k", (0,), (0,), 20, 30)) is None


def endpoints(layers: tuple[int, ...], size: int) -> list[Endpoint]:
    return [Endpoint(f"memory://{r}", Shard(layers, r, size)) for r in range(size)]


def test_consumers_of_replicas_take_different_ones() -> None:
    kv = dense(heads=1)
    taken = [route(endpoints((0, 1, 2, 3), 4), kv, Shard((0, 1, 2, 3), r, 4), range(9), 9)[0][0] for r in range(4)]
    assert sorted(taken) == [0, 1, 2, 3]


def test_every_endpoint_is_somebodys_to_release() -> None:
    kv = dense(heads=1)
    everyone = [whole(kv)]
    assert [share(i, endpoints(whole(kv).layers, 4), kv, everyone[0], everyone) for i in range(4)] == [(0, 1)] * 4
    four = [Shard(whole(kv).layers, r, 4) for r in range(4)]
    shares = [share(0, endpoints(whole(kv).layers, 1), kv, s, four) for s in four]
    assert shares == [(0, 4), (1, 4), (2, 4), (3, 4)]


def test_pipeline_stages_are_routed_by_layer() -> None:
    kv = dense(layers=4)
    stages = [Endpoint("memory://a", Shard((0, 1))), Endpoint("memory://b", Shard((2, 3)))]
    routed = dict(route(stages, kv, whole(kv), range(9), 9))
    assert {i: {r.layers for r in regions} for i, regions in routed.items()} == {0: {(0, 1)}, 1: {(2, 3)}}
    with pytest.raises(UnsupportedSpecError, match="layer 2 head 0"):
        route(stages[:1], kv, whole(kv), range(9), 9)


def test_everyone_holds_this_rank() -> None:
    kv = dense()
    with pytest.raises(ConfigError, match="'everyone'"):
        Consumer(kv, whole(kv), lambda _: None, lambda *_: None, everyone=[Shard((0,))])
