"""Bars of ``benchmarks/controller.py`` that measure no time, on the published tables."""

from __future__ import annotations

import json
from types import ModuleType

import numpy as np
import pytest

from kvserve_core.latency import Line, threshold
from kvserve_plugins.policies import bandit


@pytest.mark.parametrize("bar", ["b3", "envelopes", "intervals", "fig4", "fig13", "fig16", "fast_fig16"])
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


def test_the_lines_of_the_figures_are_those_of_the_product(
    controller: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Line, "at", lambda line, x: line.intercept + 1.2 * line.slope * x)
        assert not all(each.ok for each in controller.BARS["fig13"]().values())
    monkeypatch.setattr(controller.published, "threshold", lambda line, base: 2.0 * threshold(line, base))
    (found,) = controller.BARS["fig4"]().values()
    assert not found.ok


def test_how_many_methods_change_places_without_the_condition_is_said(controller: ModuleType) -> None:
    order, _ = controller.BARS["fig13"]().values()
    assert order.detail["pairs out of order in a fit without that condition"] == 13
    assert order.detail["of so many"] == 72


def test_the_figure_holds_to_the_letter(controller: ModuleType) -> None:
    mean, p99 = controller.online.fig16_without_bandit().values()
    assert (mean.ok, p99.ok) == (True, True)
    assert max(mean.value[:2]) < 0.6 * mean.value[2]


def test_at_the_published_bandwidths_there_is_one_choice_and_at_ten_times_there_are_several(
    controller: ModuleType,
) -> None:
    chosen = [
        next(iter(found.values())).detail["simulated"]["bandwidth only"]["chosen"]
        for found in (controller.online.fig16("analytic"), controller.online.fig16_fast("analytic"))
    ]
    assert [len(each) for each in chosen] == [1, 3]


def test_regret_of_eq_1_and_of_min_gain_is_within_the_bar(controller: ModuleType) -> None:
    found = controller.BARS["regret"]()
    kept = {name: each.ok for name, each in found.items() if name.startswith("regret of eq. 1")}
    assert list(kept.values()) == [True, True]
    deployed = found["regret of analytic, steps"]
    assert (deployed.ok, deployed.detail["of T_p"] < 0.01) == (True, True)


def test_where_the_bandwidth_decides_who_learns_nothing_has_more_regret(controller: ModuleType) -> None:
    online = controller.online
    found = online.regret("eq. 1", online.fast_steps, count=3000, seeds=1)
    assert found["of the KV alone"] < 0.5 * found["of the KV alone, nothing learned"]


def test_a_try_makes_nobody_late(controller: ModuleType) -> None:
    found = controller.bandit.exploration(count=6000, seeds=1)
    assert (found.value, found.ok) == (0, True)
    assert found.detail["tries"] > 150
    assert found.detail["late requests"] > 6000


def test_a_try_that_is_not_on_the_safe_side_is_found(controller: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandit, "SURE", 0.0)
    monkeypatch.setattr(bandit, "FALL", 1.0)
    found = controller.bandit.exploration(count=6000, seeds=1)
    assert not found.ok


def test_the_bandit_pays_where_reports_hold_totals_only(controller: ModuleType) -> None:
    found = controller.online.totals_only()
    assert found.ok
    assert 0 < found.value["bandit"] < 0.7 * found.value["eq. 1"]
    assert found.detail["worst seed"]["bandit"] < 0.5 * found.detail["worst seed"]["eq. 1"]


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
