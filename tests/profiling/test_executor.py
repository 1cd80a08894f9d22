from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from kvserve_core.errors import UnavailableComponentError, UnknownNameError
from kvserve_core.profiling.executor import DIED, make_executor
from kvserve_core.profiling.point import Estimate
from kvserve_core.profiling.work import ESTIMATE, MEASURE
from profiling_cases import Known, measurement, pool, ratio

POINTS = pool(3)
WITHOUT_RAY = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="the extra 'ray' is not installed; it is no part of the dev extra"
)
EVERY = ["serial", "process", pytest.param("ray", marks=WITHOUT_RAY)]


@pytest.mark.parametrize("name", EVERY)
def test_every_point_gets_its_answer(name: str, tmp_path: Path) -> None:
    objective = Known(log=tmp_path / "log", fails=frozenset({POINTS[1].name}))
    with make_executor(name, objective, workers=2) as executor:
        assert dict(executor.run(ESTIMATE, POINTS)) == {i: Estimate(p.key, ratio(p)) for i, p in enumerate(POINTS)}
        found = dict(executor.run(MEASURE, POINTS))
        assert list(executor.run(MEASURE, [])) == []
    failed = found.pop(1)
    assert failed.key == POINTS[1].key
    assert failed.error == f"ValueError: cannot do {POINTS[1].name}"
    assert found == {i: measurement(p) for i, p in enumerate(POINTS) if i != 1}
    assert sorted(objective.measured()) == sorted(p.name for p in POINTS)


@pytest.mark.parametrize("name", EVERY[1:])
def test_a_candidate_that_ends_its_process_takes_no_other_with_it(name: str) -> None:
    with make_executor(name, Known(dies=frozenset({POINTS[2].name})), workers=2) as executor:
        found = dict(executor.run(MEASURE, POINTS))
        again = dict(executor.run(MEASURE, POINTS[:2]))
    assert found[2].error.startswith(DIED)
    assert {i: m for i, m in found.items() if i != 2} == {i: measurement(p) for i, p in enumerate(POINTS) if i != 2}
    assert again == {i: measurement(p) for i, p in enumerate(POINTS[:2])}


def test_the_work_is_spread_over_processes(tmp_path: Path) -> None:
    with make_executor("process", Known(log=tmp_path / "log"), workers=2) as executor:
        list(executor.run(MEASURE, pool(12)))
    pids = {line.split()[0] for line in (tmp_path / "log").read_text(encoding="utf-8").splitlines()}
    assert 1 <= len(pids) <= 2


class Wrong(Known):
    def estimate(self, p: object) -> float:
        return float("nan")

    def measure(self, points: object) -> object:  # type: ignore[override]  # an objective that does not do its part
        return [measurement(POINTS[0])]


def test_an_objective_that_answers_nonsense_is_an_error_of_the_candidate() -> None:
    with make_executor("serial", Wrong()) as executor:
        ((_, estimate),) = executor.run(ESTIMATE, POINTS[1:2])
        ((_, measured),) = executor.run(MEASURE, POINTS[1:2])
    assert (estimate.cr, estimate.error) == (0.0, "ValueError: the objective estimates a ratio of nan")
    assert f"when asked for '{POINTS[1].key}'" in measured.error


def test_an_unknown_executor_and_an_absent_ray_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownNameError, match="unknown executor 'processes'; did you mean 'process'"):
        make_executor("processes", Known())
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UnavailableComponentError, match=r"pip install 'kvserve\[ray\]'"):
        make_executor("ray", Known(), workers=1)
