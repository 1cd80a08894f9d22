"""``kvserve explain``: one decision in full, for a library and a request, before anything is served."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import inf, isfinite
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import typer

from kvserve_core.cli.explain_curves import Curve, curve, pays_below, stretches
from kvserve_core.cli.explain_plot import draw
from kvserve_core.cli.output import AsJson, print_json, print_table
from kvserve_core.cli.specs import component_spec, label
from kvserve_core.controller import Controller
from kvserve_core.library import ProfileLibrary, usual_workload
from kvserve_core.plots import check, pyplot
from kvserve_core.policy import Decision, Policy, ServiceContext
from kvserve_core.pricing import Priced
from kvserve_core.registry import default_registry
from kvserve_core.settings import POLICY
from kvserve_core.units import format_bandwidth, format_duration, parse_bandwidth, parse_bytes, parse_duration

_log = logging.getLogger(__name__)
COLUMNS = ("", "profile", "total", "encode", "transfer", "decode", "residual", "cr", "quality", "pays below", "note")


def explain(
    nbytes: Annotated[str, typer.Option("--bytes", help="KV bytes to move, for example 56MiB.")],
    bandwidth: Annotated[str, typer.Option(help="For example 5Gbps.")],
    library: Annotated[Path | None, typer.Option(help="Profile library; without one raw and lossless only.")] = None,
    slo: Annotated[str | None, typer.Option(help="Latency budget, for example 200ms.")] = None,
    min_quality: Annotated[float, typer.Option(help="Quality floor, on the lower bound.")] = 0.99,
    workload: Annotated[
        str | None, typer.Option(help="Whose quality records count. [the library's, if of one only, else default]")
    ] = None,
    model_time: Annotated[str, typer.Option(help="T_model, what comes before the KV is there.")] = "0s",
    chunk: Annotated[str | None, typer.Option(help="Bytes a chunk, where stages overlap.")] = None,
    policy: Annotated[str | None, typer.Option(help=f"A policy's name or its spec as JSON. [{label(POLICY)}]")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture over 1 to 1000 Gbps; needs matplotlib.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say which profile a request would get, what each would take, and who is left out by what."""
    if plot is not None:
        check(pyplot(), plot)  # before the work, not after it
    spec = component_spec(policy, "policy") if policy else POLICY
    made = default_registry().create("policy", spec, "policy")
    loaded = ProfileLibrary.load(library) if library else None
    control = Controller(
        loaded, made, min_quality=min_quality, chunk_bytes=None if chunk is None else parse_bytes(chunk)
    )
    context = ServiceContext(
        parse_bytes(nbytes),
        workload or usual_workload(loaded),
        parse_bandwidth(bandwidth),
        slo_s=None if slo is None else parse_duration(slo),
        model_s=parse_duration(model_time),
    )
    decision = control.choose(context)
    found = report(control, decision)
    if as_json:
        print_json(found)
    else:
        _print(found)
    if plot is not None:
        draw(control, decision, plot)  # last, so that what fails here costs nobody the answer


def report(control: Controller, decision: Decision) -> dict[str, Any]:
    """The decision as plain data: every profile with its figures, or with what it is left out by."""
    residuals = _residuals(control.policy, decision)
    context = decision.context
    feasible = control.feasible(context)
    curves = [curve(priced, context.nbytes, control.form) for priced in feasible]  # of raw first
    figures = [_figures(control, decision, p, pays_below(c, curves[0])) for p, c in zip(feasible, curves, strict=True)]
    for each in figures:
        each["residual_s"] = residuals.get(each["profile"])
    asked = {name: getattr(context, name) for name in ("nbytes", "workload", "slo_s", "model_s")}
    return {
        "profile": decision.profile,
        "reason": decision.reason,
        "request": asked | {"bandwidth": decision.bandwidth, "min_quality": control.min_quality},
        "candidates": sorted(figures, key=itemgetter("latency_s")),
        "rejected": [{"profile": name, "reason": reason} for name, reason in decision.rejected],
        "note": control.note(context),
        "envelope": _envelope([p.profile.name for p in feasible], curves),
    }


def _residuals(policy: Policy, decision: Decision) -> dict[str, float]:
    """What the policy says it has learned, where that is a number; one that fails has learned nothing."""
    try:
        told = {name: float(seconds) for name, seconds in policy.residuals(decision).items()}
    except Exception as error:  # noqa: BLE001  # a plugin's failure must not cost the answer
        _log.warning("policy %s failed to say its residuals: %s", type(policy).__name__, type(error).__name__)
        return {}
    return {name: seconds for name, seconds in told.items() if isfinite(seconds)}


def _figures(control: Controller, decision: Decision, priced: Priced, limit: float) -> dict[str, Any]:
    name, slo_s, estimate = priced.profile.name, decision.context.slo_s, control.estimate(priced, decision)
    return {
        "profile": name,
        "chosen": name == decision.profile,
        "offered": name in {c.profile for c in decision.candidates},
        **{f"{key}_s": getattr(estimate, f"{key}_s") for key in ("latency", "encode", "transfer", "decode")},
        "cr": estimate.cr,
        "quality": estimate.quality,
        "pays_below": limit if limit != inf else None,
        "meets_slo": slo_s is None or estimate.latency_s <= slo_s,
    }


def _envelope(names: Sequence[str], curves: Sequence[Curve]) -> list[dict[str, Any]]:
    """Which profile is fastest from which bandwidth down, highest first."""
    return [{"profile": names[i], "below": top} for i, top in stretches(curves)]


def _print(found: dict[str, Any]) -> None:
    request = found["request"]
    where = f"{request['nbytes']} bytes of {request['workload']!r} at {format_bandwidth(request['bandwidth'])}"
    print_table(f"{found['profile']}: {found['reason']} ({where})", COLUMNS, map(_row, found["candidates"]))
    for each in found["rejected"]:
        typer.echo(f"- {each['profile']}: {each['reason']}")
    if found["note"]:
        typer.echo(f"- {found['note']}")
    stretches = (f"{e['profile']} below {format_bandwidth(e['below'])}" for e in found["envelope"][1:])
    typer.echo("fastest: " + ", ".join([found["envelope"][0]["profile"], *stretches]))


def _row(each: dict[str, Any]) -> tuple[str, ...]:
    times = (format_duration(each[f"{key}_s"]) for key in ("latency", "encode", "transfer", "decode"))
    residual = "-" if each["residual_s"] is None else f"{1e3 * each['residual_s']:+.3g} ms"
    pays = "anywhere" if each["pays_below"] is None else format_bandwidth(each["pays_below"])
    notes = [] if each["meets_slo"] else ["misses the SLO"]
    notes += [] if each["offered"] else ["not offered here"]
    known = (residual, f"{each['cr']:.3g}", f"{each['quality']:.4g}", "-" if each["profile"] == "raw" else pays)
    return ("*" if each["chosen"] else "", each["profile"], *times, *known, "; ".join(notes))
