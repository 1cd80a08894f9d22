"""Bars of ``benchmarks/controller.py`` that measure no time, on the published tables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def controller() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import controller

        yield controller


@pytest.mark.parametrize("bar", ["b3", "envelopes", "intervals", "fig4", "fig13", "fig16", "regret"])
def test_the_bar_holds(bar: str, controller: ModuleType) -> None:
    found = controller.BARS[bar]()
    assert found
    assert {name: (each.value, each.bar) for name, each in found.items() if not each.ok} == {}
    json.dumps({name: each.value for name, each in found.items()})


def test_a_bar_that_does_not_exist_is_an_error(
    controller: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["controller.py", "--only", "typo"])
    with pytest.raises(SystemExit) as caught:
        controller.main()
    shown = capsys.readouterr()
    assert (caught.value.code, shown.out) == (2, "")
    assert "'typo' is a part of none of: b3, envelopes" in shown.err
    assert all(name in shown.err for name in controller.BARS)


def test_the_stored_intervals_are_worse_as_computed_by_hand(controller: ModuleType) -> None:
    (found,) = controller.BARS["intervals"]().values()
    assert found.detail["beaten, best is no candidate"] == (9, 6)
    assert max(d["worst"] for d in found.detail["stored"].values()) == pytest.approx(0.637, abs=0.001)
    assert sum(d["intervals"] for d in found.detail["stored"].values()) == 12


def test_the_order_of_figure_14_holds_and_what_no_curve_can_reach_is_said(controller: ModuleType) -> None:
    order, near = controller.BARS["fig14"]().values()
    assert (order.value, order.ok) == (0, True)
    assert (near.value, near.bar, near.ok) == (0.285, 0.05, False)
    for dataset, line, convex, concave in (("2WikiMQA", 0.285, 0.098, 0.185), ("HotpotQA", 0.175, 0.137, 0.135)):
        found = near.detail[dataset]
        assert found["nearest any line comes to KVServe"] == line
        assert found["nearest any convex curve comes"]["error"] == convex
        assert found["nearest any concave curve comes"]["error"] == concave
        assert found["BF16 moves by"] < 0.012
    assert near.detail["2WikiMQA"]["nearest any convex curve comes"]["for the rows at Gbps"] == [12, 10, 8]


def test_no_reading_of_eq_1_meets_the_rows_of_figure_14(controller: ModuleType) -> None:
    _, near = controller.BARS["fig14"]().values()
    found = {
        dataset: [each["largest error"] for each in detail["readings of eq. 1"].values() if "largest error" in each]
        for dataset, detail in near.detail.items()
    }
    assert found == {"2WikiMQA": [8.192, 0.361, 0.506], "HotpotQA": [3.491, 0.183, 0.506]}
    needed = [d["readings of eq. 1"]["V/cr in Gbit that each row would need"] for d in near.detail.values()]
    assert [max(each.values()) / min(each.values()) > 1.4 for each in needed] == [True, True]
    moved = {d: each["nearest any curve that falls with B comes to CacheGen"] for d, each in near.detail.items()}
    assert moved == {"2WikiMQA": 0.072, "HotpotQA": 0.038}


def test_the_best_scale_is_the_best(controller: ModuleType) -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        fixed, each, y = (rng.uniform(0.1, 2, 6) for _ in range(3))
        error, scale = controller.prefixes.scale_error(fixed, each, y)
        tried = np.linspace(0, 20, 20_001)
        errors = np.abs((fixed + tried[:, None] * each) / y - 1).max(axis=1)
        assert error <= errors.min() + 1e-12
        assert errors.min() == pytest.approx(error, abs=2e-2)
        assert np.abs((fixed + scale * each) / y - 1).max() == pytest.approx(error)


@pytest.mark.parametrize("sign", [1, -1])
def test_no_bent_curve_comes_nearer_than_said_and_one_comes_as_near(sign: int, controller: ModuleType) -> None:
    """Between the points moved down and up by the error there is room for a curve; with a little less there is none."""
    x, rng = np.array([0.01, 0.02, 0.05, 0.1, 0.2]), np.random.default_rng(1)
    for _ in range(20):
        y = rng.uniform(1, 3, 5)
        error, _ = controller.prefixes.bend_error(x, y, sign)
        for less, room in ((error * 0.99, False), (error * 1.01 + 1e-9, True)):
            low, high = y * (1 - less), y * (1 + less)
            outer, inner = (high, low) if sign > 0 else (low, high)
            gaps = [
                sign * (np.interp(x[b], x[[a, c]], outer[[a, c]]) - inner[b])
                for a in range(5)
                for b in range(a + 1, 5)
                for c in range(b + 1, 5)
            ]
            assert bool(min(gaps) >= 0) is (room or error == 0)


def test_a_try_makes_nobody_late(controller: ModuleType) -> None:
    found = controller.bandit.exploration(count=1000, seeds=1)
    assert (found.value, found.ok) == (0, True)
    assert found.detail["tries"] > 100
    assert found.detail["late requests"] > 1000


def test_the_bandit_pays_where_reports_hold_totals_only(controller: ModuleType) -> None:
    found = controller.online.totals_only()
    assert found.ok
    assert 0 < found.value["bandit"] < 0.7 * found.value["analytic"]
    assert found.detail["worst seed"]["bandit"] < 0.5 * found.detail["worst seed"]["analytic"]


def test_a_fit_that_would_change_places_is_held_in_order(controller: ModuleType) -> None:
    """Least squares alone would put the second line below the first; the condition moves both as little as it can."""
    lines = controller.published.constrained
    rows, wanted = np.eye(2), np.array([2.0, 1.0])
    found = lines(rows, wanted, np.array([[-1.0, 1.0]]), np.array([0.1]))
    assert found == pytest.approx([1.45, 1.55], abs=1e-4)


def test_the_nearest_line_is_the_nearest(controller: ModuleType) -> None:
    x, rng = np.array([0.01, 0.02, 0.05, 0.1, 0.2]), np.random.default_rng(0)
    for _ in range(20):
        y = rng.uniform(1, 3, 5)
        best = controller.published.line_error(x, y)
        a, b = np.meshgrid(np.linspace(0, 4, 400), np.linspace(0, 15, 400))
        tried = np.max([np.abs((a + b * xi) / yi - 1) for xi, yi in zip(x, y, strict=True)], axis=0).min()
        assert tried - 0.02 <= best <= tried + 1e-12
