"""The best of the reference's own space: every candidate is measured, so that no search can have missed it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvserve_core.cli.space import narrowed
from kvserve_core.profiling.executor import Executor, make_executor
from kvserve_core.profiling.families import shipped
from kvserve_core.profiling.journal import Journal
from kvserve_core.profiling.point import Measurement, Point
from kvserve_core.profiling.space import fingerprint
from kvserve_core.profiling.work import MEASURE
from kvserve_hf.profile.objective import ModelObjective, Setup
from kvserve_hf.profile.run import journal_about, searching
from profiler_model.asked import Asked, say

FAMILY = "reference"
Measure = Callable[[Sequence[Point]], list[Measurement]]
Best = tuple[Point, Measurement]


@dataclass(frozen=True)
class Exhausted:
    """candidates: in the space, all measured on some texts. thorough: measured on all texts. best: by floor."""

    candidates: int
    thorough: int
    best: Mapping[float, Best | None]
    minutes: float


def exhausted(asked: Asked) -> Exhausted:
    """Measure the space."""
    began = time.monotonic()
    objective = ModelObjective(searching(asked.setup, asked.samples))
    kv = objective.engine.spec
    objective.close()
    points = asked.space(narrowed(shipped(), [FAMILY], []), kv).points()
    with _Measuring(asked, objective.setup, kv.fingerprint, points, "few texts") as few:
        quick = {m.key: m for m in few(points)}
    setup = replace(asked.setup, lengths=(64,), repeats=1, reuse=True)  # of the reference only ratio and quality count
    with _Measuring(asked, setup, kv.fingerprint, points, "all texts") as thorough:
        best = {floor: best_of(points, quick, thorough, floor, asked.workers) for floor in asked.floors}
        count = len(thorough.journal.measurements)
    return Exhausted(len(points), count, best, (time.monotonic() - began) / 60)


def best_of(
    points: Sequence[Point], quick: Mapping[str, Measurement], thorough: Measure, floor: float, batch: int
) -> Best | None:
    """The highest ratio that keeps the floor on all texts: from the highest ratio down, ``batch`` at a time.

    Those that a few texts rule out, by the upper bound, are passed over.
    """
    left = [p for p in points if not (m := quick[p.key]).error and m.quality_high >= floor]
    left.sort(key=lambda p: -quick[p.key].cr)
    while left:
        now, left = left[:batch], left[batch:]
        good = [(p, m) for p, m in zip(now, thorough(now), strict=True) if not m.error and m.quality_low >= floor]
        if good:
            return max(good, key=lambda pair: pair[1].cr)
    return None


class _Measuring:
    """Workers with a journal; answers in the order of what was asked for."""

    def __init__(self, asked: Asked, setup: Setup, model: str, points: Sequence[Point], name: str) -> None:
        self._name = name
        path = asked.work / f"{FAMILY}-{name.replace(' ', '-')}.jsonl"
        self.journal = Journal(path, fingerprint(points), 0, journal_about(setup, model))
        self._executor: Executor = make_executor("process", ModelObjective(setup), asked.workers)

    def __call__(self, points: Sequence[Point]) -> list[Measurement]:
        known = self.journal.measurements
        todo = [p for p in points if p.key not in known]
        for i, made in self._executor.run(MEASURE, todo):
            self.journal.measured(made)
            say(f"{FAMILY}, {self._name}, {len(known)}: {made.cr:.2f}x at {made.quality:.4f} {todo[i].name}")
        return [known[p.key] for p in points]

    def __enter__(self) -> _Measuring:
        return self

    def __exit__(self, *error: object) -> None:
        self._executor.close()
        self.journal.close()
