"""``kvserve doctor``: what works here, what does not, and where each setting comes from."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvserve_core.cli import checks
from kvserve_core.cli.output import AsJson, print_json, print_table
from kvserve_core.errors import ConfigError
from kvserve_core.registry import default_registry
from kvserve_core.settings import Loaded, load_settings
from kvserve_core.units import format_bandwidth, format_bytes, format_duration

ConfigFile = Annotated[Path | None, typer.Option("--config", help="A settings file, instead of KVSERVE_CONFIG.")]
FORMATS = {
    "slo": format_duration,
    "lease": format_duration,
    "deadline": format_duration,
    "bandwidth": format_bandwidth,
    "chunk_bytes": format_bytes,
    "priors": format_bandwidth,
    "published_bytes_max": format_bytes,
    "gpu.batch_bytes": format_bytes,
}


def doctor(config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Check this installation and say where each setting is from."""
    found, settings = run(config)
    ok = all(check.status != "fail" for check in found)
    if as_json:
        print_json({"ok": ok, "checks": [asdict(c) for c in found], "settings": settings})
    else:
        _print(found, settings)
    if not ok:
        raise typer.Exit(1)


def run(config: Path | None) -> tuple[list[checks.Check], list[dict[str, Any]]]:
    """All checks, and one row per setting; no rows where the settings cannot be read."""
    registry = default_registry()
    found = [*checks.python(), *checks.packages(), checks.torch(), *checks.plugins(registry, os.environ)]
    found.append(checks.cache())
    try:
        loaded = load_settings(file=config)
    except ConfigError as error:
        return [*found, checks.Check("settings", "fail", str(error))], []
    found.append(checks.Check("settings", "ok", f"read from {str(loaded.file)!r}" if loaded.file else "no file"))
    found += checks.unknown_variables(loaded)
    found += checks.configured(loaded.settings, registry)
    found.append(checks.library(loaded.settings, registry))
    return found, _rows(loaded)


def _rows(loaded: Loaded) -> list[dict[str, Any]]:
    return [
        {"path": path, "value": value, "origin": origin.source, "detail": origin.detail}
        for path, value, origin in loaded.values()
    ]


def _shown(path: str, value: Any) -> str:
    """With a unit, where it has one and is not left out; a prior is of the link that its path goes on with."""
    name = "priors" if path.startswith("priors.") else path
    return FORMATS[name](value) if name in FORMATS and isinstance(value, (int, float)) else str(value)


def _print(found: list[checks.Check], settings: list[dict[str, Any]]) -> None:
    print_table("checks", ("check", "status", "detail"), [(c.name, c.status, c.detail) for c in found])
    cells = [
        (row["path"], _shown(row["path"], row["value"]), f"{row['origin']} {row['detail']}".strip()) for row in settings
    ]
    if cells:
        print_table("\nsettings", ("setting", "value", "from"), cells)
    failed = sum(check.status == "fail" for check in found)
    typer.echo(f"\n{failed} of {len(found)} checks failed")
