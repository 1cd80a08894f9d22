"""Regions in and out of a buffer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvserve_core.errors import KVServeError, UnsupportedSpecError
from kvserve_core.spec import DType, KVSpec, LayerGroup, PlanePart, PlaneSpec, Region
from kvserve_hf.buffers import KVBuffer, first_needed

PLANES = tuple(PlaneSpec(n, 4, (PlanePart(n, 8),), DType.F32) for n in ("k", "v"))
SPEC = KVSpec("m", (LayerGroup(0, (0, 2, 4), PLANES), LayerGroup(1, (1, 3), PLANES, window=6)))
TOTAL = 20


def whole(group: int, plane: str) -> Region:
    return Region(group, plane, SPEC.group(group).layers, (0, 1, 2, 3), 0, TOTAL)


def filled() -> tuple[KVBuffer, dict[str, torch.Tensor]]:
    buffer, x = KVBuffer(SPEC, TOTAL), {n: torch.randn(3, 4, TOTAL, 8) for n in ("k", "v")}
    for name, values in x.items():
        buffer.write(whole(0, name), values)
    return buffer, x


def subsets(of: tuple[int, ...]) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.sampled_from(of), min_size=1, unique=True).map(tuple)


@given(layers=subsets((0, 2, 4)), heads=subsets((0, 1, 2, 3)), cut=st.tuples(st.integers(0, 20), st.integers(0, 20)))
def test_any_region_reads_what_was_written(
    layers: tuple[int, ...], heads: tuple[int, ...], cut: tuple[int, int]
) -> None:
    buffer, x = filled()
    at = Region(0, "k", layers, heads, min(cut), max(cut))
    rows = [(0, 2, 4).index(layer) for layer in layers]
    assert torch.equal(buffer.read(at), x["k"][rows][:, list(heads), at.start : at.stop])
    assert buffer.read(at).is_contiguous()
    other = KVBuffer(SPEC, TOTAL)
    other.write(at, buffer.read(at))
    assert torch.equal(other.read(at), buffer.read(at))


def test_a_suffix_and_the_composite_plane() -> None:
    buffer, x = filled()
    at = Region(0, "kv", (2, 4), (1,), 13, TOTAL)
    both = torch.cat([x["k"], x["v"]], -1)[1:, 1:2, 13:]
    assert torch.equal(buffer.read(at), both)
    other = KVBuffer(SPEC, TOTAL)
    other.write(at, both)
    assert torch.equal(other.read(Region(0, "v", (2, 4), (1,), 13, TOTAL)), x["v"][1:, 1:2, 13:])


def test_what_is_not_there_is_not_read() -> None:
    buffer = KVBuffer(SPEC, TOTAL)
    buffer.record(2, 0, torch.ones(4, 9, 8), torch.ones(4, 9, 8))
    assert buffer.read(Region(0, "k", (2,), (0,), 0, 9)).shape == (1, 1, 9, 8)
    with pytest.raises(KVServeError, match="not complete"):
        buffer.read(Region(0, "k", (2,), (0,), 0, 10))


def test_recording_stops_at_the_end() -> None:
    buffer = KVBuffer(SPEC, TOTAL)
    for start in (0, 15, 30):
        buffer.record(0, start, torch.full((4, 15, 8), float(start)), torch.zeros(4, 15, 8))
    assert buffer.read(Region(0, "k", (0,), (0,), 0, TOTAL))[0, 0, :, 0].tolist() == [0.0] * 15 + [15.0] * 5


def test_a_window_needs_only_its_last_tokens() -> None:
    buffer = KVBuffer(SPEC, TOTAL)
    at = Region(1, "kv", (1, 3), (0, 1, 2, 3), TOTAL - 5, TOTAL)
    buffer.write(at, torch.randn(2, 4, 5, 16))
    k, _, start = buffer.layer(3)
    assert (k.shape[1], start) == (5, 15) == (5, first_needed(SPEC.group(1), TOTAL))
    short = KVBuffer(SPEC, TOTAL)
    short.write(Region(1, "kv", (1, 3), (0, 1, 2, 3), TOTAL - 4, TOTAL), torch.randn(2, 4, 4, 16))
    with pytest.raises(KVServeError, match="plane 'k' of layer 3 lacks tokens in 15-20"):
        short.layer(3)


@pytest.mark.parametrize(
    ("at", "shape", "dtype"),
    [
        (Region(0, "k", (0,), (0,), 0, 4), (1, 1, 5, 8), torch.float32),
        (Region(0, "k", (0,), (0,), 0, 4), (1, 1, 4, 8), torch.bfloat16),
        (Region(0, "k", (0,), (0,), 18, 22), (1, 1, 4, 8), torch.float32),
        (Region(0, "k", (1,), (0,), 0, 4), (1, 1, 4, 8), torch.float32),
        (Region(0, "k", (0,), (4,), 0, 4), (1, 1, 4, 8), torch.float32),
        (Region(7, "k", (0,), (0,), 0, 4), (1, 1, 4, 8), torch.float32),
    ],
)
def test_a_wrong_write_is_refused(at: Region, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedSpecError):
        KVBuffer(SPEC, TOTAL).write(at, torch.zeros(shape, dtype=dtype))
