"""``kvserve profile`` from beginning to end: search, measure what is kept again and thoroughly, assemble a library."""

from __future__ import annotations

import datetime
import platform
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

import kvserve_core
from kvserve_core.library import EXACT, ProfileLibrary, built_in
from kvserve_core.profile import PipelineSpec
from kvserve_core.profiling.acquisition import feasible
from kvserve_core.profiling.executor import make_executor
from kvserve_core.profiling.journal import Journal
from kvserve_core.profiling.pareto import front
from kvserve_core.profiling.point import Measurement, Point
from kvserve_core.profiling.run import Found, Progress, search
from kvserve_core.profiling.search import Options
from kvserve_core.profiling.space import Space, fingerprint
from kvserve_core.report.data import chains_of
from kvserve_hf.profile import library as made
from kvserve_hf.profile.confirm import Callback, qualities, timed
from kvserve_hf.profile.library import Kept
from kvserve_hf.profile.objective import CPU_S, ModelObjective, Setup, evaluator_of

BANDWIDTH = 1.25e8
"""Bytes/s of the link that latency is compared at: 1 Gbps."""
KEPT = 12
KEPT_SUFFIX = ".kept"
"""Of the second journal, of what is kept at the end."""
KEPT_SPACE = "any"
"""Of that journal: each of its measurements stands by itself, so that a larger budget may add to it."""


@dataclass(frozen=True)
class Plan:
    """What to do. search, confirm: how to measure while searching, and what is kept at the end.

    executor, workers: see :func:`kvserve_core.profiling.executor.make_executor`. journal: where to go on from. also:
    pipelines that go into the library beside what the search leaves, measured as thoroughly, under their names.
    """

    search: Setup
    confirm: Setup
    options: Options
    workload: str
    executor: str = "serial"
    workers: int = 0
    batch: int = 1
    journal: Path | None = None
    keep: int = KEPT
    also: dict[str, PipelineSpec] = field(default_factory=dict)


class ProfileRun:
    """One run over one space. ``provenance`` of the caller (command, texts) goes into the library."""

    def __init__(self, plan: Plan, objective: ModelObjective, space: Space, points: Sequence[Point]) -> None:
        self._plan, self._objective, self._space, self._points = plan, objective, space, points
        self._fingerprint = objective.engine.spec.fingerprint
        self._taken = 0  # measurements that the journal held already
        if plan.executor != "serial":
            objective.close()  # the workers load the model; this process needs no second one meanwhile

    def run(self, provenance: dict[str, Any], progress: Callback) -> ProfileLibrary:
        """Search, confirm, and what is worth keeping as a library.

        Raises:
            KVServeError: nothing could be measured, or the journal is of another search.
        """
        with self._journal("", fingerprint(self._points)) as journal:  # to the end: no other run may have it meanwhile
            return self._run(journal, provenance, progress)

    def _run(self, journal: Journal | None, provenance: dict[str, Any], progress: Callback) -> ProfileLibrary:
        began = time.monotonic()
        found = self._search(journal, progress)
        chosen = kept(found, self._plan.options.floors, self._plan.keep)
        self._objective.close()
        thorough = ModelObjective(self._plan.confirm, self._objective.load)
        points = self._candidates(found, chosen)
        known = self._confirmed(thorough, points, progress)
        measured = [Kept(p.name, p.spec, m) for p, m in timed(thorough, points, known, progress)]
        profiles = [*_exact(measured), *self._lossy(measured)]
        about = self._about(thorough)
        failed = {p.name: error for p in points if (error := known[p.key].error)}
        trace = self._trace(found) | {"failed": failed, "wall_s": round(time.monotonic() - began, 1)}
        library = made.assembled(
            profiles, about, provenance | {"search": trace}, self._plan.workload, thorough.artefacts
        )
        thorough.close()
        return library

    def _search(self, journal: Journal | None, progress: Callback) -> Found:
        plan = self._plan
        with make_executor(plan.executor, self._objective, plan.workers) as by:
            self._taken = len(journal.measurements) if journal else 0
            return search(
                self._points,
                by,
                plan.options,
                journal=journal,
                batch=plan.batch,
                progress=lambda now: progress(now.task, now.done, now.total, self._said(now)),
            )

    def _said(self, now: Progress) -> str:
        if now.best is None:
            return ""
        name = next(p.name for p in self._points if p.key == now.best.key)
        return f"{now.best.cr:.2f}x at {now.best.quality:.4f} [{now.best.quality_low:.4f}] {name}"

    def _candidates(self, found: Found, chosen: Sequence[Measurement]) -> list[Point]:
        """What may go into the library, each pipeline once; one that has a name of its own under that."""
        named = [Point((), spec, name) for name, spec in (self._plan.also | EXACT).items()]
        taken = {p.name for p in named}
        others = (found.point(m.key) for m in chosen)
        own = (replace(p, name=f"{p.name}-{p.key}") if p.name in taken else p for p in others)
        return list({p.key: p for p in (*own, *named)}.values())

    def _confirmed(
        self, thorough: ModelObjective, points: Sequence[Point], progress: Callback
    ) -> dict[str, Measurement]:
        plan = self._plan
        with self._journal(KEPT_SUFFIX, KEPT_SPACE) as journal:
            return qualities(thorough, points, plan.executor, plan.workers, journal, progress)

    def _lossy(self, measured: Sequence[Kept]) -> list[Any]:
        """Profiles by ratio: what was named, and what nothing beats."""
        lossy = [kept for kept in measured if kept.name not in EXACT]
        best = {m.key for m in front([kept.measurement for kept in lossy], made.NOMINAL_BYTES, BANDWIDTH)}
        good = [kept for kept in lossy if kept.measurement.key in best or kept.name in self._plan.also]
        judge = self._plan.confirm.evaluators[0].name
        return [made.profile_of(k, self._plan.workload, judge) for k in sorted(good, key=lambda k: k.measurement.cr)]

    def _journal(self, suffix: str, space: str) -> AbstractContextManager[Journal | None]:
        if self._plan.journal is None:
            return nullcontext(None)
        path = self._plan.journal.with_name(self._plan.journal.name + suffix)
        setup = self._plan.confirm if suffix else self._plan.search
        return Journal(path, space, self._plan.options.seed, journal_about(setup, self._fingerprint))

    def _about(self, thorough: ModelObjective) -> dict[str, str]:
        spec = thorough.engine.spec
        return {
            "model_id": spec.model_id,
            "fingerprint": spec.fingerprint,
            "device": f"cpu {platform.machine()}, {torch.get_num_threads()} thread(s)",
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }

    def _trace(self, found: Found) -> dict[str, Any]:
        """The search as it went: every measurement in order, and what it cost."""
        names = {p.key: p for p in found.points}
        options = self._plan.options
        return {
            "kvserve": kvserve_core.__version__,
            "torch": torch.__version__,
            "candidates": len(found.points),
            "families": {f.name: f.size for f in self._space.families},
            "left_out": dict(self._space.left_out),
            "space": fingerprint(found.points),
            "seed": options.seed,
            "floors": list(options.floors),
            "evaluators": [spec.model_dump(mode="json") for spec in self._plan.search.evaluators],
            "quick": self._plan.search.quick,
            "executor": self._plan.executor,
            "stopped": found.stopped,
            "evaluations": len(found.measurements),
            "from_journal": min(self._taken, len(found.measurements)),
            "cpu_s": round(sum(m.metrics.get(CPU_S, (0.0,))[0] for m in found.measurements), 1),
            "rank_correlation": made.rank_correlation(found.measurements),
            "best": {f"{floor:g}": _row(m, names[m.key]) for floor in options.floors if (m := best(found, floor))},
            "trace": [_row(m, names[m.key]) for m in found.measurements],
        }


def _exact(measured: Sequence[Kept]) -> list[Any]:
    """The profiles that lose nothing."""
    rows = [(kept.name, kept.measurement) for kept in measured if kept.name in EXACT]
    return [built_in(name, m.cr, m.encode, m.decode) for name, m in rows]


def best(found: Found, floor: float) -> Measurement | None:
    """The highest ratio whose lower bound keeps the floor."""
    return max((m for m in found.measurements if feasible(m, floor)), key=lambda m: m.cr, default=None)


def kept(found: Found, floors: Sequence[float], limit: int) -> list[Measurement]:
    """What is worth a thorough measurement, by ratio: not beaten by another, and near enough to a floor to keep one.

    When that is too many: the best of each floor first, the search's before the library's, then what is fastest at some
    bandwidth for some floor. Bounds from few samples are wide, so the measured quality decides what is near enough and
    what is fastest; the bounds of the second measurement count.
    """
    near = [m for m in found.measurements if not m.error and m.quality >= min(*made.BUCKETS, *floors)]
    rows = front(near, made.NOMINAL_BYTES, BANDWIDTH)
    every = (*floors, *made.BUCKETS)
    wanted = [m for floor in every if (m := best(found, floor))]
    fastest = [m for floor in every for m in made.fastest(rows, floor)]
    order = {m.key: m for m in (*wanted, *fastest, *sorted(rows, key=lambda m: -m.cr))}
    return sorted(list(order.values())[:limit], key=lambda m: m.cr)


def _row(m: Measurement, point: Point) -> dict[str, Any]:
    numbers = {"cr": m.cr, "cr_estimate": m.cr_estimate, "quality": m.quality}
    numbers |= {"low": m.quality_low, "high": m.quality_high, "seconds": m.seconds}
    about = {"name": point.name, "key": m.key, "chains": chains_of(point.spec)}
    return about | {k: float(f"{v:.6g}") for k, v in numbers.items()} | _problem(m)


def _problem(m: Measurement) -> dict[str, str]:
    return {"error": m.error} if m.error else {}


def journal_about(setup: Setup, model: str) -> dict[str, Any]:
    """What a journal's figures depend on beside the pipelines; of evaluators every field, as they are asked."""
    texts = blake3("\0".join(t.text for t in setup.texts).encode()).hexdigest()[:16]
    evaluators = [
        {"name": spec.name, "configuration": evaluator_of(spec, setup.quick).config.model_dump(mode="json")}
        for spec in setup.evaluators
    ]
    return {"model": model, "texts": texts, "evaluators": evaluators, "quick": setup.quick}


def searching(setup: Setup, samples: int) -> Setup:
    """A setup for the search: quick evaluators, whose prompts serve for the timings as well."""
    return replace(setup, quick=samples, lengths=(64,), repeats=1, reuse=True)
