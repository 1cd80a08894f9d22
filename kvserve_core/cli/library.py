"""``kvserve library``: look at a profile library, check it, or make one from files of the reference implementation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from blake3 import blake3

from kvserve_core.cli.output import AsJson, print_json, print_table
from kvserve_core.dialect_tables import read_scores, read_speeds
from kvserve_core.errors import ConfigError, did_you_mean
from kvserve_core.importer import Import, fits_inline, import_library, import_pipeline
from kvserve_core.json_text import parsed
from kvserve_core.library import ProfileLibrary
from kvserve_core.registry import default_registry
from kvserve_core.units import format_bandwidth

ACTIONS = ("show", "validate", "import-kvserve")
Kind = Literal["scores", "library", "pipelines"]


def library(
    action: Annotated[str, typer.Argument(help=f"One of: {', '.join(ACTIONS)}.")],
    path: Annotated[Path, typer.Argument(help="A library, or the file to import.")],
    out: Annotated[Path | None, typer.Option(help="import-kvserve: what to write.")] = None,
    scores: Annotated[Path | None, typer.Option(help="import-kvserve: head scores, CSV, TSV or JSON.")] = None,
    speeds: Annotated[Path | None, typer.Option(help="import-kvserve: speed table of the machine, CSV.")] = None,
    codec: Annotated[str | None, typer.Option(help="import-kvserve: a codec instead of the file's.")] = None,
    fingerprint: Annotated[str, typer.Option(help="import-kvserve: fingerprint of the model served.")] = "",
    as_json: AsJson = False,
) -> None:
    """Show or validate a profile library, or import files of the KVServe reference implementation."""
    if action not in ACTIONS:
        raise ConfigError(did_you_mean(action, ACTIONS, "action"))
    if action == "import-kvserve":
        if out is None:
            raise ConfigError("import-kvserve needs --out PATH: .kvlib or a folder for a library, .json for the rest")
        _check_codec(codec)
        how = Import(read_scores(_text(scores), str(scores)) if scores else None, codec)
        report = _import(path, out, how, speeds, fingerprint)
    else:
        report = _about(ProfileLibrary.load(path), check=action == "validate")
    if as_json:
        print_json(report)
    else:
        _print(report)


def _check_codec(name: str | None) -> None:
    """Whether there is such a codec; it need not be usable on this machine."""
    try:
        if name is not None:
            default_registry().manifest("codec", name)
    except ConfigError as error:
        raise error.under("--codec") from None


def _about(found: ProfileLibrary, check: bool) -> dict[str, Any]:
    """What ``show`` prints; ``validate`` also creates each component and looks for each artefact."""
    if check:
        found.check(default_registry().create)
        for profile in found.profiles:
            if missing := found.missing(profile):
                raise ConfigError(f"artefacts {list(missing)} are not in the library", f"profiles.{profile.name}")
    head = {k: getattr(found, k) for k in ("model_id", "fingerprint", "device", "created")}
    rows = [
        {
            "name": p.name,
            "cr": p.cr,
            "encode": _rate(p.encode.s_per_byte),
            "decode": _rate(p.decode.s_per_byte),
            "quality": {w: f"{r.value:.4g} ({r.lower:.4g} .. {r.upper:.4g})" for w, r in p.quality.items()},
            "artefacts": len(p.artefacts),
        }
        for p in found.profiles
    ]
    return {**head, "checked": check, "profiles": rows}


def _rate(s_per_byte: float) -> str:
    return format_bandwidth(1 / s_per_byte if s_per_byte else None)


def _import(path: Path, out: Path, how: Import, speeds: Path | None, fingerprint: str) -> dict[str, Any]:
    kind = _kind(path)
    if kind == "scores":
        found = read_scores(_text(path), str(path))
        _write(out, {"scores": found, "provenance": {"imported_from": path.name}})
        return {"wrote": str(out), "kind": kind, "layers": len(found), "heads": len(found[0]), "notes": how.notes}
    raw = _json(path)
    if kind == "library":
        table = read_speeds(_text(speeds), str(speeds)) if speeds else None
        made = import_library(raw, how, fingerprint, speeds=table)
        made.save(out)
        if not fingerprint:
            how.note("no --fingerprint was given: a controller that knows its model's will not use the library")
        return {"wrote": str(out), "kind": kind, "profiles": len(made.profiles), "notes": how.notes}
    if how.scores is not None and not fits_inline(how.scores):
        how.scores_artefact = _write_scores(out.with_suffix(".scores.json"), how)
    named = raw if _is_table(raw) else {path.stem: raw}
    pipelines = {name: import_pipeline(config, how, name).model_dump(mode="json") for name, config in named.items()}
    _write(out, pipelines)
    return {"wrote": str(out), "kind": kind, "profiles": len(pipelines), "notes": how.notes}


def _write_scores(out: Path, how: Import) -> str:
    """The scores as a file of their own; its hash."""
    _write(out, {"scores": how.scores})
    digest = blake3(out.read_bytes()).hexdigest()
    how.note(f"the head scores are in {str(out)!r}, artefact {digest}: too many for the header of a frame")
    return digest


def _kind(path: Path) -> Kind:
    if path.suffix.lower() in (".csv", ".tsv"):
        return "scores"
    raw = _json(path)
    if isinstance(raw, list):
        return "scores"
    return "library" if isinstance(raw, dict) and "accuracy_buckets" in raw else "pipelines"


def _is_table(raw: Any) -> bool:
    """Whether a JSON object holds several configurations by name, rather than being one."""
    known = {"pipeline", "quantizer_config", "codec_config", "transformer_config", "enabled", "mode"}
    return isinstance(raw, dict) and not known & set(raw) and all(isinstance(v, dict) for v in raw.values())


def _json(path: Path) -> Any:
    try:
        return parsed(_text(path))
    except ValueError as error:
        raise ConfigError(f"not JSON: {error}", str(path)) from None


def _text(path: Path | None) -> str:
    try:
        return Path(path or "").read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read: {error}", str(path)) from error


def _write(out: Path, value: Any) -> None:
    try:
        out.write_text(json.dumps(value, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", str(out)) from error


def _print(report: dict[str, Any]) -> None:
    plain = {k: v for k, v in report.items() if not isinstance(v, list)}
    print_table("library", ("field", "value"), [(k, str(v)) for k, v in plain.items()])
    rows = report.get("profiles")
    if rows and isinstance(rows, list):
        print_table("\nprofiles", list(rows[0]), [[_cell(v) for v in row.values()] for row in rows])
    for note in report.get("notes", ()):
        typer.echo(f"note: {note}")


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{k} {v}" for k, v in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
