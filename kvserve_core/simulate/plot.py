"""A picture of a simulation: how long first tokens took, and when. Imported only for ``--plot``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvserve_core.plots import pyplot, save
from kvserve_core.simulate.summary import BINS


def draw(done: Mapping[str, Sequence[Mapping[str, Any]]], out: Path) -> None:
    """Write the distribution of TTFT, and over time its mean with the bandwidth, of the first seed.

    Raises:
        UnavailableComponentError: matplotlib is not installed.
        ConfigError: the file cannot be written.
    """
    plots = pyplot()
    figure, (left, right) = plots.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    _distributions(left, done)
    _over_time(right, done)
    save(plots, figure, out)


def _distributions(axes: Any, done: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    shares = [i / BINS for i in range(BINS + 1)]
    for name, summaries in done.items():
        axes.plot(summaries[0]["plot"]["ttft_s"], shares, label=name)
    axes.set(xscale="log", xlabel="TTFT (s)", ylabel="share of requests", ylim=(0, 1))
    axes.legend()


def _over_time(axes: Any, done: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    links = axes.twinx()
    for name, summaries in done.items():
        each = summaries[0]["plot"]["over_time"]
        axes.plot(each["time_s"], each["ttft_s"], label=name)
    links.plot(each["time_s"], [rate * 8 / 1e9 for rate in each["bytes_per_s"]], color="grey", alpha=0.5)
    axes.set(xlabel="time (s)", ylabel="mean TTFT (s)", ylim=(0, None))
    links.set(ylabel="bandwidth of the first link (Gbps, grey)", ylim=(0, None))
