"""``kvserve check NAME``: the conformance checks of one component, without writing a test and without pytest."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvserve_core.cli.output import AsJson, OfKind, kind_of, print_json, print_table
from kvserve_core.cli.show import Name, only_kind
from kvserve_core.errors import ConfigError
from kvserve_core.registry import default_registry
from kvserve_core.testing import Result, Subject, checks_for, result

Config = Annotated[str | None, typer.Option("--config", help="Its configuration as JSON; the default one if absent.")]
Golden = Annotated[Path | None, typer.Option("--golden", help="The folder of its golden frames, checked as well.")]
Write = Annotated[bool, typer.Option("--write-golden", help="First write the frame of this format version, if absent.")]
Library = Annotated[
    Path | None, typer.Option("--library", help="A profile library with the calibrated files it reads.")
]
Device = Annotated[str, typer.Option("--device", help="Where it runs, e.g. cuda.")]
Only = Annotated[str | None, typer.Option("--only", help="Run the check of this name only.")]


def check(
    name: Name,
    kind: OfKind = None,
    config: Config = None,
    golden: Golden = None,
    write_golden: Write = False,
    library: Library = None,
    device: Device = "cpu",
    only: Only = None,
    as_json: AsJson = False,
) -> None:
    """Check that a component does what every component of its kind must; exit with 1 if it does not."""
    subject = _subject(name, kind, config, golden, library, device)
    if write_golden:
        _write_golden(subject, quiet=as_json)
    results = [result(each, subject) for each in checks_for(subject) if only in (None, each.name)]
    if not results:
        raise ConfigError(f"no check of a {subject.kind} is called {only!r}; run it without '--only' to see them")
    if as_json:
        about = {"kind": subject.kind, "name": name, "configuration": subject.config.model_dump(mode="json")}
        print_json(about | {"checks": [asdict(each) for each in results]})
    else:
        _print(subject, results)
    if any(each.status == "failed" for each in results):
        raise typer.Exit(1)


def _subject(
    name: str, kind: str | None, config: str | None, golden: Path | None, library: Path | None, device: str
) -> Subject:
    import torch

    registry = default_registry()
    chosen = kind_of(kind) if kind else only_kind(registry, name)
    more: dict[str, Any] = {"golden": golden, "device": torch.device(device)}
    if library is not None:
        from kvserve_core.library import ProfileLibrary

        more["artefacts"] = ProfileLibrary.load(library).artefacts
    subject = Subject.of(chosen, name, _json(config), registry, **more)
    try:
        _ = subject.stage  # a wrong configuration is an error of the command, not of the component
    except ConfigError as error:
        hint = "" if config else f"; pass --config JSON, 'kvserve show {name}' lists the fields"
        raise ConfigError(error.reason + hint, error.path) from error
    return subject


def _json(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{text!r} is not JSON: {error}", "--config") from None
    if not isinstance(value, dict):
        raise ConfigError(f"expected a JSON object such as '{{\"levels\": 16}}', got {text!r}", "--config")
    return value


def _write_golden(subject: Subject, *, quiet: bool) -> None:
    from kvserve_core.testing.checks_golden import write

    written = write(subject)
    if not quiet:
        typer.echo(f"wrote {written}" if written else "the golden frame is there already; it is never rewritten")


def _print(subject: Subject, results: list[Result]) -> None:
    rows = [(each.status, each.check, each.detail) for each in results]
    print_table(f"{subject.kind} {subject.name}", ("status", "check", "detail"), rows)
    count = {status: sum(each.status == status for each in results) for status in ("ok", "skipped", "failed")}
    typer.echo(", ".join(f"{n} {status}" for status, n in count.items()))
