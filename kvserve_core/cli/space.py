"""``kvserve space``: what the profiler would search here, counted and listed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from kvserve_core.cli.output import AsJson, print_json, print_table
from kvserve_core.errors import UnknownNameError, did_you_mean
from kvserve_core.profiling.build import build_space
from kvserve_core.profiling.calibrated import calibrated_files
from kvserve_core.profiling.families import SpaceConfig, shipped
from kvserve_core.profiling.point import Point
from kvserve_core.profiling.space import Space, fingerprint
from kvserve_core.registry import default_registry


def space(
    config: Annotated[Path | None, typer.Option(help="JSON or TOML with families, instead of those shipped.")] = None,
    family: Annotated[list[str] | None, typer.Option(help="Only this family; repeat for more.")] = None,
    without: Annotated[list[str] | None, typer.Option(help="Leave this component out; repeat for more.")] = None,
    calibrated: Annotated[Path | None, typer.Option(help="Folder with the files of 'kvserve calibrate'.")] = None,
    device: Annotated[str, typer.Option(help="Where it must run: cpu or cuda.")] = "cpu",
    limit: Annotated[int | None, typer.Option(min=1, help="List so many, drawn evenly over families.")] = None,
    seed: Annotated[int, typer.Option(help="Of the draw.")] = 0,
    names: Annotated[bool, typer.Option("--list", help="Print the name of every candidate.")] = False,
    as_json: AsJson = False,
) -> None:
    """Count and list the pipelines that the profiler would search here."""
    chosen = narrowed(SpaceConfig.read(config) if config else shipped(), family or [], without or [])
    files = calibrated_files(calibrated)[0] if calibrated else []
    made = build_space(chosen, registry=default_registry(), device=device, calibrated=files)
    points = made.points(limit, seed) if made.families and (names or as_json) else []
    if as_json:
        print_json(_as_json(made, points))
    else:
        _print(made, points)


def narrowed(config: SpaceConfig, families: list[str], without: list[str]) -> SpaceConfig:
    """Only these families, if any are named, and without these components.

    Raises:
        UnknownNameError: there is no family, or no component, of that name.
    """
    known = {f.name: f for f in config.families}
    if unknown := next((name for name in families if name not in known), None):
        raise UnknownNameError(did_you_mean(unknown, known, "family"))
    installed = {name for _, name in default_registry().manifests}
    if unknown := next((name for name in without if name not in installed), None):
        raise UnknownNameError(did_you_mean(unknown, installed, "component"))
    return config.model_copy(update={"only": tuple(families) or config.only, "without": (*config.without, *without)})


def _as_json(made: Space, points: list[Point]) -> dict[str, Any]:
    return {
        "count": made.count(),
        "fingerprint": fingerprint(points),
        "families": {f.name: f.size for f in made.families},
        "left_out": dict(made.left_out),
        "dropped": dict(made.dropped()),
        "dimensions": dimensions(points),
        "candidates": [{"name": p.name, "key": p.key, "values": dict(p.at)} for p in points],
    }


def dimensions(points: list[Point]) -> dict[str, list[Any]]:
    """Every dimension with the values that occur, numbers in order."""
    found: dict[str, dict[Any, None]] = {}
    for name, value in (pair for p in points for pair in p.values):
        found.setdefault(name, {})[value] = None
    return {name: sorted(values, key=lambda v: (isinstance(v, str), v)) for name, values in found.items()}


def _print(made: Space, points: list[Point]) -> None:
    rows = [(f.name, str(f.size), _about(made, f.name)) for f in made.families]
    rows += [(name, "0", why) for name, why in made.left_out.items()]
    print_table(f"{made.count()} candidates", ("family", "candidates", ""), rows)
    reasons: Counter[str] = made.dropped()
    for why, count in reasons.most_common():
        typer.echo(f"left out {count}: {why}")
    for point in points:
        typer.echo(point.name)


def _about(made: Space, name: str) -> str:
    return next((f.about for f in made.config.families if name == f.name or name.startswith(f"{f.name}-")), "")
