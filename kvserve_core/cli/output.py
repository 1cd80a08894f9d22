"""What commands share: options, JSON that no terminal wraps, and tables that take text literally."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvserve_core.component import KINDS, Kind
from kvserve_core.errors import UnknownNameError, did_you_mean

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
OfKind = Annotated[str | None, typer.Option("--kind", help=f"One of: {', '.join(KINDS)}.")]
STYLES = {"ok": "green"} | dict.fromkeys(("warn", "unavailable", "skipped"), "yellow")
STYLES |= dict.fromkeys(("broken", "fail", "failed"), "red")
PIPE_WIDTH = 160


def kind_of(text: str) -> Kind:
    """A kind from the command line.

    Raises:
        UnknownNameError: there is no such kind.
    """
    for kind in KINDS:
        if kind == text:
            return kind
    raise UnknownNameError(did_you_mean(text, KINDS, "kind"))


def print_json(value: Any) -> None:
    """Plain JSON on stdout."""
    typer.echo(json.dumps(value, indent=2))


def console() -> Console:
    """Of the terminal's width, or wide where output goes to a file. Brackets in text are not markup."""
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(width=width, markup=False, highlight=False, emoji=False)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Rows under a title; a row that holds a status word gets its colour."""
    typer.echo(title)
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        style = next((STYLES[cell] for cell in row if cell in STYLES and cell != "ok"), None)
        table.add_row(*row, style=style)
    console().print(table)
