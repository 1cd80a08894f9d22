"""The latency model: eq. 1, the threshold of Theorem 6.1 and the lower envelope of Theorem 6.2. Pure functions.

Over x = 1/B (s/byte) the latency of a profile is a line::

    T_p(x) = T_model + enc(V) + dec(V)  +  (V / cr_p) x

V is in original bytes, everything else in seconds. Raw is such a line too, with cr = 1 (or a little less: frames have
headers) and the small costs of its staging copies and digests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Speed:
    """What a stage costs: a fixed part (launches, calls) and a part per ORIGINAL byte."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}
    fixed_s: float = 0.0
    s_per_byte: float = 0.0

    def seconds(self, nbytes: float) -> float:
        """Seconds for ``nbytes`` original bytes."""
        return self.fixed_s + self.s_per_byte * nbytes

    @classmethod
    def of(cls, bytes_per_s: float, fixed_s: float = 0.0) -> Speed:
        """From a rate in bytes/s of original bytes."""
        return cls(fixed_s, 1.0 / bytes_per_s)


@dataclass(frozen=True, slots=True)
class Line:
    """Latency over x = 1/B: ``intercept`` in seconds, ``slope`` in bytes on the wire."""

    intercept: float
    slope: float

    def at(self, x: float) -> float:
        """Latency in seconds at x = 1/B (s/byte)."""
        return self.intercept + self.slope * x


def latency_line(nbytes: float, cr: float, encode: Speed, decode: Speed, model_s: float = 0.0) -> Line:
    """Eq. 1 as a line: ``T_model + enc(V) + dec(V) + (V / cr) x``."""
    return Line(model_s + encode.seconds(nbytes) + decode.seconds(nbytes), nbytes / cr)


def critical_bandwidth(cr: float, bytes_per_s: float) -> float:
    """Theorem 6.1, ``B* = (1 - 1/cr) s_p`` in bytes/s: compression pays below it. 0 when it does not compress."""
    return (1.0 - 1.0 / cr) * bytes_per_s if cr > 1.0 else 0.0


def threshold(line: Line, base: Line) -> float:
    """The bandwidth below which ``line`` is faster than ``base``: Theorem 6.1 with fixed costs.

    inf: faster at every bandwidth, so it costs nothing. 0: nowhere, or not below any bandwidth (it sends no less).
    """
    cost, saved = line.intercept - base.intercept, base.slope - line.slope
    if saved > 0:
        return saved / cost if cost > 0 else inf
    return inf if saved == 0 and cost < 0 else 0.0


@dataclass(frozen=True, slots=True)
class Envelope:
    """The fastest line for every x >= 0. ``order[i]`` is best between ``breaks[i - 1]`` and ``breaks[i]``.

    Lines come in falling slope: first what costs least, last what compresses best.
    """

    order: tuple[int, ...]
    breaks: tuple[float, ...]

    def position(self, x: float) -> int:
        """Where x lies in ``order``. At a crossing the line with the lower cost wins."""
        return bisect_left(self.breaks, x)

    def best(self, x: float) -> int:
        """Index of the fastest line at x = 1/B."""
        return self.order[self.position(x)]


def crossing(first: Line, second: Line) -> float:
    """x where two lines of unequal slope are equal."""
    return (second.intercept - first.intercept) / (first.slope - second.slope)


def lower_envelope(lines: Sequence[Line]) -> Envelope:
    """Theorem 6.2: the lower envelope over x >= 0 by a monotone chain, O(n log n).

    Of equal slopes the lowest intercept stays, of equal lines the first. A line that only touches the envelope in
    one point is not on it.
    """
    chain: list[int] = []
    starts: list[float] = []
    for i in sorted(range(len(lines)), key=lambda i: (-lines[i].slope, lines[i].intercept, i)):
        if chain and lines[chain[-1]].slope == lines[i].slope:
            continue
        start = _start(lines, chain, starts, i)
        chain.append(i)
        starts.append(start)
    return Envelope(tuple(chain), tuple(starts[1:]))


def _start(lines: Sequence[Line], chain: list[int], starts: list[float], new: int) -> float:
    """Drop from the chain what ``new`` overtakes before it was ever best; where ``new`` begins."""
    while chain:
        x = crossing(lines[chain[-1]], lines[new])
        if x > starts[-1]:
            return x
        chain.pop()
        starts.pop()
    return 0.0
