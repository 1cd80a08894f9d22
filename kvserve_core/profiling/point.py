"""What is searched and what is learned of it: candidates, measurements, and who measures. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeAlias

import msgspec
from blake3 import blake3

from kvserve_core.latency import Speed
from kvserve_core.profile import PipelineSpec

Value: TypeAlias = str | int | float | bool
Values: TypeAlias = tuple[tuple[str, Value], ...]
"""Dimension names with values, in the space's order. A dimension that a candidate does not have is absent."""
Interval: TypeAlias = tuple[float, float, float]
"""Mean, lower and upper end of the confidence interval."""
KEY_DIGITS = 16


@dataclass(frozen=True)
class Point:
    """One candidate: its place in the space and the pipeline that stands there.

    name: for people; unique within a space, and fit to be a profile's name.
    """

    values: Values
    spec: PipelineSpec
    name: str = ""

    @cached_property
    def key(self) -> str:
        """Short blake3 of the pipeline's canonical JSON: equal pipelines have equal keys, in every space."""
        return spec_key(self.spec)

    @cached_property
    def at(self) -> Mapping[str, Value]:
        """``values`` as a mapping."""
        return dict(self.values)


def spec_key(spec: PipelineSpec) -> str:
    """``Point.key`` of a pipeline."""
    text = json.dumps(spec.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return blake3(text.encode()).hexdigest()[:KEY_DIGITS]


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of one point.

    key: of the point. quality: relative to uncompressed KV, 1.0 is no loss; low and high: its confidence bounds.
    cr: original bytes over the bytes of full frames with all metadata; cr_estimate: the same by table cost.
    encode, decode: fixed cost and seconds per original byte. metrics: single results, such as ``continuation.kl``.
    seconds: what measuring took. error: why there is nothing else in here; such a point counts as infeasible.
    """

    key: str
    quality: float = 0.0
    quality_low: float = 0.0
    quality_high: float = 0.0
    cr: float = 0.0
    cr_estimate: float = 0.0
    encode: Speed = Speed()
    decode: Speed = Speed()
    metrics: dict[str, Interval] = {}
    samples: int = 0
    seconds: float = 0.0
    error: str = ""


class Estimate(msgspec.Struct, frozen=True):
    """The ratio of one point by table cost; ``error`` says why it is 0."""

    key: str
    cr: float
    error: str = ""


class Objective(Protocol):
    """What the search asks. Both may be called from worker processes, so an objective must be picklable."""

    def estimate(self, point: Point) -> float:
        """The compression ratio by table cost, cheap enough for every candidate; 0 if it cannot be encoded."""
        ...

    def measure(self, points: Sequence[Point]) -> Iterable[Measurement]:
        """Everything, one measurement a point in their order, each as soon as it is there."""
        ...
