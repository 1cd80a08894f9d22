from __future__ import annotations

from pathlib import Path

import pytest

from kvserve_core.errors import KVServeError
from kvserve_core.profiling.executor import Processes, Serial
from kvserve_core.profiling.journal import Journal
from kvserve_core.profiling.point import Objective, Point
from kvserve_core.profiling.run import Found, Progress, search
from kvserve_core.profiling.search import Options
from kvserve_core.profiling.space import fingerprint
from profiling_cases import Known, pool

OPTIONS = Options(floors=(0.9,), budget=12, seed=2)


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


class KilledAt(Known):
    """Dies in the middle of measurement number ``last``."""

    last = 7
    count = 0

    def measure(self, points: object) -> object:  # type: ignore[override]  # adds a kill
        self.count += 1
        if self.count == self.last:
            raise Killed
        return super().measure(points)  # type: ignore[arg-type]  # as above


def run(objective: Objective, journal: Path | None = None, batch: int = 1) -> Found:
    points = pool()
    if journal is None:
        return search(points, Serial(objective), OPTIONS, batch=batch)
    with Journal(journal, fingerprint(points), OPTIONS.seed) as kept:
        return search(points, Serial(objective), OPTIONS, journal=kept, batch=batch)


@pytest.mark.parametrize("batch", [1, 3])
def test_after_a_kill_it_goes_on_as_if_nothing_had_happened(batch: int, tmp_path: Path) -> None:
    whole = run(Known(), batch=batch)
    log, journal = tmp_path / "log", tmp_path / "journal"
    with pytest.raises(Killed):
        run(KilledAt(log=log), journal, batch)
    with journal.open("ab") as file:
        file.write(b'{"type":"measurement","value":{"ke')  # cut off in the middle of a line
    resumed = run(Known(log=log), journal, batch)
    assert [m.key for m in resumed.measurements] == [m.key for m in whole.measurements]
    assert resumed.stopped == whole.stopped
    done = Known(log=log).measured()
    assert len(done) == len(set(done)) == len(whole.measurements)  # nothing was measured twice


def test_a_larger_budget_goes_on_from_the_same_journal(tmp_path: Path) -> None:
    points = pool()
    seen = []
    for budget in (5, 9):
        options = Options(floors=(0.9,), budget=budget, patience=0, seed=2)
        with Journal(tmp_path / "j", fingerprint(points), 2) as kept:
            seen.append([m.key for m in search(points, Serial(Known()), options, journal=kept).measurements])
    assert seen[1][:5] == seen[0]
    assert len(seen[1]) == 9


def test_the_number_of_processes_does_not_change_what_is_found() -> None:
    with Processes(Known(), 2) as executor:
        found = search(pool(), executor, OPTIONS, batch=2)
    alone = search(pool(), Serial(Known()), OPTIONS, batch=2)
    assert [m.key for m in found.measurements] == [m.key for m in alone.measurements]


def test_progress_says_what_is_best_so_far() -> None:
    seen: list[Progress] = []
    points = pool()
    found = search(points, Serial(Known()), OPTIONS, progress=seen.append)
    estimates = [now for now in seen if now.task == "estimate"]
    measured = [now for now in seen if now.task == "measure"]
    assert [now.done for now in estimates] == list(range(1, len(points) + 1))
    assert [now.done for now in measured] == list(range(1, len(found.measurements) + 1))
    assert {now.total for now in measured} == {OPTIONS.budget}
    best = [now.best.cr if now.best else 0.0 for now in measured]
    assert best == sorted(best)
    assert best[-1] == max(m.cr for m in found.measurements if m.quality_low >= 0.9)
    assert found.point(measured[-1].latest.key) == measured[-1].latest


def test_when_everything_fails_the_first_reason_is_told() -> None:
    every = frozenset(p.name for p in pool())
    with pytest.raises(KVServeError, match="all of the first 4 measurements failed; the first: ValueError: cannot do"):
        run(Known(fails=every))


def test_a_candidate_whose_estimate_fails_is_left_out() -> None:
    class Partly(Known):
        def estimate(self, p: Point) -> float:
            if p.at["family"] == "token":
                raise ValueError("no")
            return super().estimate(p)

    found = run(Partly())
    assert {found.point(m.key).at["family"] for m in found.measurements} == {"channel"}
    assert {e.error for e in found.estimates if e.cr == 0} == {"ValueError: no"}


def test_when_nothing_can_be_encoded_it_says_why() -> None:
    class Refuses(Known):
        def estimate(self, p: Point) -> float:
            raise ValueError(f"no basis for {p.name}")

    with pytest.raises(
        KVServeError, match=r"none of the 24 candidates can be encoded; the first: .*no basis for token-4"
    ):
        run(Refuses())
