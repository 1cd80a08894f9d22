"""Specs, regions, shards and the token grid."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_engine import dense, hybrid, mla
from kvserve_core.errors import UnsupportedSpecError
from kvserve_core.spec import DType, KVSpec, PlanePart, PlaneSpec, Region, Shard, base_planes, cells, covering, whole


def test_the_fingerprint_changes_with_the_model_only() -> None:
    kv = dense()
    assert kv.fingerprint == dense().fingerprint
    assert len({m.fingerprint for m in (dense(), dense(dim=64), dense(heads=4), mla(), hybrid())}) == 5
    assert replace(kv, model_id="other").fingerprint != kv.fingerprint


def test_composite_planes_stand_side_by_side() -> None:
    kv = dense(heads=2, dim=32).group(0).plane("kv")
    assert (kv.name, kv.num_heads, kv.dim, [p.name for p in kv.parts]) == ("kv", 2, 64, ["k", "v"])
    assert mla().group(0).plane("mla").dim == 80
    with pytest.raises(UnsupportedSpecError, match="not 'kv'"):
        mla().group(0).plane("kv")


def test_composites_of_unlike_planes_are_refused() -> None:
    group = dense().group(0)
    unlike = replace(group, planes=(group.planes[0], PlaneSpec("v", 1, (PlanePart("v", 32),), DType.BF16)))
    with pytest.raises(UnsupportedSpecError, match="differ in heads"):
        unlike.plane("kv")


def test_unknown_groups_are_named() -> None:
    with pytest.raises(UnsupportedSpecError, match=r"no layer group 9; this model has \[0, 1, 2\]"):
        hybrid().group(9)


@pytest.mark.parametrize(
    ("heads", "size", "expected"),
    [
        (8, 1, [tuple(range(8))]),
        (8, 2, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (2, 4, [(0,), (0,), (1,), (1,)]),
        (1, 3, [(0,), (0,), (0,)]),
    ],
)
def test_heads_are_sliced_or_replicated(heads: int, size: int, expected: list[tuple[int, ...]]) -> None:
    assert [Shard((0,), r, size).heads(heads) for r in range(size)] == expected


def test_a_model_names_each_group_and_plane_once() -> None:
    group = dense().groups[0]
    with pytest.raises(UnsupportedSpecError, match="ids of their own"):
        KVSpec("m", (group, group))
    for names in (("k", "k"), ("kv",), ("mla", "opaque")):
        planes = tuple(PlaneSpec(n, 1, (PlanePart(n, 8),), DType.BF16) for n in names)
        with pytest.raises(UnsupportedSpecError, match="name each part once"):
            KVSpec("m", (replace(group, planes=planes),))


@pytest.mark.parametrize(("heads", "size"), [(3, 2), (2, 3)])
def test_uneven_tensor_parallel_sizes_are_refused(heads: int, size: int) -> None:
    with pytest.raises(UnsupportedSpecError, match="heads do not"):
        Shard((0,), 0, size).heads(heads)


def test_a_rank_outside_its_group_is_refused() -> None:
    with pytest.raises(UnsupportedSpecError, match="rank 2"):
        Shard((0,), 2, 2)


@given(st.integers(0, 5000), st.integers(0, 3000), st.integers(1, 600))
def test_cells_partition_any_range_on_the_absolute_grid(start: int, length: int, size: int) -> None:
    tokens = range(start, start + length)
    made = list(cells(tokens, size))
    assert [t for cell in made for t in cell] == list(tokens)
    assert all(cell[0] // size == cell[-1] // size for cell in made)
    assert all(cell.start % size == 0 for cell in made[1:])


def test_overlap_understands_composites_and_windows() -> None:
    kv = Region(0, "kv", (0, 1), (0,), 0, 256)
    assert kv.overlaps(Region(0, "k", (1,), (0, 1), 255, 300))
    assert not kv.overlaps(Region(0, "k", (1,), (0, 1), 256, 300))
    assert not kv.overlaps(Region(0, "k", (2,), (0,), 0, 10))
    assert not kv.overlaps(Region(0, "latent", (0,), (0,), 0, 10))
    assert not kv.overlaps(Region(1, "k", (0,), (0,), 0, 10))
    assert base_planes("mla") == {"latent", "rope"}


def test_covering_is_the_smallest_set_of_whole_segments() -> None:
    plan = [Region(0, "k", (layer,), (0,), start, start + 256) for layer in (0, 1) for start in (0, 256, 512)]
    want = [Region(0, "k", (1,), (0,), 300, 600)]
    assert covering(plan, want) == [4, 5]
    assert covering(plan, []) == []


def test_bytes_are_counted_on_original_elements() -> None:
    kv = dense(layers=4, heads=2, dim=32)
    assert kv.token_bytes() == 4 * 2 * 2 * 32 * 2
    assert kv.nbytes(Region(0, "k", (0, 1), (0,), 0, 10)) == 2 * 10 * 32 * 2
    assert whole(hybrid()).layers == (0, 1, 2, 3, 4, 5)


def test_a_region_reads_well_in_an_error() -> None:
    assert str(Region(0, "k", (0, 1, 2), (1,), 0, 256)) == "group 0 plane k layers 0-2 heads 1 tokens 0-256"
    assert "layers 0,2,4" in str(Region(0, "k", (0, 2, 4), (1,), 0, 256))


def test_the_spec_imports_no_torch() -> None:
    code = "import sys, kvserve_core.spec, kvserve_core.profile, kvserve_core.policy, kvserve_core.transport;"
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
