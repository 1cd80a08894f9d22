"""A picture of a decision: latency of every feasible profile over bandwidth, and the envelope beneath them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from kvserve_core.cli.explain_curves import curve, pays_below
from kvserve_core.controller import Controller
from kvserve_core.plots import pyplot, save
from kvserve_core.policy import Decision

GBPS = 1.25e8
STYLES, COLOURS = ("-", "--", ":"), 10
LOW, HIGH, POINTS = 1.0, 1000.0, 400


def draw(control: Controller, decision: Decision, out: Path) -> None:
    """Lines, envelope, thresholds against raw, and the choice, over 1 to 1000 Gbps.

    Raises:
        UnavailableComponentError: matplotlib is not installed.
        ConfigError: the file cannot be written.
    """
    plots = pyplot()
    figure, axes = plots.subplots(figsize=(9, 5.5), layout="constrained")
    _lines(axes, control, decision)
    _marks(axes, control, decision)
    axes.set(xscale="log", yscale="log", xlabel="bandwidth (Gbps)", ylabel="latency (ms)", xlim=(LOW, HIGH))
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(plots, figure, out)


def _lines(axes: Any, control: Controller, decision: Decision) -> None:
    rates = np.geomspace(LOW, HIGH, POINTS)
    every = []
    for number, priced in enumerate(control.feasible(decision.context)):
        times = [1e3 * control.estimate(priced, decision, float(g * GBPS)).latency_s for g in rates]
        every.append(times)
        axes.plot(
            rates, times, linewidth=1, linestyle=STYLES[number // COLOURS % len(STYLES)], label=priced.profile.name
        )
    axes.plot(rates, np.min(every, axis=0), color="black", linewidth=3, alpha=0.35, label="envelope")


def _marks(axes: Any, control: Controller, decision: Decision) -> None:
    raw, *others = control.feasible(decision.context)
    nbytes, form = decision.context.nbytes, control.form
    base = curve(raw, nbytes, form)
    for priced in others:
        limit = pays_below(curve(priced, nbytes, form), base) / GBPS
        if LOW <= limit <= HIGH:
            latency_s = control.estimate(priced, decision, limit * GBPS).latency_s
            axes.plot([limit], [1e3 * latency_s], marker="|", markersize=14, color="grey")
    chosen = next(c for c in decision.candidates if c.profile == decision.profile)
    axes.plot(
        [decision.bandwidth / GBPS], [1e3 * chosen.latency_s], "o", color="red", label=f"choice: {chosen.profile}"
    )
    if decision.context.slo_s is not None:
        axes.axhline(1e3 * decision.context.slo_s, linestyle=":", color="red", label="SLO")
