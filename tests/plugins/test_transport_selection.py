"""Covering sets by bits: the same as by looking at every pair, and bounded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve_core.errors import TransportError
from kvserve_core.spec import COMPOSITE, Region
from kvserve_core.spec import covering as by_pairs
from kvserve_plugins.transports import _selection
from kvserve_plugins.transports._selection import MAX_IDS, MAX_REGIONS, check_size, covering
from plugins.transport_checks import region

PLANES = sorted({*COMPOSITE, *(part for parts in COMPOSITE.values() for part in parts)})
IDS = st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True).map(lambda ids: tuple(sorted(ids)))


@st.composite
def regions(draw: Callable[[st.SearchStrategy], int]) -> Region:
    start = draw(st.integers(0, 40))
    plane = draw(st.sampled_from(PLANES))
    return Region(draw(st.integers(0, 1)), plane, draw(IDS), draw(IDS), start, start + draw(st.integers(0, 20)))


@given(st.lists(regions(), max_size=30), st.lists(regions(), max_size=8))
def test_covers_as_the_definition_says(plan: list[Region], want: list[Region]) -> None:
    assert covering(plan, want) == by_pairs(plan, want)


def test_each_segment_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, calls = [region(i) for i in range(2000)], 0
    real = _selection._mask

    def counted(bits: list[int], size: int) -> int:
        nonlocal calls
        calls += len(bits)
        return real(bits, size)

    monkeypatch.setattr(_selection, "_mask", counted)
    assert covering(plan, [region(i) for i in range(1000)] * 4) == list(range(1000))
    assert calls == 2 * len(plan)  # once by lane and once by last token


def test_too_many_regions_or_ids_are_refused() -> None:
    check_size([region(0)] * MAX_REGIONS)
    with pytest.raises(TransportError, match="larger regions"):
        check_size([region(0)] * (MAX_REGIONS + 1))
    with pytest.raises(TransportError, match="larger regions"):
        check_size([Region(0, "k", tuple(range(MAX_IDS)), (0,), 0, 1)])
