"""Seeds and policies: repeatable, in several processes, summed up with confidence intervals."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from kvserve_core.component import ComponentSpec
from kvserve_core.errors import KVServeError
from kvserve_core.simulate.engine import Clock
from kvserve_core.simulate.processes import in_processes
from kvserve_core.simulate.report import COLUMNS, report, rows
from kvserve_core.simulate.run import build, play_seed, simulate
from kvserve_core.simulate.statistics import distribution, over_seeds, t_quantile
from kvserve_plugins.policies.analytic import Analytic
from kvserve_plugins.policies.static import Static
from simulated_worlds import library, made

ANALYTIC = ComponentSpec(name="analytic")
RAW = ComponentSpec(name="static", configuration={"profile": "raw"})
POLICIES = {"analytic": ANALYTIC, "raw": RAW}


def timeless(done: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Without how long the simulation itself took."""
    return {
        name: [{k: v for k, v in s.items() if k not in ("wall_s", "cpu_s")} for s in each]
        for name, each in done.items()
    }


def test_a_seed_plays_the_same_again_and_in_other_processes() -> None:
    world = made(library(), requests=200)
    alone = simulate(world, POLICIES, range(2))
    assert timeless(alone) == timeless(simulate(world, POLICIES, range(2), workers=2))
    first, second = alone["analytic"]
    assert first["ttft_s"] != second["ttft_s"]


def test_a_process_that_dies_is_said() -> None:
    before = (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    with pytest.raises(
        KVServeError, match=r"a process of the simulation ended before it was done: .*; try fewer workers"
    ):
        in_processes(os._exit, [(3,), (3,)], 2)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_whoever_handles_termination_goes_on_doing_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that simulates has its own way to end."""
    seen = []
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append("its own"))
    monkeypatch.setattr("kvserve_core.simulate.processes.ProcessPoolExecutor", Told)
    try:
        assert in_processes(abs, [(-3,), (3,)], 2) == [3, 3]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == ["its own"]


class Told(ThreadPoolExecutor):
    """Is told to terminate as soon as it has work."""

    def __init__(self, workers: int, **_: Any) -> None:
        super().__init__(workers)

    def map(self, *arguments: Any, **more: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return super().map(*arguments, **more)


def test_processes_can_be_started_from_any_thread() -> None:
    world = made(library(), requests=50)
    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(simulate, world, {"analytic": ANALYTIC}, range(2), 2).result()
    assert [each["requests"] for each in done["analytic"]] == [50, 50]


def test_every_policy_meets_the_same_world() -> None:
    world = made(library(), requests=200)
    policies = (Analytic(Analytic.Config()), Static(Static.Config(profile="raw")))
    runs = [play_seed(world, policy, 5)[0] for policy in policies]
    assert runs[0].profile != runs[1].profile
    assert runs[0].requests == runs[1].requests
    assert runs[0].truth.factors(2, 7.0) == runs[1].truth.factors(2, 7.0)


def test_a_policy_keeps_the_time_of_the_simulation() -> None:
    clock, policy = Clock(), Analytic(Analytic.Config())
    build(made(library(), requests=5), policy, clock)
    clock.now = 7.5
    assert policy.clock() == 7.5


def test_the_report_compares_policies() -> None:
    tenants = [{"slo": "1s", "tokens": {"median": 8000}}]
    world = made(library(), requests=400, links=[{"bandwidth": "8Gbps"}], tenants=tenants)
    found = report(world.scenario, simulate(world, POLICIES, range(3)), range(3))
    learned, raw = found["policies"]
    assert learned["ttft_s"]["mean"]["high"] < raw["ttft_s"]["mean"]["low"]
    assert learned["slo_met"]["value"] > raw["slo_met"]["value"]
    assert learned["sent"]["value"] < 0.2
    assert raw["sent"]["value"] == pytest.approx(1, rel=0.01)
    assert learned["regret"]["value"] < 0.05 < raw["regret"]["value"]
    assert raw["profiles"] == {"raw": 1.0}
    assert sum(learned["reasons"].values()) == pytest.approx(1)
    shown = rows(found)
    assert [row[0] for row in shown] == ["analytic", "raw"]
    assert {len(row) for row in shown} == {len(COLUMNS)}
    assert "±" in shown[0][1]
    json.dumps(found, allow_nan=False)


def test_one_seed_has_no_interval_and_no_slo_no_share() -> None:
    world = made(None, requests=50)
    (each,) = report(world.scenario, simulate(world, {"a": ANALYTIC}, [0]), [0])["policies"]
    assert each["jct_s"]["p99"]["low"] is None
    assert "slo_met" not in each
    assert "none set" in rows({"policies": [each]})[0]


def test_statistics() -> None:
    found = distribution(np.arange(101.0))
    assert found == {"mean": 50, "p50": 50, "p90": 90, "p95": 95, "p99": 99}
    interval = over_seeds([1.0, 2.0, 3.0])
    assert (interval.value, interval.high) == pytest.approx((2, 2 + 4.303 / 3**0.5), abs=1e-3)
    assert [t_quantile(n) for n in (16, 30, 100)] == pytest.approx([2.120, 2.042, 1.984], abs=2e-3)


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    intervals = [over_seeds(rng.normal(7, 2, 5).tolist()) for _ in range(2000)]
    covered = np.mean([(i.low or 0) <= 7 <= (i.high or 0) for i in intervals])
    assert covered == pytest.approx(0.95, abs=0.02)
