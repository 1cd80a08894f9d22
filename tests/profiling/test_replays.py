"""Bars of ``benchmarks/profiler.py`` on the tables of the reference, with few seeds."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from benchmark_modules import benchmark

SEEDS = 3


@pytest.fixture(scope="module")
def tables() -> Iterator[SimpleNamespace]:
    with benchmark("profiler_tables.replay", "profiler_tables.rivals", "profiler_tables.tables") as modules:
        replay, rivals, tables = modules
        yield SimpleNamespace(replay=replay, rivals=rivals, smoke=tables.smoke(), measured=tables.measured())


def test_the_tables_are_what_the_reference_says_of_them(tables: SimpleNamespace) -> None:
    assert len({p.key for p in tables.smoke.points}) == 144
    assert len({p.key for p in tables.measured.points}) == 132
    assert tables.smoke.optimum(0.97) == 9.6557
    assert sum(m.quality_low >= 0.97 for m in tables.smoke.answers.values()) == 117
    assert tables.measured.optimum(0.97) == 8.3314


@pytest.mark.parametrize(("name", "bar"), [("smoke", 12), ("measured", 15)])
def test_the_search_is_within_one_percent_soon(name: str, bar: int, tables: SimpleNamespace) -> None:
    table = getattr(tables, name)
    found = tables.replay.reach(table, tables.rivals.bayes(), SEEDS)
    assert statistics.median(found) <= bar


def test_what_takes_quality_to_fall_with_the_ratio_does_not_get_there(tables: SimpleNamespace) -> None:
    assert tables.replay.reach(tables.smoke, tables.rivals.scan, 1) == [28]
    assert tables.replay.reach(tables.measured, tables.rivals.bisection, 1) == [tables.replay.NEVER]
    assert len(list(tables.rivals.bisection(tables.smoke, 0.97, 0))) in (7, 8)


def test_it_needs_fewer_than_random_search_on_both_tables(tables: SimpleNamespace) -> None:
    for table in (tables.smoke, tables.measured):
        ours, random = (
            statistics.median(tables.replay.reach(table, rival, n))
            for rival, n in ((tables.rivals.bayes(), SEEDS), (tables.rivals.shuffled, 20))
        )
        assert ours < random


def test_a_whole_search_stops_early_near_the_best(tables: SimpleNamespace) -> None:
    found = tables.replay.whole(tables.smoke, SEEDS)
    assert found["worst ratio"] >= 0.99 * 9.6557
    assert found["evaluations"] < 40


def test_the_pareto_set_of_the_132_rows(tables: SimpleNamespace) -> None:
    assert tables.replay.pareto_ids() == [82, 90, 96, 106, 113, 131]
