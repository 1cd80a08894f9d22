"""The profiler's search against tables in which every candidate was measured, one entry per bar.

``python benchmarks/profiler.py [--tables-only] [--json] [--seeds 20] [--only TEXT]``. Counts are measurements until the
best feasible ratio found is within 1 % of the best in the table; medians over seeds, distributions in ``detail``.
Ablations run on a quarter of the seeds.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from typing import Any

from profiler_tables.replay import NEVER, OURS, ablations, distribution, pareto_ids, side_by_side
from profiler_tables.tables import FLOOR, Table, measured, smoke
from replays.bars import Result, check_only, shown

SMOKE_BAR, MEASURED_BAR = 12, 15
PARETO = [82, 90, 96, 106, 113, 131]
MORE_FLOORS = (0.98, 0.99, 0.995)
BEATEN = ("bisection by ratio", "random", "optuna TPE")
"""What the model must beat where accuracy is not monotone. The scan is not among them: in the table of 132 the second
highest ratio happens to be feasible, which no search can know; it is in the comparison over both tables."""


@cache
def runs(name: str, seeds: int, floor: float = FLOOR) -> dict[str, list[int]]:
    return side_by_side(TABLES[name](), seeds, floor)


TABLES: dict[str, Callable[[], Table]] = {"144": smoke, "132": measured}


def reached(name: str, bar: int, seeds: int) -> Result:
    found = runs(name, seeds)
    value = statistics.median(found[OURS])
    detail = {rival: distribution(each) for rival, each in found.items()}
    optimum = TABLES[name]().optimum(FLOOR)
    return Result(value, bar, value <= bar, {"seeds": seeds, "optimum": optimum, "every seed": found[OURS], **detail})


def not_monotone(seeds: int) -> Result:
    """On the table of 132, where bisection ends at a ratio that is 4 % too low."""
    found = runs("132", seeds)
    ours, bar = statistics.median(found[OURS]), min(statistics.median(found[name]) for name in BEATEN)
    more = {str(f): {n: distribution(each) for n, each in runs("132", seeds, f).items()} for f in MORE_FLOORS}
    return Result(ours, bar, ours < bar, {"other floors": more})


def worst_of_both(seeds: int) -> Result:
    """The larger median of the two tables: no other search is good on both."""
    worst = {name: max(statistics.median(runs(t, seeds)[name]) for t in TABLES) for name in runs("144", seeds)}
    bar = min(n for name, n in worst.items() if name != OURS)
    shown = {name: None if n >= NEVER else n for name, n in worst.items()}
    return Result(worst[OURS], bar, worst[OURS] < bar, {"larger median": shown})


def pareto() -> Result:
    found = pareto_ids()
    return Result(found, PARETO, found == PARETO)


BARS: dict[str, Callable[[int], dict[str, Result]]] = {
    "smoke": lambda seeds: {"144 pipelines: evaluations to within 1 %": reached("144", SMOKE_BAR, seeds)},
    "measured": lambda seeds: {"132 pipelines: evaluations to within 1 %": reached("132", MEASURED_BAR, seeds)},
    "monotone": lambda seeds: {"132, not monotone: the best of bisection, random, TPE": not_monotone(seeds)},
    "both": lambda seeds: {"larger median of both tables: the best of the others": worst_of_both(seeds)},
    "pareto": lambda seeds: {"132 pipelines: ids that are not dominated in 3-D": pareto()},
}


def report(only: str, seeds: int) -> dict[str, Any]:
    bars = {name: bar for key, make in BARS.items() if only in key for name, bar in make(seeds).items()}
    parts = (
        {name: ablations(table(), max(seeds // 4, 1)) for name, table in TABLES.items()} if only in "ablations" else {}
    )
    return {
        "benchmark": "profiler",
        "machine": {"cpu": platform.processor() or platform.machine(), "system": platform.platform()},
        "versions": {"python": platform.python_version()}
        | {n: version(n) for n in ("numpy", "scikit-learn", "scipy", "optuna")},
        "bars": {name: asdict(bar) for name, bar in bars.items()},
        "ablations": parts,
        "ok": all(bar.ok for bar in bars.values()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables-only", action="store_true", help="the replays of tables and nothing on a model")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--only", default="", help=f"a part of one of: {', '.join(BARS)}, ablations")
    options = parser.parse_args()
    check_only(parser, options.only, [*BARS, "ablations"])
    found = report(options.only, options.seeds)
    return shown(found, options.json)


if __name__ == "__main__":
    sys.exit(main())
