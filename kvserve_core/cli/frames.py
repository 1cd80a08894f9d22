"""``kvserve inspect FRAME``: what a frame file holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvserve_core.cli.output import AsJson, print_json, print_table
from kvserve_core.container import FrameReader, describe
from kvserve_core.errors import FrameError
from kvserve_core.units import format_bytes

Frame = Annotated[Path, typer.Argument(help="A frame file, as the file transport writes them.")]
Segments = Annotated[bool, typer.Option("--segments", help="One row per segment.")]


def inspect(frame: Frame, segments: Segments = False, as_json: AsJson = False) -> None:
    """Summarise a frame file and verify its digests."""
    about = _read(frame)
    bad = [row for row in about["segments"] if not row["ok"]]
    if as_json:
        brief = about | {"segments": len(about["segments"]), "bad_segments": bad}
        print_json(about if segments else brief)
    else:
        _print(about, segments or bool(bad))
    if bad:
        raise typer.Exit(1)


def _read(frame: Path) -> dict[str, Any]:
    try:
        with FrameReader(frame) as reader:
            return describe(reader)
    except OSError as error:
        raise FrameError(f"the frame file {str(frame)!r} cannot be read: {error.strerror or error}") from error


def _print(about: dict[str, Any], segments: bool) -> None:
    shard = about["shard"]
    rows = [
        ("transfer", about["transfer_id"]),
        ("profile", about["profile"]),
        ("tokens", str(about["num_tokens"])),
        ("model", about["fingerprint"][:16]),
        ("rank", f"{shard['rank']} of {shard['size']}, {len(shard['layers'])} layers"),
        ("frame version", ".".join(map(str, about["version"]))),
        ("segments", str(len(about["segments"]))),
        ("bytes", f"{format_bytes(about['file_bytes'])} for {format_bytes(about['raw_bytes'])}"),
        ("ratio", f"{about['ratio']:.2f}"),
        *((f"chain {i}", " > ".join(chain["stages"])) for i, chain in enumerate(about["chains"])),
        *(("artefact", digest) for digest in about["artefacts"]),
    ]
    print_table("frame", ("field", "value"), rows)
    if segments:
        cells = [
            (str(s["index"]), s["region"], str(s["chain"]), str(s["wire_bytes"]), s["error"] or "ok")
            for s in about["segments"]
        ]
        print_table("\nsegments", ("index", "region", "chain", "wire bytes", "digest"), cells)
