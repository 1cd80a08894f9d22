"""Searches of one table: ours and what stands beside it. Each gives the order in which it measures candidates."""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from kvserve_core.profiling.point import Point
from kvserve_core.profiling.search import Options, Search
from profiler_tables.tables import Table

Order = Iterator[Point]
Rival = Callable[[Table, float, int], Order]
"""Table, floor and seed to the order."""
TRIALS = 200
"""After so many proposals TPE is given up."""


def bayes(**options: Any) -> Rival:
    """Ours; it runs on when it would stop, so that its convergence can be seen."""

    def order(table: Table, floor: float, seed: int) -> Order:
        given = {"floors": (floor,), "budget": len(table.points), "patience": 0, "seed": seed} | options
        search = Search(table.points, table.ratios, Options(**given))
        while not search.stopped():
            points = search.ask()
            yield from points
            search.tell(table.measure(points))

    return order


def scan(table: Table, floor: float, seed: int) -> Order:
    """From the highest ratio down."""
    del floor, seed
    return iter(_by_ratio(table))


def bisection(table: Table, floor: float, seed: int) -> Order:
    """Halving the candidates by ratio, as if quality fell with it; ends when one is left."""
    del seed
    ranked = _by_ratio(table)
    low, high = 0, len(ranked)
    while low < high:
        middle = (low + high) // 2
        yield ranked[middle]
        if table.answers[ranked[middle].key].quality_low >= floor:
            high = middle
        else:
            low = middle + 1


def shuffled(table: Table, floor: float, seed: int) -> Order:
    """In random order."""
    del floor
    points = list(table.points)
    random.Random(seed).shuffle(points)
    return iter(points)


def tpe(table: Table, floor: float, seed: int) -> Order:
    """Optuna's tree-structured Parzen estimator, with the floor as its constraint.

    It searches the place of a candidate by ratio, so that it knows the ratios beforehand as ours does, and every
    candidate is as easy to reach. Over the dimensions themselves it would propose combinations that the table lacks.
    """
    import optuna

    optuna.logging.set_verbosity(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it calls its own constraints experimental
        sampler = optuna.samplers.TPESampler(seed=seed, constraints_func=lambda trial: trial.user_attrs["missed"])
    study = optuna.create_study(direction="maximize", sampler=sampler)
    ranked = _by_ratio(table)
    seen: set[str] = set()
    for _ in range(TRIALS):
        trial = study.ask()
        point = ranked[trial.suggest_int("rank", 0, len(ranked) - 1)]
        answer = table.answers[point.key]
        trial.set_user_attr("missed", (floor - answer.quality_low,))
        study.tell(trial, answer.cr)
        if point.key not in seen:  # what was measured before costs nothing again
            seen.add(point.key)
            yield point


def _by_ratio(table: Table) -> list[Point]:
    return sorted(table.points, key=table.estimate, reverse=True)


def evaluations(table: Table, floor: float, order: Order, near: float = 0.01, limit: int = 10**6) -> int | None:
    """Measurements until the best feasible ratio is within ``near`` of the best in the table; None: never."""
    wanted = (1 - near) * table.optimum(floor)
    for n, point in enumerate(islice(order, limit), 1):
        answer = table.answers[point.key]
        if answer.quality_low >= floor and answer.cr >= wanted:
            return n
    return None
