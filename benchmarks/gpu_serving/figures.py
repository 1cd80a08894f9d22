"""From requests to medians, bars and the measured break-even."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvserve_core.latency import Line, Speed, latency_line, threshold

FIELDS = ("ttft_s", "jct_s", "prefill_s", "encode_s", "transfer_s", "decode_s", "load_s")
SLOW = 25e9
"""Links below this many bits/s must gain what the ratio promises."""
Link = Mapping[str, Any]
Row = Mapping[str, Any]
"""A profile as the results have it: name, cr, encode, decode."""


def summary(taken: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Medians by way, and medians of ratios in the same round."""
    medians = {way: {f: _median([t[f] for t in ts]) for f in FIELDS} for way, ts in taken.items()}
    for way, ts in taken.items():
        wire = sum(t["wire_bytes"] for t in ts)
        medians[way] |= {
            "profiles": sorted({t["profile"] for t in ts}),
            "cr": round(sum(t["raw_bytes"] for t in ts) / wire, 3) if wire else 0.0,
            "ok": all(t["ok"] for t in ts),
        }
    ratios = {
        f"{way}_{field}_over_raw": _median(
            [a[f"{field}_s"] / b[f"{field}_s"] for a, b in zip(taken[way], taken["raw"], strict=True)]
        )
        for way in ("kvserve", "fixed")
        if way in taken
        for field in ("jct", "ttft")
    }
    gain = _median([_gain(a, b) for a, b in zip(taken["kvserve"], taken["raw"], strict=True)])
    brief = {
        "kvserve": "+".join(medians["kvserve"]["profiles"]),
        "jct": {way: m["jct_s"] for way, m in medians.items()},
        "load": {way: m["load_s"] for way, m in medians.items()},
        "gain_over_cr": gain,
        "ok": all(m["ok"] for m in medians.values()),
    }
    raw_bytes = max(t["raw_bytes"] for ts in taken.values() for t in ts)
    return {
        "medians": medians, "ratios": ratios, "transfer_gain_over_cr": gain, "raw_bytes": raw_bytes, "brief": brief,
    }  # fmt: skip


def _gain(ours: Mapping[str, Any], raw: Mapping[str, Any]) -> float:
    """How often our time on the link goes into raw's, over the ratio of the bytes. 0 where nothing was compressed."""
    cr = ours["raw_bytes"] / ours["wire_bytes"] if ours["wire_bytes"] else 0.0
    return 0.0 if cr < 1.5 or not ours["transfer_s"] else raw["transfer_s"] / ours["transfer_s"] / cr


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 5)


def rate(name: str) -> float | None:
    """Bits/s of a link's name."""
    last = name.split()[-1]
    return None if last == "unlimited" else float(last.removesuffix("G")) * 1e9


def bars(links: Mapping[str, Link], crossings: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What must hold. crossings: of :func:`break_even`."""
    cells = [(name, length, cell) for name, by in links.items() for length, cell in by.items()]
    found = []
    for what in ("jct", "ttft"):
        worst, where = max((c["ratios"][f"kvserve_{what}_over_raw"], f"{n}, {k} tokens") for n, k, c in cells)
        found.append(_bar(f"{what.upper()} over raw, worst of all ({where})", worst, 1.02, worst <= 1.02))
    gains = [(c["transfer_gain_over_cr"], f"{n}, {k}") for n, k, c in cells if (rate(n) or 1e12) < SLOW]
    if gains:
        least, where = min(gains)
        found.append(_bar(f"transfer time falls by, over cr, below 25 Gbps ({where})", least, 0.85, least >= 0.85))
    for length, at in crossings.items():
        off = abs(at["measured_gbps"] / at["library_gbps"] - 1) if at["measured_gbps"] and at["library_gbps"] else 1.0
        found.append(_bar(f"measured break-even at {length} tokens, off B*", off, 0.15, off <= 0.15))
    return found


def _bar(name: str, value: float, bar: float, ok: bool) -> dict[str, Any]:
    return {"name": name, "value": round(float(value), 4), "bar": bar, "ok": bool(ok)}


def break_even(links: Mapping[str, Link], library: Mapping[str, Row], fixed: str) -> dict[str, dict[str, Any]]:
    """By length: where the lines of raw and of the fixed profile cross, and where the library says (Theorem 6.1).

    library: of the device transport.

    Measured: least squares of load seconds over 1 / B on links that limit a device transport, plus the library's
    encode seconds, which the prefill engine spends before.
    """
    limited = {n: rate(n) for n in links if n.startswith("ipc") and rate(n)}
    if len(limited) < 2:
        return {}
    x = np.array([8 / r for r in limited.values() if r])
    found = {}
    for length in links[min(limited, key=lambda n: len(links[n]))]:
        nbytes = links[next(iter(limited))][length]["raw_bytes"]
        lines = {way: _line(library[name], nbytes) for way, name in _names(fixed)}
        loads = {way: [links[n][length]["medians"][way]["load_s"] for n in limited] for way in lines}
        fits = {way: np.polyfit(x, loads[way], 1) for way in lines}
        costs = {way: fits[way][1] + _speed(library[name]["encode"]).seconds(nbytes) for way, name in _names(fixed)}
        saved, extra = fits["raw"][0] - fits["fixed"][0], costs["fixed"] - costs["raw"]
        at = threshold(lines["fixed"], lines["raw"]) * 8e-9
        found[length] = {
            "measured_gbps": round(float(8e-9 * saved / extra), 1) if saved > 0 and extra > 0 else None,
            "library_gbps": round(float(at), 1) if np.isfinite(at) else None,
            "raw_ms": round(float(1e3 * costs["raw"]), 3),
            "fixed_ms": round(float(1e3 * costs["fixed"]), 3),
        }
    return found


def _names(fixed: str) -> tuple[tuple[str, str], ...]:
    return ("raw", "raw"), ("fixed", fixed)


def _speed(given: Mapping[str, float]) -> Speed:
    return Speed(given["fixed_s"], given["s_per_byte"])


def _line(row: Row, nbytes: float) -> Line:
    return latency_line(nbytes, row["cr"], _speed(row["encode"]), _speed(row["decode"]))
