"""What a report shows, read from a library: its profiles, the search behind them, and what each component gave."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import msgspec

from kvserve_core.latency import Line, threshold
from kvserve_core.library import RAW_PROFILE, Profile, ProfileLibrary, QualityRecord
from kvserve_core.policy import RAW
from kvserve_core.profile import Chain, PipelineSpec

KINDS = ("transform", "quantizer", "codec")
NO_TRANSFORM = "none"
MOST_RATIO = 1e6
"""As a profile may have."""


@dataclass(frozen=True)
class Row:
    """One profile. break_even_bps: below this bandwidth (bytes/s) it beats raw, None if it never does or always."""

    profile: Profile
    quality: QualityRecord | None
    chains: Mapping[str, str]
    break_even_bps: float | None


@dataclass(frozen=True)
class Step:
    """One measurement of the search, in its order."""

    name: str
    cr: float
    quality: float
    low: float
    high: float
    error: str = ""
    chains: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Gain:
    """The highest ratio at a quality floor that was found with a component somewhere in the pipeline."""

    kind: str
    component: str
    cr: float
    tried: int


@dataclass(frozen=True)
class Report:
    """Everything the page is made of. floor: the lower quality bound that ``gains`` and the trace's best are about."""

    library: ProfileLibrary
    workload: str
    floor: float
    nbytes: float
    rows: tuple[Row, ...]
    steps: tuple[Step, ...]
    gains: tuple[Gain, ...]
    search: Mapping[str, Any]


def read(library: ProfileLibrary, workload: str = "default", floor: float = 0.99, nbytes: float = 64 * 2**20) -> Report:
    """A report of a library on one workload, for requests of ``nbytes`` original bytes."""
    found = library.provenance.get("search")
    search: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
    steps = tuple(_steps(search.get("trace")))
    raw = library.profile(RAW) or RAW_PROFILE
    profiles = library.profiles if raw in library.profiles else (raw, *library.profiles)
    rows = tuple(_row(p, workload, nbytes, raw.line(nbytes)) for p in profiles)
    return Report(library, workload, floor, nbytes, rows, steps, tuple(_gains(steps, rows, floor)), search)


def chains_of(spec: PipelineSpec) -> dict[str, str]:
    """``{"k": "hadamard + uniform + zstd"}``."""
    return {plane: " + ".join(_names(chain)) for plane, chain in spec.planes.items()}


def frontier(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of ``(quality, ratio)`` pairs those that no other beats in both, by falling quality."""
    best: list[tuple[float, float]] = []
    for quality, cr in sorted(set(points), reverse=True):
        if not best or cr > best[-1][1]:
            best.append((quality, cr))
    return best


def best_so_far(steps: Sequence[Step], floor: float) -> list[float]:
    """The highest ratio that kept the floor after each step; 0 before the first."""
    found, best = [], 0.0
    for step in steps:
        if not step.error and step.low >= floor:
            best = max(best, step.cr)
        found.append(best)
    return found


def _row(profile: Profile, workload: str, nbytes: float, raw: Line) -> Row:
    limit = threshold(profile.line(nbytes), raw)
    pays = limit if 0 < limit < float("inf") and profile.name != RAW else None
    return Row(profile, profile.quality_for(workload), chains_of(profile.pipeline), pays)


def _steps(trace: Any) -> Iterator[Step]:
    """The rows of a trace that can be read: provenance is free text, and its author may mean something else by it."""
    for row in trace if isinstance(trace, Sequence) and not isinstance(trace, str) else ():
        try:
            step = msgspec.convert(row, Step)
        except msgspec.ValidationError:
            continue
        if 0 <= step.cr <= MOST_RATIO and all(map(isfinite, (step.quality, step.low, step.high))):
            yield step


def _gains(steps: Sequence[Step], rows: Sequence[Row], floor: float) -> Iterator[Gain]:
    tried = [(step.chains, step.cr if not step.error and step.low >= floor else 0.0) for step in steps if step.chains]
    kept = [(row.chains, row.profile.cr if _keeps(row, floor) else 0.0) for row in rows]
    used: dict[tuple[str, str], list[float]] = {}
    for chains, cr in [*tried, *kept]:
        for key in {key for text in chains.values() for key in _components(text)}:
            used.setdefault(key, []).append(cr)
    for (kind, component), ratios in sorted(used.items(), key=lambda item: (KINDS.index(item[0][0]), -max(item[1]))):
        yield Gain(kind, component, max(ratios), len(ratios))


def _keeps(row: Row, floor: float) -> bool:
    return row.profile.exact or (row.quality is not None and row.quality.lower >= floor)


def _names(chain: Chain) -> list[str]:
    return [*(t.name for t in chain.transforms), chain.quantizer.name, chain.codec.name]


def _components(chain: str) -> list[tuple[str, str]]:
    if " + " not in chain:
        return []
    *transforms, quantizer, codec = chain.split(" + ")
    named = [("transform", name) for name in transforms or [NO_TRANSFORM]]
    return [*named, ("quantizer", quantizer), ("codec", codec)]
