"""Writes docs/grafana-kvserve.json, a Grafana dashboard for any engine and the proxy, from the table of metrics.

``python docs/generate_dashboard.py``. A test keeps the file up to date and checks that every metric is on it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from kvserve_core.metric_names import PREFIX

TARGET = Path(__file__).with_name("grafana-kvserve.json")
PROXY = "kvserve_proxy_"
WIDTH, HEIGHT, COLUMNS = 8, 8, 3
SOURCE = {"type": "prometheus", "uid": "${source}"}


class Panel(NamedTuple):
    """A graph: its unit as Grafana calls it, and queries with their legends."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    about: str = ""


def rate(metric: str, by: str = "instance", prefix: str = PREFIX) -> str:
    """Per second, of a counter."""
    return f"sum by ({by}) (rate({prefix}{metric}_total[$__rate_interval]))"


def quantiles(metric: str, prefix: str = PREFIX) -> tuple[tuple[str, str], ...]:
    """Median and 95th percentile of a histogram, over all instances."""
    buckets = f"sum by (le) (rate({prefix}{metric}_bucket[$__rate_interval]))"
    return tuple((f"histogram_quantile({q}, {buckets})", f"p{round(100 * q)}") for q in (0.5, 0.95))


def gauge(metric: str, by: str, prefix: str = PREFIX) -> str:
    """A gauge, the largest where several series are alike."""
    return f"max by ({by}) ({prefix}{metric})"


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "What is saved",
        (
            Panel(
                "Bytes of KV cache and on the wire",
                "Bps",
                ((rate("raw_bytes"), "{{instance}} original"), (rate("wire_bytes"), "{{instance}} wire")),
                "Producers and consumers each count what they moved.",
            ),
            Panel(
                "Compression ratio",
                "none",
                (
                    (f"{rate('raw_bytes')} / {rate('wire_bytes')}", "{{instance}}"),
                    *quantiles("compression_ratio"),
                ),
                "By bytes, and by transfer.",
            ),
            Panel("Profiles chosen", "reqps", ((rate("decisions", "profile, reason"), "{{profile}}: {{reason}}"),)),
        ),
    ),
    (
        "What it costs",
        (
            Panel("Encode", "s", quantiles("encode_seconds")),
            Panel("Transfer", "s", quantiles("transfer_seconds"), "Time on the link."),
            Panel("Decode", "s", quantiles("decode_seconds")),
            Panel("Load", "s", quantiles("load_seconds"), "From the fetch to KV in the engine's blocks."),
            Panel(
                "Goodput of links, and where profiles stop paying",
                "Bps",
                (
                    (gauge("goodput_bytes_per_second", "link"), "{{link}}"),
                    (gauge("break_even_bytes_per_second", "profile"), "B* {{profile}}"),
                ),
                "A profile pays while the link's goodput is below its B*.",
            ),
            Panel("Held for consumers", "bytes", ((gauge("published_bytes", "instance"), "{{instance}}"),)),
        ),
    ),
    (
        "What goes wrong",
        (
            Panel("Transfers", "reqps", ((rate("transfers", "side, ok"), "{{side}}, ok: {{ok}}"),)),
            Panel("Steps down the ladder", "ops", ((rate("fallbacks", "rung"), "{{rung}}"),)),
            Panel("SLO misses", "reqps", ((rate("slo_misses"), "{{instance}}"),)),
            Panel("Hooks that failed", "ops", ((rate("hook_failures", "instance, hook"), "{{instance}} {{hook}}"),)),
            Panel(
                "Prompt tokens loaded, and taken from lossy cache entries",
                "none",
                ((rate("external_tokens"), "{{instance}} loaded"), (rate("lossy_cache_tokens"), "{{instance}} lossy")),
            ),
            Panel("Profile library loaded", "bool", ((gauge("library_loaded", "instance"), "{{instance}}"),)),
        ),
    ),
    (
        "vLLM proxy",
        (
            Panel("Requests", "reqps", ((rate("requests", "outcome", PROXY), "{{outcome}}"),)),
            Panel("Computed by the decode server alone", "reqps", ((rate("alone", "reason", PROXY), "{{reason}}"),)),
            Panel(
                "Servers",
                "none",
                (
                    (gauge("upstream_up", "role, url", PROXY), "{{role}} {{url}} up"),
                    (gauge("upstream_known", "role, url", PROXY), "{{role}} {{url}} known"),
                ),
            ),
            Panel(
                "Requests at each server",
                "none",
                ((gauge("upstream_outstanding", "role, url", PROXY), "{{role}} {{url}}"),),
            ),
            Panel("Prefill step", "s", quantiles("prefill_seconds", PROXY)),
            Panel("Time to the first byte", "s", quantiles("first_byte_seconds", PROXY)),
            Panel(
                "Tried elsewhere, and servers taken out",
                "ops",
                (
                    (rate("retries", "step", PROXY), "{{step}} again"),
                    (rate("upstream_ejections", "role, url", PROXY), "{{role}} {{url}} out"),
                ),
            ),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    """The whole dashboard, as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        panels.append(_placed({"type": "row", "title": title, "collapsed": False}, 0, y, 24, 1, len(panels)))
        for i, panel in enumerate(row):
            x, below = WIDTH * (i % COLUMNS), HEIGHT * (i // COLUMNS)
            panels.append(_placed(_graph(panel), x, y + 1 + below, WIDTH, HEIGHT, len(panels)))
        y += 1 + HEIGHT * -(-len(row) // COLUMNS)
    variable = {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"}
    return {
        "uid": "kvserve",
        "title": "kvserve",
        "tags": ["kvserve"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [variable]},
        "panels": panels,
    }


def _graph(panel: Panel) -> dict[str, Any]:
    targets = [
        {"refId": chr(65 + i), "datasource": SOURCE, "expr": expr, "legendFormat": legend}
        for i, (expr, legend) in enumerate(panel.queries)
    ]
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": targets,
    }


def _placed(panel: dict[str, Any], x: int, y: int, w: int, h: int, number: int) -> dict[str, Any]:
    return {"id": number + 1, **panel, "gridPos": {"x": x, "y": y, "w": w, "h": h}}


def document() -> str:
    """The file."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    TARGET.write_text(document(), encoding="utf-8")
