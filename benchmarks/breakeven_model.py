"""The latency model's break-even of transfers between two sessions, and the measured one. For ``gpu_breakeven.py``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf
from typing import Any

import numpy as np

from kvserve_core.latency import Speed
from kvserve_core.overlap import SEQUENTIAL, Form
from kvserve_core.speed import fitted, together

NEAR = 5
"""Rates around the crossing that the line is put through."""
DRAWS = 400
MOST, TOPS = 2.5e11, 1e14
"""Bytes/s: where a segment is through in less time than the host needs for it, so that no link can be told from none;
and what is above any."""
Seconds = Callable[[float], float]


@dataclass(frozen=True)
class Stamps:
    """One transfer, in seconds. total: from ``ready`` until loaded; encode: until the last segment was available."""

    total: float
    encode: float
    wire_bytes: int
    raw_bytes: int


class Model:
    """Eq. 1 of all profiles, overlapped, from transfers over a link without a limit."""

    def __init__(self, form: Form) -> None:
        self.form = form
        self._seen: dict[str, dict[int, list[Stamps]]] = {}

    def learn(self, profile: str, tokens: int, stamps: Stamps) -> None:
        """One transfer."""
        self._seen.setdefault(profile, {}).setdefault(tokens, []).append(stamps)

    def nbytes(self, tokens: int) -> int:
        """V."""
        return self._seen["raw"][tokens][0].raw_bytes

    def ratio(self, profile: str) -> float:
        """Original bytes over bytes on the wire."""
        some = [stamps[0] for stamps in self._seen[profile].values()]
        return sum(s.raw_bytes for s in some) / sum(s.wire_bytes for s in some)

    def speeds(self, profile: str, tokens: int | None = None, form: Form | None = None) -> tuple[Speed, Speed]:
        """Encoding and decoding as a library holds them, by all lengths or as they were at one."""
        by = self._seen[profile]
        seen = [s for n, some in by.items() for s in some if tokens in (None, n)]
        timings = [together(s.raw_bytes, s.total, s.encode, form or self.form) for s in seen]
        if tokens is None:
            return fitted(timings)
        encode, decode = (statistics.median(getattr(t, way) for t in timings) for way in ("encode_s", "decode_s"))
        return Speed(encode), Speed(decode)

    def unlimited(self, profile: str) -> dict[int, tuple[float, float]]:
        """Medians by length in ms: all of it, and until all was encoded."""
        by = self._seen[profile]
        return {
            n: (milliseconds(s.total for s in some), milliseconds(s.encode for s in some)) for n, some in by.items()
        }

    def seconds(self, profile: str, tokens: int, form: Form | None = None, local: bool = False) -> Seconds:
        """T over B. local: by what stages took at this length, not by the lines through all."""
        nbytes, wire = self.nbytes(tokens), self.nbytes(tokens) / self.ratio(profile)
        encode, decode = (s.seconds(nbytes) for s in self.speeds(profile, tokens if local else None, form))
        reckoned = (form or self.form).seconds
        return lambda rate: reckoned(encode, wire / rate, decode, nbytes)

    def break_even(self, profile: str, tokens: int, form: Form | None = None, local: bool = False) -> float:
        """B* in bytes/s: below it the profile is faster than raw."""
        ours, raw = (self.seconds(name, tokens, form, local) for name in (profile, "raw"))
        low, high = 1e5, TOPS
        if ours(low) >= raw(low):
            return 0.0
        if ours(high) < raw(high):
            return inf
        while high / low > 1.0001:
            middle = (low * high) ** 0.5
            low, high = (middle, high) if ours(middle) < raw(middle) else (low, middle)
        return low


def crossing(rates: Sequence[float], ours: Sequence[float], raw: Sequence[float]) -> float:
    """Where ``ours - raw`` becomes positive, over rising rates: on a line over 1 / B (Theil and Sen's) near there."""
    off = np.subtract(ours, raw)
    if (off < 0).all():
        return inf
    if (off >= 0).all():
        return 0.0
    # Of noisy points: the cut with the fewest on its wrong side.
    wrong = [(off[:i] >= 0).sum() + (off[i:] < 0).sum() for i in range(len(off) + 1)]
    at = int(np.argmin(wrong))
    first = max(min(at - (NEAR + 1) // 2, len(off) - NEAR), 0)
    x = 1 / np.asarray(rates[first : first + NEAR])
    y = off[first : first + NEAR]
    slope = float(np.median([(b - a) / (v - u) for (u, a), (v, b) in combinations(zip(x, y, strict=True), 2)]))
    rest = float(np.median(y - slope * x))
    return -slope / rest if slope < 0 < rest else inf


def measured(rates: Sequence[float], ours: Sequence[Sequence[float]], raw: Sequence[Sequence[float]]) -> dict[str, Any]:
    """The crossing of medians, and of DRAWS draws of the rounds the 5th and the 95th of 100."""
    a, b = np.asarray(ours), np.asarray(raw)
    draw = np.random.default_rng(0)
    found = []
    for _ in range(DRAWS):
        some = draw.integers(0, a.shape[1], a.shape[1])
        found.append(crossing(rates, np.median(a[:, some], 1).tolist(), np.median(b[:, some], 1).tolist()))
    low, high = np.quantile(found, [0.05, 0.95], method="nearest")
    at = crossing(rates, np.median(a, 1).tolist(), np.median(b, 1).tolist())
    return {"measured_gbps": gbps(at), "interval_gbps": [gbps(low), gbps(high)]}


def judged(model: Model, profile: str, tokens: int, swept: Mapping[str, Any]) -> dict[str, Any]:
    """One case: B* by the model, measured, and how far the model's seconds are off in either form."""
    rates, taken = swept["rates"], swept["taken"]
    found = measured(rates, taken[profile], taken["raw"])
    out: dict[str, Any] = {
        "profile": profile, "tokens": tokens, "raw_bytes": model.nbytes(tokens), "cr": round(model.ratio(profile), 3),
        "rounds": len(taken["raw"][0]), **found,
    }  # fmt: skip
    ways: dict[str, tuple[Form, bool]] = {
        "model": (model.form, False), "at this length": (model.form, True), "sequential": (SEQUENTIAL, False),
    }  # fmt: skip
    for name, (form, local) in ways.items():
        at = gbps(model.break_even(profile, tokens, form, local))
        errors = [
            abs(model.seconds(way, tokens, form, local)(rate) / statistics.median(times) - 1)
            for way in (profile, "raw")
            for rate, times in zip(rates, taken[way], strict=True)
        ]
        off = _off(found["measured_gbps"], at)
        out[name] = {"gbps": at, "off": off, "seconds_off": round(statistics.median(errors), 4)}
    out["ms"] = {way: [milliseconds(times) for times in taken[way]] for way in (profile, "raw")}
    out["rates_gbps"] = [gbps(rate) for rate in rates]
    return out


def _off(found: float | None, wanted: float | None) -> float:
    """None is infinite: compression costs nothing that a link can show."""
    if found is None or wanted is None:
        return 0.0 if found is wanted else 1.0
    return round(abs(found / wanted - 1), 4) if wanted else float(found != wanted)


def gbps(rate: float) -> float | None:
    """Of bytes/s; None above what a link can show."""
    return round(8e-9 * float(rate), 1) if rate <= MOST else None


def milliseconds(seconds: Iterable[float]) -> float:
    """Their median."""
    return round(1e3 * statistics.median(seconds), 4)
