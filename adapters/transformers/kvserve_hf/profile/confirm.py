"""What a search leaves, measured again: quality on all samples by all workers, then speed, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import msgspec

from kvserve_core.profiling.executor import make_executor
from kvserve_core.profiling.journal import Journal
from kvserve_core.profiling.point import Measurement, Point
from kvserve_core.profiling.work import MEASURE
from kvserve_hf.profile.objective import ModelObjective

Callback = Callable[[str, int, int, str], None]
"""``progress(task, done, of, best so far)``."""


def qualities(
    thorough: ModelObjective,
    points: Sequence[Point],
    executor: str,
    workers: int,
    journal: Journal | None,
    progress: Callback,
) -> dict[str, Measurement]:
    """By key: quality and ratio of each point, without speed, for others work at the same time.

    What failed before is tried again: its process may have been killed.
    """
    held = journal.measurements if journal else {}
    known = {p.key: held[p.key] for p in points if p.key in held and not held[p.key].error}
    todo = [p for p in points if p.key not in known]
    untimed = ModelObjective(replace(thorough.setup, lengths=()), thorough.load)
    with make_executor(executor, untimed, workers) as by:
        for i, made in by.run(MEASURE, todo):
            known[made.key] = made
            if journal:
                journal.measured(made)
            progress("confirm", len(known), len(points), todo[i].name)
    untimed.close()
    return known


def timed(
    thorough: ModelObjective, points: Sequence[Point], found: Mapping[str, Measurement], progress: Callback
) -> Iterator[tuple[Point, Measurement]]:
    """Each point with its measurement and its speed; those that failed are left out."""
    good = [p for p in points if not found[p.key].error]
    for i, point in enumerate(good):
        encode, decode = thorough.speed(point)
        yield point, msgspec.structs.replace(found[point.key], encode=encode, decode=decode)
        progress("time", i + 1, len(good), point.name)
