"""A report as one self-contained HTML page, whose figures are static SVG, and as PNG. No script in it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template

from kvserve_core.plots import pyplot, rendered, write
from kvserve_core.report.data import Report, Row
from kvserve_core.report.figures import FIGURES, shown
from kvserve_core.units import format_bandwidth, format_duration

SIZE = (8.0, 4.8)
DPI = 110
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #1a1a1a }
table { border-collapse: collapse; font-size: .85rem; width: 100% } caption { text-align: left; padding: .4rem 0 }
th, td { border-bottom: 1px solid #ddd; padding: .3rem .5rem; text-align: left; vertical-align: top }
td.n { text-align: right; font-variant-numeric: tabular-nums } svg { width: 100%; height: auto }
code { font-size: .8rem }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem } dd { margin: 0 }
"""
PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>$title</title>
<style>$style</style></head>
<body>
<h1>$title</h1>
<dl>$facts</dl>
$figures
$table
</body>
</html>
""")
COLUMNS = ("profile", "ratio", "quality", "encode", "decode", "pays below", "pipeline")


def page(report: Report) -> str:
    """The HTML.

    Raises:
        UnavailableComponentError: matplotlib is not installed.
    """
    title = f"kvserve profiles of {report.library.model_id}"
    figures = "\n".join(_figure(name, report) for name in shown(report))
    facts = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in _facts(report))
    return PAGE.substitute(title=escape(title), style=STYLE, facts=facts, figures=figures, table=_table(report.rows))


def write_html(report: Report, out: Path) -> None:
    """Raises:
    ConfigError: the file cannot be written. UnavailableComponentError: matplotlib is not installed.
    """
    write(out, page(report).encode())


def write_png(report: Report, out: Path) -> None:
    """All figures on one picture.

    Raises:
        ConfigError: the file cannot be written. UnavailableComponentError: matplotlib is not installed.
    """
    names = shown(report)
    height = -(-len(names) // 2)
    plots = pyplot()
    size = (2 * SIZE[0], height * SIZE[1])
    figure, grid = plots.subplots(height, 2, figsize=size, layout="constrained", squeeze=False)
    for axes, name in zip(grid.flat, names, strict=False):
        FIGURES[name][1](axes, report)
        axes.set_title(FIGURES[name][0])
    for axes in list(grid.flat)[len(names) :]:
        axes.remove()
    write(out, rendered(plots, figure, "png", dpi=DPI))


def _figure(name: str, report: Report) -> str:
    title, draw = FIGURES[name]
    plots = pyplot()
    with plots.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure, axes = plots.subplots(figsize=SIZE, layout="constrained")
        draw(axes, report)
        svg = rendered(plots, figure, "svg", dpi=DPI, metadata={"Date": None, "Creator": None}).decode()
    inline = svg[svg.index("<svg") :].replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)
    return f'<h2 id="{name}">{escape(title)}</h2>\n<figure>{_own_ids(inline, name)}</figure>'


def _own_ids(svg: str, name: str) -> str:
    """Ids made unique within the page: every figure starts counting anew."""
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    return re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", svg)


def _facts(report: Report) -> Iterable[tuple[str, str]]:
    made = report.library
    yield from (("model", made.model_id), ("fingerprint", made.fingerprint[:16]), ("device", made.device))
    yield from (("created", made.created), ("workload", report.workload))
    for key in ("candidates", "evaluations", "stopped", "seed", "rank_correlation", "wall_s", "cpu_s"):
        if (value := report.search.get(key)) is not None:
            yield key.replace("_", " "), f"{value:.3g}" if isinstance(value, float) else str(value)
    families = report.search.get("families")
    for name, size in families.items() if isinstance(families, Mapping) else ():
        yield f"family {name}", f"{size} candidates"


def _table(rows: Sequence[Row]) -> str:
    head = "".join(f"<th>{column}</th>" for column in COLUMNS)
    body = "\n".join(f"<tr>{''.join(_cells(row))}</tr>" for row in sorted(rows, key=lambda r: r.profile.cr))
    return f'<h2 id="profiles">Profiles</h2>\n<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>'


def _cells(row: Row) -> Iterable[str]:
    p, q = row.profile, row.quality
    exact = "exact" if p.exact else "not measured"
    quality = f"{q.value:.4f} ({q.lower:.4f} to {q.upper:.4f}, {q.samples} samples, {q.metric})" if q else exact
    yield f"<td>{escape(p.name)}</td><td class=n>{p.cr:.2f}</td><td>{escape(quality)}</td>"
    for speed in (p.encode, p.decode):
        slope = format_bandwidth(1 / speed.s_per_byte if speed.s_per_byte else None)
        yield f"<td class=n>{slope}<br>+ {format_duration(speed.fixed_s)}</td>"
    yield f"<td class=n>{format_bandwidth(row.break_even_bps) if row.break_even_bps else '-'}</td>"
    chains = "<br>".join(f"{escape(plane)}: <code>{escape(chain)}</code>" for plane, chain in row.chains.items())
    yield f"<td>{chains}</td>"
