"""``kvserve list-components``. Imports no torch unless ``--strict`` asks for every component."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from kvserve_core.cli.output import AsJson, OfKind, kind_of, print_json, print_table
from kvserve_core.registry import Row, default_registry

Strict = Annotated[bool, typer.Option("--strict", help="Import every component; exit with 1 when one is broken.")]


def list_components(kind: OfKind = None, strict: Strict = False, as_json: AsJson = False) -> None:
    """List every installed component."""
    wanted = (kind_of(kind), "plugin") if kind else None
    rows = [row for row in default_registry().rows(strict=strict) if wanted is None or row.kind in wanted]
    if as_json:
        print_json([asdict(row) for row in rows])
    else:
        _print(rows)
    if strict and any(row.status == "broken" for row in rows):
        raise typer.Exit(1)


def _print(rows: list[Row]) -> None:
    columns = ("kind", "name", "status", "provider", "source", "summary")
    cells = [
        (r.kind, r.name, r.status, f"{r.provider} {r.version}".strip(), r.source, _about(r.summary, r.reason))
        for r in rows
    ]
    print_table("components", columns, cells)
    count = {status: sum(r.status == status for r in rows) for status in ("ok", "unavailable", "broken")}
    typer.echo(", ".join(f"{n} {status}" for status, n in count.items()))


def _about(summary: str, reason: str) -> str:
    return f"{summary} ({reason})" if summary and reason else summary or reason
