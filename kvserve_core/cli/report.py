"""``kvserve report``: a profile library as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvserve_core.errors import ConfigError
from kvserve_core.library import ProfileLibrary
from kvserve_core.report import read, write_html, write_png
from kvserve_core.units import parse_bytes


def report(
    library: Annotated[Path, typer.Argument(help="A profile library.")],
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write the figures as one picture.")] = None,
    workload: Annotated[str, typer.Option(help="Whose quality records are shown.")] = "default",
    min_quality: Annotated[float, typer.Option(help="The floor that the figures mark.", min=0, max=1)] = 0.99,
    nbytes: Annotated[str, typer.Option("--bytes", help="KV bytes of the latency figure.")] = "64MiB",
) -> None:
    """Draw a profile library: ratio against quality, latency over bandwidth, the search, what each stage gives."""
    if html is None and png is None:
        raise ConfigError("nothing to write; give --html FILE, --png FILE or both")
    found = read(ProfileLibrary.load(library), workload, min_quality, parse_bytes(nbytes))
    if html is not None:
        write_html(found, html)
        typer.echo(f"wrote {html}")
    if png is not None:
        write_png(found, png)
        typer.echo(f"wrote {png}")
