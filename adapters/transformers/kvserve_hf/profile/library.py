"""From measurements to a profile library: what nothing else beats, in quality buckets, with how it was found."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvserve_core.artefacts import Artefacts
from kvserve_core.latency import latency_line, lower_envelope
from kvserve_core.library import Profile, ProfileLibrary, QualityRecord
from kvserve_core.profile import PipelineSpec
from kvserve_core.profiling.point import Interval, Measurement
from kvserve_core.registry import default_registry
from kvserve_hf.profile.judge import QUALITY, SAMPLES

BUCKETS = (0.995, 0.99, 0.98, 0.97, 0.95, 0.9)
"""Quality floors that a library is described for; any floor can be asked of it."""
NOMINAL_BYTES = 64 * 2**20
"""V of the envelopes in the provenance: about 3000 tokens of a model with 23 KB a token."""
METRICS = {"continuation": "exp(-KL)"}


@dataclass(frozen=True)
class Kept:
    """A pipeline that is kept, under its name."""

    name: str
    spec: PipelineSpec
    measurement: Measurement


def profile_of(kept: Kept, workload: str, evaluator: str) -> Profile:
    """The profile: quality on the workload, and on every kind of text in it."""
    m = kept.measurement
    metric = METRICS.get(evaluator, evaluator)
    records = {workload: _record((m.quality, m.quality_low, m.quality_high), m.samples, metric)}
    for kind, (quality, samples) in _kinds(m.metrics, evaluator).items():
        records.setdefault(kind, _record(quality, samples, metric))
    return Profile(
        name=kept.name,
        pipeline=kept.spec,
        cr=m.cr,
        encode=m.encode,
        decode=m.decode,
        quality=records,
        artefacts=tuple(sorted(read_by(kept.spec))),
        notes=_notes(m),
    )


def _record(quality: Interval, samples: int, metric: str) -> QualityRecord:
    value, low, high = quality
    return QualityRecord(
        value=value, lower=max(0.0, min(low, value)), upper=min(1.0, max(high, value)), metric=metric, samples=samples
    )


def _kinds(metrics: Mapping[str, Interval], evaluator: str) -> dict[str, tuple[Interval, int]]:
    """Kind of text -> quality and samples; kinds with a single sample have no interval and are left out."""
    head = f"{evaluator}.{QUALITY}@"
    kinds = [name.removeprefix(head) for name in metrics if name.startswith(head)]
    samples = {kind: round(metrics[f"{evaluator}.{SAMPLES}@{kind}"][0]) for kind in kinds}
    return {kind: (metrics[head + kind], samples[kind]) for kind in kinds if samples[kind] > 1}


def _notes(m: Measurement) -> str:
    shown = (name for name in m.metrics if not name.endswith((QUALITY, "_s")) and "@" not in name)
    return ", ".join(f"{name} {m.metrics[name][0]:.4g}" for name in shown)


def read_by(spec: PipelineSpec) -> frozenset[str]:
    """The calibrated files that a pipeline reads."""
    create, used = default_registry().create, set[str]()
    for chain in spec.planes.values():
        for transform in chain.transforms:
            used |= create("transform", transform).artefacts
        used |= create("quantizer", chain.quantizer).artefacts | create("codec", chain.codec).artefacts
    return frozenset(used)


def assembled(
    profiles: Sequence[Profile],
    about: Mapping[str, str],
    provenance: Mapping[str, Any],
    workload: str,
    artefacts: Artefacts,
) -> ProfileLibrary:
    """A library with the files that its profiles read. about: model_id, fingerprint, device and created."""
    used = sorted({digest for profile in profiles for digest in profile.artefacts})
    made = ProfileLibrary(
        **about, provenance=dict(provenance) | {"buckets": buckets(profiles, workload)}, profiles=tuple(profiles)
    )
    return made.with_artefacts(Artefacts({digest: artefacts.read(digest) for digest in used}))


def buckets(profiles: Sequence[Profile], workload: str) -> list[dict[str, Any]]:
    """For each floor the profiles that keep it, and the envelope of the fastest over bandwidth."""
    found = []
    for floor in BUCKETS:
        kept = [p for p in profiles if _keeps(p, workload, floor)]
        found.append({"min_quality": floor, "profiles": [p.name for p in kept], "envelope": envelope(kept)})
    return found


def _keeps(profile: Profile, workload: str, floor: float) -> bool:
    record = profile.quality_for(workload)
    return profile.exact or (record is not None and record.lower >= floor)


def envelope(profiles: Iterable[Profile], nbytes: float = NOMINAL_BYTES) -> list[dict[str, Any]]:
    """Which profile is fastest below which bandwidth in bytes/s, from the fastest link down (Theorem 6.2)."""
    every = list(profiles)
    lines = [latency_line(nbytes, p.cr, p.encode, p.decode) for p in every]
    found = lower_envelope(lines)
    starts = (0.0, *found.breaks)
    return [
        {"profile": every[i].name, "below_bytes_per_s": None if x == 0 else 1 / x}
        for i, x in zip(found.order, starts, strict=True)
    ]


def fastest(measurements: Iterable[Measurement], floor: float, nbytes: float = NOMINAL_BYTES) -> list[Measurement]:
    """Those that keep a floor and are fastest at some bandwidth, from the fastest link down."""
    good = [m for m in measurements if m.quality >= floor]
    found = lower_envelope([latency_line(nbytes, m.cr, m.encode, m.decode) for m in good])
    return [good[i] for i in found.order]


def rank_correlation(measurements: Iterable[Measurement]) -> float | None:
    """Spearman's rho between estimated and measured ratios; None below three."""
    pairs = [(m.cr_estimate, m.cr) for m in measurements if not m.error and m.cr_estimate > 0]
    if len(pairs) < 3:
        return None
    x, y = (_ranks([pair[i] for pair in pairs]) for i in (0, 1))
    mean = (len(pairs) + 1) / 2
    top = sum((a - mean) * (b - mean) for a, b in zip(x, y, strict=True))
    below = math.sqrt(sum((a - mean) ** 2 for a in x) * sum((b - mean) ** 2 for b in y))
    return top / below if below else None


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1; equal values share their mean rank."""
    order = sorted(values)
    return [(order.index(v) + 1 + len(order) - order[::-1].index(v)) / 2 for v in values]
