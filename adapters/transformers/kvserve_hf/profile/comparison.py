"""Pipelines side by side over workloads, as in Table 1 of the KVServe paper (arXiv 2605.13734).

Quality is relative to uncompressed KV with its 95 % interval, CR that of full frames on the workload's own prompts.
``unified`` is the one profile with the highest ratio among those that keep the floor on every workload; ``aware`` picks
for each workload the highest ratio that keeps it there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from kvserve_core.artefacts import Artefacts
from kvserve_core.component import ComponentSpec
from kvserve_core.evaluation.engine import Engine, Roundtrip, Text, plane_by_plane
from kvserve_core.evaluation.quality import Interval
from kvserve_core.evaluator import Evaluator, Prepared
from kvserve_core.pipeline import Pipeline
from kvserve_core.profile import PipelineSpec
from kvserve_core.registry import default_registry
from kvserve_core.spec import Region, whole
from kvserve_hf.profile.masks import StreamingEngine
from kvserve_hf.roundtrip import FrameRoundtrip

UNIFIED, AWARE, DEFAULT, DUO = "unified", "aware", "default", "duo (masks, not servable)"


@dataclass(frozen=True)
class Workload:
    """What is asked under one name: an evaluator, on texts."""

    name: str
    evaluator: ComponentSpec
    texts: tuple[Text, ...]


@dataclass(frozen=True)
class Cell:
    """One pipeline on one workload. profile: what was used, where the row may choose."""

    quality: Interval
    cr: float
    samples: int
    profile: str = ""


Row = Mapping[str, Cell]
"""Workload to cell."""


def measured(
    engine: Engine,
    workloads: Sequence[Workload],
    pipelines: Mapping[str, PipelineSpec],
    artefacts: Artefacts,
    duo: StreamingEngine | None = None,
    done: Callable[[str], None] = lambda said: None,
) -> dict[str, dict[str, Cell]]:
    """A row for each pipeline and, if given, for the masked engine."""
    rows: dict[str, dict[str, Cell]] = {name: {} for name in (*pipelines, *([DUO] if duo else []))}
    for workload in workloads:
        for name, cell in _on(workload, engine, pipelines, artefacts, duo):
            rows[name][workload.name] = cell
            done(f"{workload.name}, {name}")
    return rows


def _on(
    workload: Workload,
    engine: Engine,
    pipelines: Mapping[str, PipelineSpec],
    artefacts: Artefacts,
    duo: StreamingEngine | None,
) -> Iterator[tuple[str, Cell]]:
    evaluator: Evaluator = default_registry().create("evaluator", workload.evaluator)
    prepared = evaluator.prepare(engine, workload.texts)
    try:
        for name, spec in pipelines.items():
            pipeline = Pipeline.build(spec, engine.spec, whole(engine.spec), artefacts=artefacts, path=name)
            roundtrip = FrameRoundtrip(pipeline, artefacts)
            yield name, _cell(prepared, roundtrip)
    finally:
        prepared.close()
    if duo is not None:
        masked, counted = evaluator.prepare(duo, workload.texts), _Counted(duo)
        try:
            yield DUO, _cell(masked, counted)
        finally:
            masked.close()


class _Counting(Roundtrip, Protocol):
    @property
    def cr(self) -> float: ...


def _cell(prepared: Prepared, roundtrip: _Counting) -> Cell:
    found = prepared.run(roundtrip)
    return Cell(found.quality, roundtrip.cr, found.samples)


class _Counted:
    """Hands KV through as it is; counts what the masks would have kept."""

    def __init__(self, engine: StreamingEngine) -> None:
        self._engine = engine
        self._raw = self._kept = 0

    @property
    def cr(self) -> float:
        return self._raw / self._kept

    def __call__(self, read: Callable[[Region], Tensor], total: int) -> Iterable[tuple[Region, Tensor]]:
        sent, kept = self._engine.counted(total)
        self._raw += sent
        self._kept += kept
        return plane_by_plane(self._engine.spec, lambda at, x: x)(read, total)


def choices(
    rows: Mapping[str, Row], profiles: Sequence[str], floor: float, without: Sequence[str] = ()
) -> dict[str, dict[str, Cell]]:
    """The rows ``unified`` and ``aware`` from those of a library's profiles.

    without: workloads that a second row ``unified`` does not have to keep the floor on, where the first one leaves all.
    A profile keeps the floor where its lower bound does. Where even ``default`` cannot show that, for the sample is too
    small, the measured quality decides instead. Where no profile keeps it, ``default`` is taken, which loses nothing.
    """
    workloads = list(next(iter(rows.values())))
    kept = {w: [p for p in profiles if _keeps(rows, p, w, floor)] for w in workloads}
    most = {w: max(kept[w], key=lambda p: rows[p][w].cr, default=DEFAULT) for w in workloads}
    found = {UNIFIED: _one(rows, kept, workloads)}
    if less := [w for w in without if w in workloads]:
        found[f"{UNIFIED}, but for {', '.join(less)}"] = _one(rows, kept, [w for w in workloads if w not in less])
    return found | {AWARE: {w: _named(rows, most[w], w) for w in workloads}}


def _one(rows: Mapping[str, Row], kept: Mapping[str, Sequence[str]], over: Sequence[str]) -> dict[str, Cell]:
    """The profile with the highest ratio of those that are kept on all workloads in ``over``, on every workload."""
    everywhere = [p for p in kept[over[0]] if all(p in kept[w] for w in over)]
    best = max(everywhere, key=lambda p: min(rows[p][w].cr for w in over), default=DEFAULT)
    return {w: _named(rows, best, w) for w in rows[best]}


def _keeps(rows: Mapping[str, Row], profile: str, workload: str, floor: float) -> bool:
    quality = rows[profile][workload].quality
    return (quality.low if rows[DEFAULT][workload].quality.low >= floor else quality.mean) >= floor


def _named(rows: Mapping[str, Row], profile: str, workload: str) -> Cell:
    cell = rows[profile][workload]
    return Cell(cell.quality, cell.cr, cell.samples, profile)


def as_json(rows: Mapping[str, Row]) -> dict[str, dict[str, Any]]:
    """For a results file."""
    return {
        name: {
            workload: {
                "quality": round(c.quality.mean, 5),
                "low": round(c.quality.low, 5),
                "high": round(c.quality.high, 5),
                "cr": round(c.cr, 3),
                "samples": c.samples,
            }
            | ({"profile": c.profile} if c.profile else {})
            for workload, c in row.items()
        }
        for name, row in rows.items()
    }


def markdown(rows: Mapping[str, Row]) -> str:
    """The table: a method a row, a workload a column, ``98.2 [97.1, 99.0] % / 7.42x`` a cell."""
    workloads = list(next(iter(rows.values())))
    lines = [("method", *workloads), ("---",) * (len(workloads) + 1)]
    lines += [(name, *(_shown(row[w]) for w in workloads)) for name, row in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _shown(cell: Cell) -> str:
    quality = cell.quality
    return f"{100 * quality.mean:.1f} [{100 * quality.low:.1f}, {100 * quality.high:.1f}] % / {cell.cr:.2f}x"
