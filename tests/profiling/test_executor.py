from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvserve_core.errors import KVServeError, UnavailableComponentError, UnknownNameError
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


KILLED = """
import os, signal
from kvserve_core.profiling.executor import make_executor
from kvserve_core.profiling.work import ESTIMATE
from profiling_cases import Known, pool

if __name__ == "__main__":
    executor = make_executor("process", Known(), workers=2)
    list(executor.run(ESTIMATE, pool(3)))
    print(*executor._pool._processes, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_end_with_a_process_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    path = os.pathsep.join(filter(None, sys.path))
    command, env = [sys.executable, str(script)], os.environ | {"PYTHONPATH": path}
    # The workers hold its output open, so that this returns only when they have ended too.
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert (ended.returncode, len(ended.stdout.split())) == (-signal.SIGKILL, 2)


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


@pytest.mark.parametrize(
    "changes",
    [{"quality": float("nan")}, {"cr": float("inf")}, {"metrics": {"x": (float("nan"), 0.0, 1.0)}}, {"cr": 0.0}],
)
def test_what_cannot_be_searched_by_is_an_error_of_the_candidate(changes: dict[str, object]) -> None:
    class Odd(Known):
        def measure(self, points: object) -> object:  # type: ignore[override]  # answers with what JSON cannot hold
            return [measurement(POINTS[0], **changes)]

    with make_executor("serial", Odd()) as executor:
        ((_, measured),) = executor.run(MEASURE, POINTS[:1])
    assert "the objective measured" in measured.error
    assert measured.key == POINTS[0].key


def test_when_every_process_dies_the_search_ends() -> None:
    points = pool(4)
    dies = Known(dies=frozenset(p.name for p in points))
    with make_executor("process", dies, workers=1) as executor, pytest.raises(KVServeError, match="5 times in a row"):
        list(executor.run(MEASURE, points))


def test_an_unknown_executor_and_an_absent_ray_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownNameError, match="unknown executor 'processes'; did you mean 'process'"):
        make_executor("processes", Known())
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UnavailableComponentError, match=r"pip install 'kvserve\[ray\]'"):
        make_executor("ray", Known(), workers=1)
