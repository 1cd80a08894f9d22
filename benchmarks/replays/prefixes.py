"""Fig. 14 (TTFT with a prefix cache) against eq. 1: the order of methods, and every reading of the KVServe rows.

Its BF16 rows are those of a prefill: the figure's breakdown (Qwen2.5-32B) has 4106 and 4512 ms for it, the rows 4096 to
4140 and 4504 to 4550 at any bandwidth. So nothing was fetched in them, and there is no V / B to take off. What is left
of eq. 1 for a fetched prefix is decoding and ``V / (cr B)``; it is tried, and so is the other reading.
"""

from __future__ import annotations

import csv
import io
from typing import Any

import numpy as np

from kvserve_core.latency import Speed, latency_line
from replays.bars import Result
from replays.lines import Floats, bend_error, line_error, scale_error
from replays.published import NEAR, OURS, RAW, Cells, fit, inversions, read, residuals
from replays.reference import text

RIVAL = "CacheGen"


def ttft() -> tuple[Result, Result]:
    """Pairs of methods in the wrong order; and how near to the KVServe rows eq. 1 comes, at the best reading of it."""
    panels = read("prefix_caching_ttft.csv", "Dateset")
    parts = breakdown()
    common = one_factor(panels, parts)
    wrong, free, nearest, detail = 0, 0, 0.0, {}
    for dataset, cells in panels.items():
        fetched = {m: (cells.points[m] < cells.points[RAW]) | (m == RAW) for m in cells.points}
        found = _fitted(cells, fetched)
        wrong += inversions(cells, found)
        free += inversions(cells, _fitted(cells, fetched, ordered=False))
        nearest = max(nearest, line_error(cells.x, cells.points[OURS]))
        detail[dataset] = {
            "residual": {m: residuals(cells, found, m) for m in cells.points},
            "recomputed at Gbps": {m: [f"{1 / x:.0f}" for x in cells.x[~mine]] for m, mine in fetched.items()},
            "readings of eq. 1": readings(cells, parts[dataset]) | {"one V/cr scale for the figure": common[dataset]},
            **_limits(cells),
        }
    note = {
        "note": "where CacheGen recomputed, it is taken to",
        "pairs out of order in a fit without that condition": free,
    }
    return Result(wrong, 0, wrong == 0, note), Result(round(nearest, 3), NEAR, nearest <= NEAR, detail)


def _fitted(cells: Cells, fetched: dict[str, np.ndarray], ordered: bool = True) -> dict[str, Floats]:
    """Where a method was not ``fetched`` it recomputed, as the default does."""
    found = fit(cells, fetched, ordered)
    return {method: np.where(mine, found[method], found[RAW]) for method, mine in fetched.items()}


def breakdown() -> dict[str, dict[str, float]]:
    """Milliseconds of each stage of KVServe by dataset, as published for one bandwidth."""
    rows = csv.DictReader(io.StringIO(text("latency_breakdown.csv")))
    ours = [row for row in rows if row["Method"] == OURS]
    return {r["Dataset"]: {k: float(r[k]) for k in r if k not in ("Dataset", "Method")} for r in ours}


def readings(cells: Cells, parts: dict[str, float]) -> dict[str, Any]:
    """Eq. 1 at the KVServe rows with what is published, and one number fitted to each panel: the best largest error.

    A free bandwidth for the figure would scale the number that is fitted, and change nothing else.
    """
    x, ours, raw = cells.x, cells.points[OURS], cells.points[RAW]
    line = latency_line(0.0, 1.0, Speed(), Speed(parts["Decompress"]))
    decode = np.array([line.at(float(each)) for each in x])
    return {
        "T_model = BF16 - V/B of the same cell; V(1 - 1/cr) fitted": _reading(cells, raw + decode, -x, ours),
        "BF16 recomputed, all of the prompt was cached; V/cr fitted": _reading(cells, decode, x, ours),
        "V/cr in Gbit that each row would need": _by_gbps(cells, (ours - decode) / x / 1e3),
    }


def _reading(cells: Cells, fixed: Floats, each: Floats, wanted: Floats) -> dict[str, Any]:
    error, scale = scale_error(fixed, each, wanted)
    return {
        "largest error": round(error, 3),
        "fitted, Gbit": round(scale / 1e3, 2),
        "residual": _by_gbps(cells, (fixed + scale * each) / wanted - 1),
    }


def one_factor(panels: dict[str, Cells], parts: dict[str, dict[str, float]]) -> dict[str, dict[str, Any]]:
    """Sizes in the proportion of the published transmissions, decoding as published, one number for the whole figure:
    the bandwidth that the breakdown was measured at."""
    fixed = np.concatenate([np.full_like(c.x, parts[d]["Decompress"]) for d, c in panels.items()])
    each = np.concatenate([c.x * parts[d]["Transmition"] for d, c in panels.items()])
    wanted = np.concatenate([c.points[OURS] for c in panels.values()])
    error, gbps = scale_error(fixed, each, wanted)
    found, at = {}, 0
    for dataset, cells in panels.items():
        mine = slice(at, at := at + len(cells.x))
        residual = (fixed[mine] + gbps * each[mine]) / wanted[mine] - 1
        found[dataset] = {
            "largest error": round(error, 3),
            "fitted, Gbps": round(gbps, 2),
            "residual": _by_gbps(cells, residual),
        }
    return found


def _by_gbps(cells: Cells, values: Floats) -> dict[str, float]:
    return {f"{1 / x:.0f}": round(float(v), 3) for x, v in zip(cells.x, values, strict=True)}


def _limits(cells: Cells) -> dict[str, Any]:
    """What no function of a class can do better at the KVServe rows, and how much the figure's points can be trusted.

    Convex over 1/B is eq. 1 with any waiting that grows with the load (M/G/1, processor sharing); concave is the best
    of any number of lines. Both errors are above the bar, so no parameters of either can meet it. Nothing gets slower
    on a faster link; where the points of the rival do, they are off by as much themselves.
    """
    x, y, raw = cells.x, cells.points[OURS], cells.points[RAW]
    through = y[0] + (y[-1] - y[0]) * (x - x[0]) / (x[-1] - x[0])
    found: dict[str, Any] = {"nearest any line comes to KVServe": round(line_error(x, y), 3)}
    for name, sign in (("convex", 1), ("concave", -1)):
        error, where = bend_error(x, y, sign)
        found[f"nearest any {name} curve comes"] = {
            "error": round(error, 3),
            "for the rows at Gbps": [round(1 / x[i]) for i in where],
        }
    found["line through the ends at the rows between"] = round(float(np.abs(through / y - 1).max()), 3)
    found["BF16 moves by"] = round(float(np.ptp(raw) / raw.mean()), 3)
    found["nearest any curve that falls with B comes to CacheGen"] = round(_disorder(cells.points[RIVAL]), 3)
    return found


def _disorder(y: Floats) -> float:
    """The smallest possible largest relative error of any rising function of x at these points: with a later point
    below an earlier one, each is off by half of the step."""
    highest = np.maximum.accumulate(y)
    return float(((highest - y) / (highest + y)).max())
