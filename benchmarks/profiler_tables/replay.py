"""What the tables show: bars, distributions over seeds, and what each part of the search is worth."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from kvserve_core.profiling.pareto import non_dominated
from kvserve_core.profiling.search import Options, Search
from profiler_tables.rivals import Rival, bayes, bisection, evaluations, scan, shuffled, tpe
from profiler_tables.tables import FLOOR, Table, measured

NEVER = 10**6
LIMIT = 100
"""Evaluations after which a search counts as not having found it; the tables hold 144 and 132."""
OURS = "bayes"
RIVALS: dict[str, Rival] = {
    OURS: bayes(),
    "scan by ratio": scan,
    "bisection by ratio": bisection,
    "random": shuffled,
    "optuna TPE": tpe,
}
PARTS: dict[str, dict[str, Any]] = {
    "full": {},
    "w/o encoding": {"encode": False},
    "w/o exploration": {"explore": 0.0},
    "w/o pruning": {"prune": 1.0},
    "w/o slope": {"slope": False},
    "w/o stop": {"patience": 0},
}


def distribution(values: Sequence[int]) -> dict[str, Any]:
    """Median, quartiles and the ends; None where it was never found."""
    ranked = sorted(values)
    middle = statistics.median(ranked)
    picked = {"low": ranked[0], "median": middle, "p75": ranked[(3 * len(ranked) - 1) // 4], "high": ranked[-1]}
    return {name: None if value > LIMIT else value for name, value in picked.items()}


def reach(table: Table, rival: Rival, seeds: int, floor: float = FLOOR) -> list[int]:
    """For each seed, evaluations until within 1 % of the best feasible ratio."""
    return [evaluations(table, floor, rival(table, floor, seed), limit=LIMIT) or NEVER for seed in range(seeds)]


def side_by_side(table: Table, seeds: int, floor: float = FLOOR) -> dict[str, list[int]]:
    """Every search on one table."""
    return {name: reach(table, rival, seeds, floor) for name, rival in RIVALS.items()}


def ablations(table: Table, seeds: int) -> dict[str, Any]:
    """Whole searches without one part each."""
    return {name: whole(table, seeds, **without) for name, without in PARTS.items()}


def whole(table: Table, seeds: int, **options: Any) -> dict[str, Any]:
    """Searches of up to 40 evaluations: mean and worst ratio found, mean evaluations until it stopped, and those until
    it was within 1 % of the best."""
    ratios, used, soon = [], [], []
    for seed in range(seeds):
        search = Search(table.points, table.ratios, Options(floors=(FLOOR,), seed=seed, **options))
        while not search.stopped():
            search.tell(table.measure(search.ask()))
        best = search.best()
        ratios.append(best.cr if best else 0.0)
        used.append(len(search.told))
        order = iter([table.points[i] for i in search.told])
        soon.append(evaluations(table, FLOOR, order) or NEVER)
    return {
        "ratio": round(statistics.mean(ratios), 4),
        "worst ratio": min(ratios),
        "evaluations": statistics.mean(used),
        "to within 1 %": distribution(soon),
    }


def pareto_ids() -> list[int]:
    """Of the 132 rows, over accuracy, ratio and the latency in the table."""
    rows = measured().rows
    goals = [(float(r["accuracy_rel_pct"]), float(r["cr"]), -float(r["latency_ms"])) for r in rows]
    return sorted(int(rows[i]["config_id"]) for i in non_dominated(goals))
