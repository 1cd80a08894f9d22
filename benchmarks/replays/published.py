"""Figures 4 and 13 against eq. 1: one line over 1/B for every method, with T_model common to all of a model.

A published figure gives latencies only, so the lines' parameters come from its points: relative least squares, every
method weighted by how straight its own points are, under the condition that no two methods change places. Whether
that condition can be met at all, and how near the lines come, is what is shown; and beside it how many methods change
places without it. The lines are those of :mod:`kvserve_core.latency`, and so are the latencies at each bandwidth.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import comb

import numpy as np

from kvserve_core.latency import Line, Speed, latency_line, threshold
from replays.bars import Result
from replays.lines import Floats, constrained, line_error
from replays.reference import text

NEAR = 0.05
RAW, OURS = "Default(BF16)", "KVServe"
BREAK_EVEN = {"CacheGen": 81.9, "KIVI": 148.8, "KVServe": 281.2}
"""Gbps, from the figure's own numbers; its text says 50, 55 and 110."""
MARGIN = 1e-5
"""By which methods stay in order, as a share of the figure's smallest latency."""


@dataclass(frozen=True)
class Cells:
    """One panel of a figure: milliseconds by method over ``x`` = 1/Gbps, rising."""

    x: Floats
    points: dict[str, Floats]


def read(name: str, panel: str) -> dict[str, Cells]:
    """The panels of a figure: ``panel`` is the column that tells them apart."""
    rows = list(csv.DictReader(io.StringIO(text(name))))
    found = {}
    for key in dict.fromkeys(row[panel] for row in rows):
        mine = sorted((r for r in rows if r[panel] == key), key=lambda r: -float(r["Bandwidth"]))
        methods = dict.fromkeys(r["Method"] for r in rows)
        points = {m: np.array([float(r["JCT"]) for r in mine if r["Method"] == m]) for m in methods}
        found[key] = Cells(np.array(sorted({1 / float(r["Bandwidth"]) for r in mine})), points)
    return found


def break_even() -> Result:
    """Fig. 4, Theorem 6.1: ``(V - V / cr) / (enc + dec)``."""
    given = json.loads(text("motivation_fig4.json"))
    nbytes, free = given["original_gb"], Speed()
    raw = latency_line(nbytes, 1.0, free, free)
    found = {}
    for name, m in given["methods"].items():
        encode, decode = Speed(m["compress_s"]), Speed(m["decompress_s"])
        line = latency_line(nbytes, nbytes / m["compressed_gb"], encode, decode)
        found[name] = round(threshold(line, raw) * 8, 1)  # GB/s
    return Result(
        found, BREAK_EVEN, found == BREAK_EVEN, {"text of the paper": {"CacheGen": 50, "KIVI": 55, OURS: 110}}
    )


def fit(cells: Cells, used: dict[str, np.ndarray], ordered: bool = True) -> dict[str, Floats]:
    """Milliseconds of every method at every x. ``used``: the points of each method that are to be fitted.

    ordered: on the condition that no two methods change places.

    The parameters: T_model, then V/s and V/cr for each method but raw, which has V alone, or, where it does not depend
    on B (recomputing), T_model alone.
    """
    methods = [m for m in cells.points if m != RAW]
    flat = np.ptp(cells.points[RAW]) < 0.02 * cells.points[RAW].mean()
    width = 2 + 2 * len(methods)
    basis = {RAW: _basis(cells.x, width, [1.0, 0.0 if flat else None])}
    for i, method in enumerate(methods):
        own = [0.0] * (2 * i) + [1.0, None]
        basis[method] = _basis(cells.x, width, [0.0 if flat else 1.0, 0.0, *own])
    rows, wanted = _weighted(cells, basis, used)
    at_least, margins = _conditions(cells, basis, used, width, ordered)
    t_model, size, *each = (float(v) for v in constrained(rows, wanted, at_least, margins))
    lines = {RAW: Line(t_model, 0.0 if flat else size)}
    for i, method in enumerate(methods):
        lines[method] = Line((0.0 if flat else t_model) + each[2 * i], each[2 * i + 1])
    return {m: np.array([lines[m].at(float(x)) for x in cells.x]) for m in cells.points}


def _basis(x: Floats, width: int, shape: list[float | None]) -> Floats:
    """Rows over the parameters, one for each x; None stands for x."""
    found = np.zeros((len(x), width))
    for column, value in enumerate(shape):
        found[:, column] = x if value is None else value
    return found


def _weighted(cells: Cells, basis: dict[str, Floats], used: dict[str, np.ndarray]) -> tuple[Floats, Floats]:
    rows, wanted = [], []
    for method, y in cells.points.items():
        mine = used[method]
        weight = 1.0 / line_error(cells.x[mine], y[mine])
        rows.append(weight * basis[method][mine] / y[mine, None])
        wanted.append(np.full(mine.sum(), weight))
    return np.concatenate(rows), np.concatenate(wanted)


def _conditions(
    cells: Cells, basis: dict[str, Floats], used: dict[str, np.ndarray], width: int, ordered: bool
) -> tuple[Floats, Floats]:
    """No parameter below 0, and neighbours in a cell in the published order if so wanted."""
    scale = min(y.min() for y in cells.points.values())
    rows, margins = [*(np.eye(width) / scale)], [0.0] * width
    for cell, faster, slower in _neighbours(cells) if ordered else ():
        if used[faster][cell] and used[slower][cell]:
            rows.append((basis[slower][cell] - basis[faster][cell]) / scale)
            margins.append(MARGIN)
    return np.array(rows), np.array(margins)


def _neighbours(cells: Cells) -> Iterator[tuple[int, str, str]]:
    for cell in range(len(cells.x)):
        ranked = sorted(cells.points, key=lambda m: cells.points[m][cell])
        yield from ((cell, a, b) for a, b in pairwise(ranked))


def inversions(cells: Cells, found: dict[str, Floats]) -> int:
    """Pairs of methods that the lines put in the opposite order of the published points; a tie inverts nothing."""
    pairs = [(a, b) for a in cells.points for b in cells.points if a != b]
    wrong = [(cells.points[a] < cells.points[b]) & (found[a] >= found[b]) for a, b in pairs]
    return int(np.sum(wrong))


def residuals(cells: Cells, found: dict[str, Floats], method: str) -> dict[str, float]:
    """Relative residuals by Gbps."""
    gbps = [f"{1 / x:.0f}" for x in cells.x]
    error = found[method] / cells.points[method] - 1
    return {g: round(float(e), 3) for g, e in zip(gbps, error, strict=True)}


def jct() -> tuple[Result, Result]:
    """Fig. 13: pairs of methods in the wrong order, and the largest residual of a KVServe row."""
    wrong, free, pairs, worst, detail = 0, 0, 0, 0.0, {}
    for model, cells in read("jct_bandwidth.csv", "Model").items():
        every = {m: np.ones(len(cells.x), bool) for m in cells.points}
        found = fit(cells, every)
        wrong += inversions(cells, found)
        free += inversions(cells, fit(cells, every, ordered=False))
        pairs += len(cells.x) * comb(len(cells.points), 2)
        each = {m: residuals(cells, found, m) for m in cells.points}
        worst = max(worst, *map(abs, each[OURS].values()))
        detail[model] = {"residual": each, "best line of BF16 alone": round(line_error(cells.x, cells.points[RAW]), 3)}
    note = {
        "note": "the published BF16 points rise faster than 1/B, so no line of eq. 1 passes through them",
        "pairs out of order in a fit without that condition": free,
        "of so many": pairs,
    }
    return Result(wrong, 0, wrong == 0, note), Result(worst, NEAR, worst <= NEAR, detail)
