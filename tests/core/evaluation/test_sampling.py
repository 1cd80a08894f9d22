"""Samples that keep proportions, and bounds that hold."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve_core.errors import ConfigError
from kvserve_core.evaluation.quality import Interval
from kvserve_core.evaluation.sampling import evenly, ratio, share, stratified, unresolved

ITEMS = [(kind, i) for kind, count in (("prose", 8), ("code", 6), ("maths", 2)) for i in range(count)]


def kind(item: tuple[str, int]) -> str:
    return item[0]


@given(st.integers(0, 20), st.integers(0, 5))
def test_kinds_are_drawn_evenly_while_they_last(count: int, seed: int) -> None:
    chosen = stratified(ITEMS, kind, count, seed)
    assert chosen == stratified(ITEMS, kind, count, seed)
    assert len(chosen) == len(set(chosen)) == min(count, len(ITEMS))
    assert chosen == sorted(chosen, key=ITEMS.index)
    counts = [sum(kind(c) == name for c in chosen) for name in ("prose", "code", "maths")]
    if count <= 6:
        assert max(counts) - min(counts) <= 1


@given(st.integers(1, 15), st.integers(0, 5))
def test_a_larger_sample_holds_the_smaller_one(count: int, seed: int) -> None:
    assert set(stratified(ITEMS, kind, count, seed)) <= set(stratified(ITEMS, kind, count + 1, seed))


def test_seeds_differ_and_none_takes_all() -> None:
    assert stratified(ITEMS, kind, 4, 0) != stratified(ITEMS, kind, 4, 1)
    assert stratified(ITEMS, kind, None, 0) == ITEMS


@given(st.integers(1, 200), st.integers(1, 60), st.integers(0, 3))
def test_documents_come_one_from_each_stretch(total: int, count: int, seed: int) -> None:
    chosen = evenly(total, count, seed)
    assert len(chosen) == min(count, total)
    assert chosen == sorted(set(chosen))
    if count < total:
        assert all(total * i // count <= at < total * (i + 1) // count for i, at in enumerate(chosen))
    assert evenly(total, None, seed) == list(range(total))


def test_wilson_intervals_are_those_of_the_formula() -> None:
    assert share(8, 8).low == pytest.approx(8 / (8 + 1.959964**2))
    assert share(0, 8).high == pytest.approx(1 - 8 / (8 + 1.959964**2))
    half = share(50, 100)
    assert (half.low, half.high) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    with pytest.raises(ConfigError, match="at least one"):
        share(0, 0)


def test_wilson_intervals_cover_the_truth_as_often_as_they_say() -> None:
    rng = random.Random(1)
    for truth in (0.5, 0.9, 0.97):
        found = (share(sum(rng.random() < truth for _ in range(24)), 24) for _ in range(2000))
        covered = sum(s.low <= truth <= s.high for s in found) / 2000
        assert covered > 0.93


def test_the_ratio_is_of_sums_and_its_interval_is_over_pairs() -> None:
    reference = [1.0, 0.0, 1.0, 1.0] * 10
    test = [1.0, 0.0, 0.0, 1.0] * 10
    found = ratio(test, reference, 0)
    assert found.mean == pytest.approx(2 / 3)
    assert 0.4 < found.low < found.mean < found.high < 0.9
    assert found == ratio(test, reference, 0)
    assert ratio([1.0] * 40, reference, 0).mean == 1.0


def test_pairs_that_agree_say_no_more_than_a_share_without_a_miss() -> None:
    equal = ratio([1.0, 0.0] * 5, [1.0, 0.0] * 5, 0)
    assert (equal.mean, equal.low) == (1.0, share(10, 10).low)
    with pytest.raises(ConfigError, match="scores nothing"):
        ratio([0.0], [0.0], 0)


def test_a_sample_that_is_too_small_says_so() -> None:
    small = Interval(0.99, 0.95, 1.0)
    assert "4 samples" in unresolved(small, 4, 0.01)
    assert "0.04, the tolerance is 0.01" in unresolved(small, 4, 0.01)
    assert unresolved(small, 4, 0.05) == ""
