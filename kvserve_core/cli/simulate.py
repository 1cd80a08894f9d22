"""``kvserve simulate``: what a policy would do with a library, a trace and traffic, before anybody has to suffer it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from kvserve_core.cli.output import AsJson, print_json, print_table
from kvserve_core.cli.specs import component_spec, label
from kvserve_core.component import ComponentSpec
from kvserve_core.library import ProfileLibrary, usual_workload
from kvserve_core.plots import check, pyplot
from kvserve_core.registry import default_registry
from kvserve_core.settings import POLICY
from kvserve_core.simulate.plot import draw
from kvserve_core.simulate.report import COLUMNS, report, rows, troubles
from kvserve_core.simulate.run import simulate as play
from kvserve_core.simulate.run import world
from kvserve_core.simulate.scenario import parse_scenario, read_scenario
from kvserve_core.simulate.trace import read_file


def simulate(
    library: Annotated[Path | None, typer.Option(help="Profile library; without one raw and lossless only.")] = None,
    scenario: Annotated[Path | None, typer.Option(help="TOML with links, tenants, speeds and engine.")] = None,
    trace: Annotated[Path | None, typer.Option(help="CSV of bandwidth over time, instead of the scenario's.")] = None,
    arrivals: Annotated[Path | None, typer.Option(help="CSV of arrivals, instead of the scenario's.")] = None,
    requests: Annotated[
        int | None, typer.Option(help="Requests per seed. [10000, or all arrivals of the file]")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Requests per second, Poisson.")] = None,
    workload: Annotated[
        str | None,
        typer.Option(help="Workload of every tenant. [of those that name none: the library's, if of one only]"),
    ] = None,
    slo: Annotated[str | None, typer.Option(help="Latency budget of every tenant, for example 500ms.")] = None,
    min_quality: Annotated[float | None, typer.Option(help="Quality floor of every tenant.")] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help=f"A policy's name or its spec as JSON; repeat to compare. [{label(POLICY)}]"),
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, max=10_000, help="How many seeds; from two on there are confidence bounds.")
    ] = 5,
    workers: Annotated[int, typer.Option(min=0, max=1024, help="Processes; 0 for one a core.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Write a picture; needs matplotlib.")] = None,
    as_json: AsJson = False,
) -> None:
    """Play a policy against arrivals, links of changing bandwidth, drifting speeds and noise."""
    given = read_scenario(scenario) if scenario else {}
    given |= _given(requests=requests, rate=rate, arrivals=arrivals)
    if trace is not None:
        _follow(given, trace)
    loaded = ProfileLibrary.load(library) if library else None
    _every_tenant(
        given, {"workload": usual_workload(loaded)}, _given(workload=workload, slo=slo, min_quality=min_quality)
    )
    policies = _policies([component_spec(text, "policy") for text in policy] if policy else [POLICY])
    if plot is not None:
        check(pyplot(), plot)  # before the work, not after it
    made = parse_scenario(given)
    prepared = world(made, loaded)
    done = play(prepared, policies, range(seeds), workers or os.cpu_count() or 1)
    found = report(made, done, range(seeds))
    if as_json:
        print_json(found)
    else:
        print_table(f"{found['requests']} requests, {seeds} seeds", COLUMNS, rows(found))
        for trouble in troubles(found):
            typer.echo(trouble)
    if plot is not None:
        draw(done, plot)  # last, so that what fails here costs nobody the figures


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _follow(given: dict[str, Any], trace: Path) -> None:
    """Put every link of the scenario on a trace; without links, make one and a tenant for each in the file."""
    if "links" in given:
        given["links"] = _merged(given["links"], {}, {"trace": trace})
        return
    names = list(read_file(trace))
    given["links"] = [{"name": name, "trace": trace} for name in names]
    if "tenants" not in given:
        given["tenants"] = [{"name": name, "link": name} for name in names]


def _every_tenant(given: dict[str, Any], defaults: dict[str, Any], fields: dict[str, Any]) -> None:
    given["tenants"] = _merged(given.get("tenants", [{}]), defaults, fields)


def _merged(tables: Any, defaults: dict[str, Any], fields: dict[str, Any]) -> Any:
    """``fields`` in every table, ``defaults`` where it lacks them. What is no list of tables is refused later."""
    if not isinstance(tables, list):
        return tables
    return [{**defaults, **table, **fields} if isinstance(table, dict) else table for table in tables]


def _policies(specs: Iterable[ComponentSpec]) -> dict[str, ComponentSpec]:
    """By a label; validated now rather than in each process."""
    found = {}
    for spec in specs:
        default_registry().configure("policy", spec, "policy")
        found[label(spec)] = spec
    return found
