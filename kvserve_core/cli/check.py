"""``kvserve check NAME``: the conformance checks of one component, without writing a test and without pytest."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from kvserve_core.cli.output import AsJson, OfKind, kind_of, print_json, print_table
from kvserve_core.cli.show import Name, only_kind
from kvserve_core.component import ComponentConfig
from kvserve_core.errors import ConfigError
from kvserve_core.json_text import parsed
from kvserve_core.registry import default_registry
from kvserve_core.testing import Check, Result, Subject, checks_for, result
from kvserve_core.testing.check import STAGES, always
from kvserve_core.testing.checks_config import instance
from kvserve_core.testing.checks_golden import folder_of, write

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
    results = _results(subject, only, write_golden, as_json)
    if not results:
        raise ConfigError(f"no check of a {subject.kind} is called {only!r}; run it without '--only' to see them")
    if as_json:
        about = {"kind": subject.kind, "name": name, "configuration": _configured(subject).model_dump(mode="json")}
        print_json(about | {"checks": [asdict(each) for each in results]})
    else:
        _print(subject, results)
    if all(each.status == "skipped" for each in results):
        typer.echo(f"error: nothing was checked: {results[0].detail}", err=True)
        raise typer.Exit(1)
    if any(each.status == "failed" for each in results):
        raise typer.Exit(1)


def _subject(
    name: str, kind: str | None, config: str | None, golden: Path | None, library: Path | None, device: str
) -> Subject:
    registry = default_registry()
    chosen = kind_of(kind) if kind else only_kind(registry, name)
    more: dict[str, Any] = {"golden": _folder(golden), "device": _device(device)}
    if library is not None:
        from kvserve_core.library import ProfileLibrary

        more["artefacts"] = ProfileLibrary.load(library).artefacts
    subject = Subject.of(chosen, name, _json(config), registry, **more)
    try:  # a wrong configuration is an error of the command, not of the component
        _configured(subject)
    except ConfigError as error:
        hint = "" if config else f"; pass --config JSON, 'kvserve show {name}' lists the fields"
        raise ConfigError(error.reason + hint, error.path) from error
    return subject


def _configured(subject: Subject) -> ComponentConfig:
    """Its validated configuration, without an instance, which may fail."""
    return (subject.registry or default_registry()).configure(subject.kind, subject.spec)[1]


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # AssertionError: torch was built without it
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"no device {name!r} here: {reason}; name one such as 'cpu'", "--device") from None
    return device


def _folder(golden: Path | None) -> Path | None:
    if golden is not None and golden.exists() and not golden.is_dir():
        raise ConfigError(f"{str(golden)!r} is a file; name the folder of golden frames", "--golden")
    return golden


def _json(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        value = parsed(text)
    except ValueError as error:
        raise ConfigError(f"{text!r:.80} is not JSON: {error}", "--config") from None
    if not isinstance(value, dict):
        raise ConfigError(f"expected a JSON object such as '{{\"levels\": 16}}', got {text!r:.80}", "--config")
    return value


def _results(subject: Subject, only: str | None, write_golden: bool, quiet: bool) -> list[Result]:
    chosen = checks_for(subject)
    if chosen != [instance]:  # else it cannot even be created, and this says why
        written = _write_golden(subject, quiet) if write_golden else []
        return written + [result(each, subject) for each in chosen if only in (None, each.name)]
    return [result(instance, subject)]


def _write_golden(subject: Subject, quiet: bool) -> list[Result]:
    """Nothing, or why the frame could not be written."""
    folder_of(subject)
    paths: list[Path | None] = []
    found = result(Check("write_golden", STAGES, lambda s: paths.append(write(s)), always), subject)
    if found.status != "ok":
        return [found]
    if not quiet:
        typer.echo(f"wrote {paths[0]}" if paths[0] else "the golden frame is there already; it is never rewritten")
    return []


def _print(subject: Subject, results: list[Result]) -> None:
    rows = [(each.status, each.check, each.detail) for each in results]
    print_table(f"{subject.kind} {subject.name}", ("status", "check", "detail"), rows)
    count = {status: sum(each.status == status for each in results) for status in ("ok", "skipped", "failed")}
    typer.echo(", ".join(f"{n} {status}" for status, n in count.items()))
