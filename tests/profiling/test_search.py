from __future__ import annotations

import numpy as np
import pytest

from kvserve_core.errors import ConfigError
from kvserve_core.profiling.acquisition import above_failure, below_best, chance, clearly_bad, feasible, margin
from kvserve_core.profiling.gp import Belief
from kvserve_core.profiling.point import Measurement, Point
from kvserve_core.profiling.search import Options, Search
from profiling_cases import TOLD, measurement, point, pool, quality, ratio

FLOOR = 0.9


def searched(options: Options, points: list[Point] | None = None) -> Search:
    """A search to its end."""
    points = points or pool()
    search = Search(points, [ratio(p) for p in points], options)
    while not search.stopped():
        search.tell([measurement(p) for p in search.ask()])
    return search


def best_there_is(floor: float) -> float:
    return max(ratio(p) for p in pool() if quality(p) - TOLD >= floor)


@pytest.mark.parametrize("seed", range(3))
def test_it_finds_the_best_though_quality_does_not_fall_with_the_ratio(seed: int) -> None:
    search = searched(Options(floors=(FLOOR,), budget=12, seed=seed))
    best = search.best()
    assert best is not None
    assert best.cr == best_there_is(FLOOR)
    assert len(search.told) <= 12 < len(pool())


def test_the_cold_start_is_spread_over_the_ratios_and_drawn_by_the_seed() -> None:
    points = pool()
    ranked = sorted(points, key=ratio, reverse=True)
    starts = [Search(points, [ratio(p) for p in points], Options(cold=4, seed=s)).ask(4) for s in (0, 0, 1)]
    assert starts[0] == starts[1] != starts[2]
    assert [ranked.index(p) // 6 for p in starts[0]] == [0, 1, 2, 3]


def test_what_was_asked_for_is_not_asked_for_again_and_the_budget_holds() -> None:
    search = searched(Options(floors=(FLOOR,), budget=9, patience=0))
    assert search.stopped() == "budget spent"
    assert len(search.told) == 9
    everything = searched(Options(floors=(FLOOR,), budget=999, patience=0))
    assert everything.stopped() == "nothing left to measure"
    assert len(everything.told) == len(pool())


def test_it_stops_when_nothing_better_is_expected_and_has_found_it() -> None:
    search = searched(Options(floors=(FLOOR,), budget=len(pool()), patience=4))
    assert search.stopped() == "nothing better expected"
    assert len(search.told) < len(pool())
    assert search.best().cr == best_there_is(FLOOR)  # type: ignore[union-attr]  # the line above would have failed


def test_it_does_not_stop_before_something_is_feasible() -> None:
    search = searched(Options(floors=(0.9999,), budget=10, patience=1))
    assert search.best() is None
    assert search.stopped() == "budget spent"


def test_a_batch_has_different_points_and_learns_from_its_own_expectations() -> None:
    points = pool()
    search = Search(points, [ratio(p) for p in points], Options(floors=(FLOOR,), budget=20))
    search.tell([measurement(p) for p in search.ask(4)])
    batch = search.ask(4)
    assert len({p.key for p in batch}) == 4
    search.tell([measurement(p) for p in batch])
    assert search.left == 12


def test_the_same_answers_give_the_same_proposals() -> None:
    runs = [list(searched(Options(floors=(FLOOR,), budget=10, seed=5)).told) for _ in range(2)]
    assert runs[0] == runs[1]


def test_floors_take_turns_and_each_gets_its_best() -> None:
    search = searched(Options(floors=(FLOOR, 0.8), budget=18, patience=0))
    found = [search.best(f) for f in (FLOOR, 0.8)]
    assert [m.cr for m in found if m] == [best_there_is(FLOOR), best_there_is(0.8)]


def test_a_candidate_that_cannot_be_encoded_is_never_asked_for() -> None:
    points = pool()
    broken = points[0].key
    search = Search(points, [0.0 if p.key == broken else ratio(p) for p in points], Options(budget=99, patience=0))
    while asked := search.ask():
        assert asked[0].key != broken
        search.tell([measurement(asked[0])])
    assert len(search.told) == len(points) - 1
    with pytest.raises(ConfigError, match="no candidate can be encoded"):
        Search(points, [0.0] * len(points))


def test_failures_teach_nothing_of_quality_and_do_not_end_it() -> None:
    points = pool()
    search = Search(points, [ratio(p) for p in points], Options(floors=(FLOOR,), budget=14, seed=1))
    failed = 0
    while not search.stopped():
        (asked,) = search.ask()
        fails = failed < 3
        failed += fails
        search.tell([Measurement(key=asked.key, error="no") if fails else measurement(asked)])
    assert search.best() is not None


def test_answers_from_elsewhere_are_refused() -> None:
    search = Search(pool(), [ratio(p) for p in pool()])
    with pytest.raises(ConfigError, match="'unknown', which is not in this search space"):
        search.tell([Measurement(key="unknown")])


def test_a_measured_ratio_replaces_the_estimate() -> None:
    points = pool()
    search = Search(points, [ratio(p) for p in points], Options(floors=(0.5,), budget=99))
    search.tell([measurement(points[0], cr=1.5)])
    assert search.best(0.5).cr == 1.5  # type: ignore[union-attr]  # it is feasible


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("floors", ()), ("floors", (1.2,)), ("budget", 0), ("cold", 0), ("decay", 1.5), ("prune", 0.0)),
        *(("explore", -1), ("worth", float("nan")), ("seed", -1), ("seed", 2**32)),
    ],
)
def test_wrong_options_are_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name}: must be"):
        Options(**{name: value})  # type: ignore[arg-type]  # that is the point


def test_feasible_is_by_the_lower_bound_and_bad_by_the_upper() -> None:
    m = Measurement(key="k", quality=0.97, quality_low=0.96, quality_high=0.98, cr=2)
    assert feasible(m, 0.96)
    assert not feasible(m, 0.965)
    assert not clearly_bad(m, 0.98)
    assert clearly_bad(m, 0.9901)
    assert clearly_bad(Measurement(key="k", error="no"), 0.5)
    assert not feasible(Measurement(key="k", quality_low=1.0, error="no"), 0.5)


def test_the_chance_counts_how_wide_intervals_are() -> None:
    belief = Belief(np.array([0.97]), np.array([0.01]))
    assert chance(belief, 0.0, 0.97)[0] == pytest.approx(0.5)
    assert chance(belief, 0.01, 0.97)[0] == pytest.approx(0.1587, abs=1e-4)
    assert margin([measurement(point("token", 8))]) == pytest.approx(TOLD)
    assert margin([]) == 0.0


def test_pruning_is_soft_on_both_sides_and_can_be_switched_off() -> None:
    ratios = np.array([2.0, 3.9, 4.0, 5.0])
    below = below_best(ratios, 4.0, 0.1)
    assert below[3] == 1.0
    assert below[2] == pytest.approx(0.1)
    assert 0 < below[0] < below[1] < below[2]
    alike = np.array([True, True, False, True])
    assert above_failure(ratios, alike, 3.9, 0.1).tolist() == [1.0, 1.0, 1.0, 0.1]
    assert below_best(ratios, 4.0, 1.0).tolist() == [1.0] * 4
