"""What a run on a model must show."""

from __future__ import annotations

from typing import Any

from replays.bars import Result

from kvserve_core.profiling.point import Measurement, Point
from profiler_model.asked import Asked
from profiler_model.reference import Exhausted, exhausted
from profiler_model.whole import WORKLOAD, Searched, searched

CANDIDATES, METHODS, EVALUATIONS, MINUTES, TIMES = 1000, 4, 60, 45.0, 2.5
"""Of the issue: at least, at least, at most, at most on two cores, at least."""


def model_bars(asked: Asked, command: str) -> tuple[dict[str, Result], dict[str, Any]]:
    """Bars by name, and the searches behind them."""
    asked.work.mkdir(parents=True, exist_ok=True)
    ours = searched(asked, command)
    theirs = exhausted(asked)
    bars = _size(ours) | _time(ours)
    for floor in asked.floors:
        bars[f"ratio over the best of the reference's space at {floor:g}"] = _ratio(ours, theirs, floor)
    return bars, {"search": ours.about, "profiles": _profiles(ours), "reference": _reference(theirs)}


def _size(ours: Searched) -> dict[str, Result]:
    about = ours.about
    candidates, methods, used = about["candidates"], about["families"], about["evaluations"]
    return {
        "candidates": Result(candidates, CANDIDATES, candidates >= CANDIDATES),
        "methods": Result(len(methods), METHODS, len(methods) >= METHODS, dict(methods)),
        "evaluations": Result(used, EVALUATIONS, used <= EVALUATIONS, {"stopped": about["stopped"]}),
    }


def _time(ours: Searched) -> dict[str, Result]:
    """Wall time, other work on the machine and interrupted sessions included."""
    minutes, sessions = round(ours.minutes, 1), [round(m, 1) for m in ours.sessions]
    detail = {"sessions": sessions, "cpu_s of the search's measurements": ours.about["cpu_s"]}
    return {"minutes, with all texts at the end": Result(minutes, MINUTES, minutes <= MINUTES, detail)}


def _ratio(ours: Searched, theirs: Exhausted, floor: float) -> Result:
    mine, other = ours.best(floor), theirs.best[floor]
    if mine is None or other is None:
        return Result(None, TIMES, False, {"here": mine and mine.name, "reference": other and other[0].name})
    times = round(mine.cr / other[1].cr, 2)
    quality = mine.quality_for(WORKLOAD)
    here = {"profile": mine.name, "cr": round(mine.cr, 3), "lower": quality and round(quality.lower, 5)}
    return Result(times, TIMES, times >= TIMES, here | {"reference": _row(*other)})


def _row(point: Point, m: Measurement) -> dict[str, Any]:
    return {
        "name": point.name,
        "cr": round(m.cr, 3),
        "quality": round(m.quality, 5),
        "lower": round(m.quality_low, 5),
        "samples": m.samples,
    }


def _reference(theirs: Exhausted) -> dict[str, Any]:
    return {
        "candidates, all measured": theirs.candidates,
        "measured on all texts": theirs.thorough,
        "minutes": round(theirs.minutes, 1),
        "best": {f"{floor:g}": found and _row(*found) for floor, found in theirs.best.items()},
    }


def _profiles(ours: Searched) -> list[dict[str, Any]]:
    return [
        {"name": p.name, "cr": round(p.cr, 3)}
        | {w: [round(x, 5) for x in (q.value, q.lower, q.upper)] for w, q in p.quality.items()}
        for p in ours.library.profiles
    ]
