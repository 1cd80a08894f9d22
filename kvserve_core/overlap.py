"""The two forms of eq. 1: stages one after another, or overlapped chunk by chunk. Pure functions.

A pipeline of three stages over n equal chunks takes as long as its slowest stage, plus one chunk through the others::

    T_p = T_model + M + (enc + transfer + dec - M) / n,     M = max(enc, transfer, dec)

Over x = 1/B that is two lines: up to the x at which the transfer becomes the slowest stage, and from it on. The lower
envelope of such bent lines is merged pairwise; a profile may be best in more than one stretch of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from kvserve_core.latency import Envelope, Line, crossing, lower_envelope

Costs = tuple[float, float, float]
"""Seconds of encoding, seconds of decoding, bytes on the wire."""
Piece = tuple[float, Line, int]
"""Where it begins in x, the line there, and whose it is."""


@dataclass(frozen=True, slots=True)
class Form:
    """``chunk_bytes``: original bytes that go through encode, transfer and decode at a time; None: all of V."""

    chunk_bytes: float | None = None

    def chunks(self, nbytes: float) -> float:
        """n of V bytes, at least 1; a last chunk that is not full counts as the share that it is."""
        return max(1.0, nbytes / self.chunk_bytes) if self.chunk_bytes else 1.0

    def seconds(self, encode_s: float, transfer_s: float, decode_s: float, nbytes: float) -> float:
        """All stages together, without T_model."""
        whole = encode_s + transfer_s + decode_s
        if not self.chunk_bytes:
            return whole
        slowest = max(encode_s, transfer_s, decode_s)
        return slowest + (whole - slowest) / self.chunks(nbytes)

    def envelope(self, costs: Sequence[Costs], nbytes: float) -> Envelope:
        """The fastest of ``costs`` for every x >= 0. Neighbours in ``order`` differ."""
        chunks = self.chunks(nbytes)
        if chunks == 1.0:
            return lower_envelope([Line(encode + decode, wire) for encode, decode, wire in costs])
        bent = [pieces(each, chunks, i) for i, each in enumerate(costs)]
        return _envelope(_lowest(bent)) if bent else Envelope((), ())


def pieces(costs: Costs, chunks: float, owner: int = 0) -> list[Piece]:
    """The latency of one profile over x: bound by computing first, by the link from the bend on."""
    encode, decode, wire = costs
    slowest = max(encode, decode)
    bound = Line(slowest + min(encode, decode) / chunks, wire / chunks)
    link = Line((encode + decode) / chunks, wire)
    return [(0.0, bound, owner), (slowest / wire, link, owner)] if slowest > 0 else [(0.0, link, owner)]


def _lowest(functions: Sequence[list[Piece]]) -> list[Piece]:
    if len(functions) == 1:
        return functions[0]
    half = len(functions) // 2
    return _merge(_lowest(functions[:half]), _lowest(functions[half:]))


def _merge(one: list[Piece], two: list[Piece]) -> list[Piece]:
    """The minimum of two functions, piece by piece; where they are equal, the first."""
    found: list[Piece] = []
    i = j = 0
    start = 0.0
    while start < inf:
        ends = [part[k + 1][0] if k + 1 < len(part) else inf for part, k in ((one, i), (two, j))]
        end = min(ends)
        found += _lower(one[i], two[j], start, end)
        i, j, start = i + (ends[0] == end), j + (ends[1] == end), end
    return found


def _lower(one: Piece, two: Piece, start: float, end: float) -> list[Piece]:
    """Which of two lines is lower between ``start`` and ``end``: one of them, or one and then the other."""
    (_, a, _), (_, b, _) = one, two
    gap = a.at(start) - b.at(start)
    first, then = (one, two) if gap < 0 or (gap == 0 and a.slope <= b.slope) else (two, one)
    lower = (start, first[1], first[2])
    x = crossing(first[1], then[1]) if first[1].slope > then[1].slope else inf
    if x <= start:  # they cross at the start, and rounding had the gap
        return [(start, then[1], then[2])]
    return [lower, (x, then[1], then[2])] if x < end else [lower]


def _envelope(found: Sequence[Piece]) -> Envelope:
    order: list[int] = []
    breaks: list[float] = []
    for start, _, owner in found:
        if not order or order[-1] != owner:
            order.append(owner)
            breaks.append(start)
    return Envelope(tuple(order), tuple(breaks[1:]))
