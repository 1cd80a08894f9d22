from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve_core.latency import Speed
from kvserve_core.profiling.pareto import front, latency_s, non_dominated
from kvserve_core.profiling.point import Measurement

GOALS = st.lists(st.tuples(*[st.integers(0, 4)] * 3), max_size=12)


@given(GOALS)
def test_what_stays_is_not_beaten_and_what_goes_is(rows: list[tuple[int, int, int]]) -> None:
    kept = set(non_dominated(rows)) if rows else set()

    def beaten(i: int) -> bool:
        return any(all(b >= a for a, b in zip(rows[i], r, strict=True)) and r != rows[i] for r in rows)

    assert kept == {i for i in range(len(rows)) if not beaten(i)}


def test_equal_rows_all_stay() -> None:
    assert non_dominated([(1, 2), (1, 2), (0, 3), (0, 2)]) == [0, 1, 2]


def made(key: str, quality: float, cr: float, slow: float = 0.0, error: str = "") -> Measurement:
    each = Speed(0.001, slow)
    return Measurement(
        key=key, quality=quality, quality_low=quality, quality_high=1.0, cr=cr, encode=each, decode=each, error=error
    )


def test_latency_is_the_fixed_costs_the_work_and_the_wire() -> None:
    m = made("a", 1.0, 4.0, slow=1e-9)
    assert latency_s(m, nbytes=1e9, bandwidth_bps=1e9) == pytest.approx(2 * (0.001 + 1.0) + 0.25)


def test_the_front_keeps_what_is_best_in_something_and_drops_failures() -> None:
    rows = [
        made("good", 0.99, 3.0),
        made("small", 0.97, 9.0, slow=1e-9),
        made("beaten", 0.97, 3.0),
        made("failed", 1.0, 99.0, error="no"),
    ]
    assert [m.key for m in front(rows, 1e9, 1e9)] == ["good", "small"]
    assert front([], 1e9, 1e9) == []


def test_the_bandwidth_decides_what_latency_keeps() -> None:
    rows = [made("small and slow", 0.99, 9.0, slow=1e-9), made("fast", 0.99, 3.0)]
    kept = [{m.key for m in front(rows, 1e9, bps)} for bps in (1e7, 1e10)]
    assert kept == [{"small and slow"}, {"small and slow", "fast"}]


def test_points_in_a_plane_agree_with_three_goals() -> None:
    rows = [(a, b, 0) for a, b in product(range(3), range(3))]
    assert non_dominated(rows) == [8]
