"""Ratios at equal quality."""

from __future__ import annotations

import math

import pytest

from kvserve_hf.bench.curve import at_targets, cr_at


def test_a_power_law_is_met_exactly() -> None:
    points = [(k, 80 * k**0.5) for k in (0.002, 0.01, 0.06)]
    assert cr_at(points, 0.0128) == pytest.approx(80 * 0.0128**0.5)
    assert cr_at(points[::-1], 0.002) == pytest.approx(80 * 0.002**0.5)


def test_it_does_not_extrapolate() -> None:
    assert cr_at([(0.01, 5.0), (0.02, 7.0)], 0.05) is None
    assert cr_at([(0.01, 5.0), (0.02, 7.0)], 0.0045) is None
    assert cr_at([(0.01, 5.0)], 0.01) == 5.0
    assert cr_at([], 0.01) is None


def test_points_without_loss_are_left_out() -> None:
    assert cr_at([(0.0, 1.4), (0.01, 5.0), (0.02, 7.0)], 0.005) is None


def test_of_several_crossings_the_smallest_ratio_counts() -> None:
    noisy = [(0.01, 4.0), (0.03, 6.0), (0.012, 7.0), (0.05, 9.0)]
    first = math.exp(math.log(4) + math.log(2) / math.log(3) * math.log(1.5))
    assert cr_at(noisy, 0.02) == pytest.approx(first)


def test_the_interval_comes_from_the_ends_of_the_interval_of_kl() -> None:
    rows = [
        {"cr": 4.0, "kl": {"mean": 0.01, "low": 0.005, "high": 0.02}},
        {"cr": 8.0, "kl": {"mean": 0.04, "low": 0.02, "high": 0.08}},
    ]
    (at,) = at_targets(rows, [0.02])
    assert at["cr"] == pytest.approx(4 * 2**0.5)
    assert (at["low"], at["high"]) == pytest.approx((4.0, 8.0))
    rows[0]["kl"] = {"mean": 0.01, "low": None, "high": None}
    assert at_targets(rows, [0.02])[0]["low"] is None
