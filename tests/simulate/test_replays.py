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


@pytest.mark.parametrize("bar", ["b3", "envelopes", "intervals", "fig4", "fig13", "fig14", "fig16", "regret"])
def test_the_bar_holds(bar: str, controller: ModuleType) -> None:
    found = controller.BARS[bar]()
    assert found
    assert {name: (each.value, each.bar) for name, each in found.items() if not each.ok} == {}
    json.dumps({name: each.value for name, each in found.items()})


def test_the_stored_intervals_are_worse_as_computed_by_hand(controller: ModuleType) -> None:
    (found,) = controller.BARS["intervals"]().values()
    assert found.detail["beaten, best is no candidate"] == (9, 6)
    assert max(d["worst"] for d in found.detail["stored"].values()) == pytest.approx(0.637, abs=0.001)
    assert sum(d["intervals"] for d in found.detail["stored"].values()) == 12


def test_the_figures_that_no_line_can_reach_are_said(controller: ModuleType) -> None:
    (found,) = controller.BARS["fig14"]().values()
    assert {d: found.detail[d]["nearest any line comes to KVServe"] for d in ("2WikiMQA", "HotpotQA")} == {
        "2WikiMQA": 0.285,
        "HotpotQA": 0.175,
    }


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
