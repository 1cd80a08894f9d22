"""A search from beginning to end: estimate all, then propose, measure and learn, with a journal to go on from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvserve_core.errors import KVServeError
from kvserve_core.profiling.acquisition import feasible
from kvserve_core.profiling.executor import Executor
from kvserve_core.profiling.journal import Journal
from kvserve_core.profiling.point import Estimate, Measurement, Point
from kvserve_core.profiling.search import Options, Search
from kvserve_core.profiling.work import ESTIMATE, MEASURE


@dataclass(frozen=True)
class Progress:
    """How far a search is. best: of the first floor; latest: the point that was just done."""

    task: Literal["estimate", "measure"]
    done: int
    total: int
    best: Measurement | None
    latest: Point


@dataclass(frozen=True)
class Found:
    """What a search gives. measurements: in the order in which they were proposed. estimates: of every candidate."""

    points: tuple[Point, ...]
    estimates: tuple[Estimate, ...]
    measurements: tuple[Measurement, ...]
    stopped: str

    def point(self, key: str) -> Point:
        """The point of a measurement."""
        return next(p for p in self.points if p.key == key)


Callback = Callable[[Progress], None]


def search(
    points: Sequence[Point],
    executor: Executor,
    options: Options,
    *,
    journal: Journal | None = None,
    batch: int = 1,
    progress: Callback = lambda now: None,
) -> Found:
    """Search a pool. ``batch``: points that are proposed together; use the number of workers.

    Proposals depend on options, batch and answers only, so that a search that goes on from its journal proposes what it
    would have proposed, and takes from the journal what is in there.

    Raises:
        KVServeError: no candidate can be encoded, or every measurement of the cold start failed; the message is that
            of the first.
    """
    run = _Run(points, executor, journal, progress)
    estimates = run.estimates()
    if estimates and all(e.error for e in estimates):
        raise KVServeError(f"none of the {len(estimates)} candidates can be encoded; the first: {estimates[0].error}")
    state = Search(points, [e.cr for e in estimates], options)
    while not (reason := state.stopped()):
        state.tell(run.measurements(state.ask(batch), state))
        _give_up(state)
    return Found(tuple(points), tuple(estimates), tuple(state.told.values()), reason)


def _give_up(state: Search) -> None:
    """Stop when everything fails: that is not the candidates' fault."""
    told = list(state.told.values())
    if len(told) >= state.options.cold and all(m.error for m in told):
        raise KVServeError(f"all of the first {len(told)} measurements failed; the first: {told[0].error}")


@dataclass
class _Run:
    points: Sequence[Point]
    executor: Executor
    journal: Journal | None
    progress: Callback

    def estimates(self) -> list[Estimate]:
        """Of every point."""
        known = dict(self.journal.estimates) if self.journal else {}
        todo = [p for p in self.points if p.key not in known]
        for i, made in self.executor.run(ESTIMATE, todo):
            known[made.key] = made
            if self.journal:
                self.journal.estimated(made)
            self.progress(Progress("estimate", len(known), len(self.points), None, todo[i]))
        return [known[p.key] for p in self.points]

    def measurements(self, asked: Sequence[Point], state: Search) -> list[Measurement]:
        """Of the points that were asked for, in their order: from the journal, or made now."""
        held = self.journal.measurements if self.journal else {}
        known = {p.key: held[p.key] for p in asked if p.key in held}
        todo = [p for p in asked if p.key not in known]
        for i, made in self.executor.run(MEASURE, todo):
            known[made.key] = made
            if self.journal:
                self.journal.measured(made)
            best = better(state.best(), known.values(), state.options.floors[0])
            done = len(state.told) + len(known)
            total = len(state.told) + len(asked) + state.left
            self.progress(Progress("measure", done, total, best, todo[i]))
        return [known[p.key] for p in asked]


def better(best: Measurement | None, others: Iterable[Measurement], floor: float) -> Measurement | None:
    """The highest ratio that keeps the floor, of ``best`` and others."""
    kept = [m for m in (best, *others) if m is not None and feasible(m, floor)]
    return max(kept, key=lambda m: m.cr, default=None)
