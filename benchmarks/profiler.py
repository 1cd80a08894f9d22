"""The profiler's search against tables in which every candidate was measured, and on a real model; an entry per bar.

``python benchmarks/profiler.py [--tables-only] [--json] [--seeds 20] [--only TEXT]``. Counts are measurements until the
best feasible ratio found is within 1 % of the best in the table; medians over seeds, distributions in ``detail``.
Ablations run on a quarter of the seeds.

On a model (``--only model``): everything that is installed is searched for the highest ratio at a quality floor, then
every pipeline of the reference's own space is measured. Both are on the pinned texts. Files of ``kvserve calibrate``
come from ``--calibrated``; without it head scores are calibrated first, and the basis is that of the shipped library.
The same command goes on from the journals in ``--work``; remove them to begin anew.
"""

from __future__ import annotations

import argparse
import platform
import shlex
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from profiler_model.asked import Asked, calibrated
from profiler_model.bars import CANDIDATES, EVALUATIONS, model_bars
from profiler_tables.replay import NEVER, OURS, ablations, distribution, pareto_ids, side_by_side
from profiler_tables.tables import FLOOR, Table, measured, smoke
from replays.bars import Result, check_only, shown

from kvserve_core.settings import cache_dir
from kvserve_hf.commands import model_folder, progress_bar

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


MODEL, ABLATIONS = "model", "ablations"


def on_a_model(options: argparse.Namespace) -> tuple[dict[str, Result], dict[str, Any]]:
    with progress_bar() as bar:
        folder = model_folder(options.model, bar)
    work: Path = options.work or cache_dir() / "benchmarks" / f"profiler-{folder.name}"
    files = options.calibrated or calibrated(folder, work / "calibrated")
    asked = Asked(folder, files, work, options.out or work / "found.kvlib", options.also)
    command = shlex.join(["python", "benchmarks/profiler.py", *sys.argv[1:]])
    return model_bars(replace(asked, budget=options.budget, limit=options.limit, workers=options.workers), command)


def report(options: argparse.Namespace) -> dict[str, Any]:
    only, seeds = options.only, options.seeds
    bars = {name: bar for key, make in BARS.items() if only in key for name, bar in make(seeds).items()}
    more: dict[str, Any] = {}
    if only in MODEL and not options.tables_only:
        found, more = on_a_model(options)
        bars |= found
    parts = (
        {name: ablations(table(), max(seeds // 4, 1)) for name, table in TABLES.items()} if only in ABLATIONS else {}
    )
    return {
        "benchmark": "profiler",
        "machine": {"cpu": platform.processor() or platform.machine(), "system": platform.platform()},
        "versions": {"python": platform.python_version()}
        | {n: version(n) for n in ("numpy", "scikit-learn", "scipy", "optuna", "torch", "transformers")},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "bars": {name: asdict(bar) for name, bar in bars.items()},
        "ablations": parts,
        "model": more,
        "ok": all(bar.ok for bar in bars.values()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables-only", action="store_true", help="the replays of tables and nothing on a model")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seeds", type=int, default=20)
    names = [*BARS, ABLATIONS, MODEL]
    parser.add_argument("--only", default="", help=f"a part of one of: {', '.join(names)}")
    parser.add_argument("--model", type=Path, help="a folder, smollm2 (the default) or gemma3")
    parser.add_argument("--calibrated", type=Path, help="folder with heads.json and bases of 'kvserve calibrate'")
    parser.add_argument("--work", type=Path, help="folder for journals; default: in the cache")
    parser.add_argument("--out", type=Path, help="the library to write; default: in the work folder")
    parser.add_argument("--also", type=Path, help="named pipelines for the library, as 'kvserve profile --also'")
    parser.add_argument("--budget", type=int, default=EVALUATIONS)
    parser.add_argument("--limit", type=int, default=CANDIDATES)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    check_only(parser, options.only, names[:-1] if options.tables_only else names)
    found = report(options)
    return shown(found, options.json)


if __name__ == "__main__":
    sys.exit(main())
