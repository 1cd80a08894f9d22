from __future__ import annotations

import importlib.util
import json
import re
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvserve_core.metric_names import METRICS
from kvserve_vllm.proxy.counts import Counts
from kvserve_vllm.proxy.upstream import Pool

DOCS = Path(__file__).parents[2] / "docs"
SUFFIXES = {"counter": "_total", "gauge": "", "histogram": "_bucket"}


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_dashboard", DOCS / "generate_dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def panels() -> list[dict[str, Any]]:
    return list(json.loads((DOCS / "grafana-kvserve.json").read_text())["panels"])


def queried(panels: list[dict[str, Any]], name: str) -> set[str]:
    return {m for p in panels for t in p.get("targets", ()) for m in re.findall(name, t["expr"])}


def test_the_file_is_up_to_date(generator: ModuleType) -> None:
    assert (DOCS / "grafana-kvserve.json").read_text() == generator.document(), "run docs/generate_dashboard.py"


def test_every_metric_of_engines_is_shown_and_no_other(panels: list[dict[str, Any]]) -> None:
    assert queried(panels, r"kvserve:\w+") == {m.full_name + SUFFIXES[m.kind] for m in METRICS}


def test_labels_in_queries_exist(panels: list[dict[str, Any]]) -> None:
    known = {label for m in METRICS for label in m.labels} | {"instance", "le", "outcome", "reason", "step"}
    known |= {"role", "url"}
    used = {label for by in queried(panels, r"by \(([\w, ]+)\)") for label in by.split(", ")}
    assert used <= known


def test_every_metric_of_the_proxy_is_shown_and_no_other(panels: list[dict[str, Any]]) -> None:
    text = Counts().exposition(Pool("decode", ["http://d"]).servers)
    kinds = re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE)
    exported = {name + ("_bucket" if kind == "histogram" else "") for name, kind in kinds}
    assert queried(panels, r"kvserve_proxy_\w+") == exported


def test_panels_do_not_overlap(panels: list[dict[str, Any]]) -> None:
    def cells(panel: dict[str, Any]) -> set[tuple[int, int]]:
        at = panel["gridPos"]
        return {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}

    assert all(cells(a).isdisjoint(cells(b)) for a, b in combinations(panels, 2))
    assert len({p["id"] for p in panels}) == len(panels)
