"""The figures of a report, drawn on given axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvserve_core.report.data import KINDS, Report, best_so_far, frontier

GBPS = 1.25e8
"""Bytes/s."""
LOW, HIGH, POINTS = 0.01, 1000.0, 300
LEGEND = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.12), "fontsize": "x-small", "ncols": 2}
"""Below the axes: names of pipelines are long."""
GREY, BLUE, RED = "#8a8a8a", "#1f5fa8", "#b3261e"


def ratio_against_quality(axes: Any, report: Report) -> None:
    """Every measurement grey, the library's profiles with their intervals, and the frontier."""
    tried = [s for s in report.steps if not s.error and s.cr > 0]
    if tried:
        axes.plot([s.quality for s in tried], [s.cr for s in tried], ".", color=GREY, label="measured in the search")
    known = [(row.quality, row.profile.cr) for row in report.rows if row.quality is not None]
    for q, cr in known:
        axes.errorbar([q.value], [cr], xerr=[[q.value - q.lower], [q.upper - q.value]], fmt="o", color=BLUE, capsize=3)
    points = frontier((q.value, cr) for q, cr in known)
    if points:
        axes.plot(*zip(*points, strict=True), color=BLUE, linewidth=1, label="library, with 95 % intervals")
    axes.axvline(report.floor, linestyle=":", color=RED, label=f"floor {report.floor:g}")
    axes.set(xlabel=f"quality on '{plain(report.workload)}', relative to uncompressed KV", ylabel="compression ratio")
    axes.set_yscale("log")
    axes.legend(fontsize="small")


def latency_over_bandwidth(axes: Any, report: Report) -> None:
    """Eq. 1 of every profile, without T_model, and the lower envelope (Theorem 6.2)."""
    rates = np.geomspace(LOW, HIGH, POINTS)
    every = []
    for row in report.rows:
        line = row.profile.line(report.nbytes)
        seconds = np.asarray([line.at(1.0 / float(rate * GBPS)) for rate in rates])
        every.append(seconds)
        axes.plot(rates, 1e3 * seconds, linewidth=1, label=row.profile.name)
    if every:
        axes.plot(rates, 1e3 * np.min(every, axis=0), color="black", linewidth=3, alpha=0.3, label="envelope")
    axes.set(
        xlabel="bandwidth (Gbps)", ylabel=f"ms for {report.nbytes / 2**20:g} MiB of KV", xscale="log", yscale="log"
    )
    axes.legend(**LEGEND)


def search_trace(axes: Any, report: Report) -> None:
    """Ratio of each evaluation in order, whether it kept the floor, and the best so far."""
    number = np.arange(1, len(report.steps) + 1)
    kept = np.asarray([not s.error and s.low >= report.floor for s in report.steps], dtype=bool)
    ratios = np.asarray([s.cr for s in report.steps])
    axes.plot(number[kept], ratios[kept], "o", color=BLUE, label=f"keeps {report.floor:g}")
    axes.plot(number[~kept], ratios[~kept], "x", color=RED, label="does not")
    axes.step(number, best_so_far(report.steps, report.floor), where="post", color="black", label="best so far")
    axes.set(xlabel="evaluation", ylabel="compression ratio")
    axes.legend(fontsize="small")


def stage_gains(axes: Any, report: Report) -> None:
    """The highest ratio at the floor with each component, by kind."""
    gains = [g for kind in reversed(KINDS) for g in reversed(report.gains) if g.kind == kind]
    shades = dict(zip(KINDS, ("#1f5fa8", "#5a9367", "#b8860b"), strict=True))
    axes.barh(range(len(gains)), [g.cr for g in gains], color=[shades[g.kind] for g in gains])
    axes.set_yticks(range(len(gains)), [f"{plain(g.component)} ({g.tried})" for g in gains], fontsize="small")
    for kind, colour in shades.items():
        axes.bar([0], [0], color=colour, label=kind)
    axes.set(xlabel=f"highest ratio at quality {report.floor:g} (number of pipelines)")
    axes.legend(fontsize="small", loc="lower right")


def plain(text: str) -> str:
    """Text of others for a figure: a ``$`` in it begins no formula."""
    return text.replace("$", r"\$")


FIGURES: dict[str, tuple[str, Callable[[Any, Report], None]]] = {
    "quality": ("Ratio against quality", ratio_against_quality),
    "latency": ("Latency over bandwidth", latency_over_bandwidth),
    "search": ("The search", search_trace),
    "stages": ("What each component gives", stage_gains),
}
"""Title and drawing of each figure, in the order of the page."""


def shown(report: Report) -> list[str]:
    """The figures that there is something to draw for."""
    empty = {"search"} if not report.steps else set()
    return [name for name in FIGURES if name not in empty]
