"""One piece of work: an estimate or a measurement of one point. What goes wrong becomes part of the answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from time import perf_counter
from typing import Generic, TypeVar

import msgspec

from kvserve_core.profiling.point import Estimate, Measurement, Objective, Point

T = TypeVar("T")


@dataclass(frozen=True)
class Task(Generic[T]):
    """What to ask of an objective, and the answer when there is none. Functions of modules, so that it can be sent."""

    ask: Callable[[Objective, Point], T]
    fail: Callable[[Point, str, float], T]

    def __call__(self, objective: Objective, point: Point) -> T:
        """The answer. A candidate that cannot be handled must not end the search."""
        began = perf_counter()
        try:
            return self.ask(objective, point)
        except Exception as error:
            return self.fail(point, f"{type(error).__name__}: {error}", perf_counter() - began)


def _estimate(objective: Objective, point: Point) -> Estimate:
    found = float(objective.estimate(point))
    if not isfinite(found) or found < 0:
        raise ValueError(f"the objective estimates a ratio of {found}")
    return Estimate(point.key, found)


def _no_estimate(point: Point, reason: str, seconds: float) -> Estimate:
    del seconds
    return Estimate(point.key, 0.0, reason)


def _measure(objective: Objective, point: Point) -> Measurement:
    found = next(iter(objective.measure([point])))
    if found.key != point.key:
        raise ValueError(f"the objective measured {found.key!r} when asked for {point.key!r}")
    if not found.error and not found.cr > 0:
        raise ValueError(f"the objective measured a ratio of {found.cr}")
    try:
        return msgspec.json.decode(msgspec.json.encode(found), type=Measurement)  # as a journal will read it
    except msgspec.ValidationError as error:  # of NaN and Inf, which JSON does not have
        raise ValueError(f"the objective measured something that cannot be kept: {error}") from error


def _no_measurement(point: Point, reason: str, seconds: float) -> Measurement:
    return Measurement(key=point.key, error=reason, seconds=seconds)


ESTIMATE = Task(_estimate, _no_estimate)
MEASURE = Task(_measure, _no_measurement)
