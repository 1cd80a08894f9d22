"""The generated list of components and their measured quality."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvserve_core.component import KINDS
from kvserve_core.registry import default_registry

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_components", DOCS / "generate_components.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_document_is_up_to_date(generator: ModuleType) -> None:
    written = (DOCS / "components.md").read_text(encoding="utf-8")
    assert written == generator.document(), "run: python docs/generate_components.py"


def test_every_built_in_component_is_in_it_with_its_file(generator: ModuleType) -> None:
    text = generator.document()
    registry = default_registry()
    for kind in KINDS:
        for name in registry.names(kind):
            manifest = registry.manifest(kind, name)
            if manifest.provider.distribution == generator.PROVIDER:
                assert f"[`{name}`](../kvserve_plugins/" in text
                assert manifest.component.summary in text
    for link in {line.split("](../")[1].split(")")[0] for line in text.splitlines() if "](../" in line}:
        assert (DOCS.parent / link).is_file()


def interval(mean: float) -> dict[str, float]:
    return {"mean": mean, "low": mean / 2, "high": mean * 2}


def result() -> dict[str, Any]:
    rows = [
        {"pipeline": f"p,step={cr:g}", "cr": cr, "calibrated": "", "artefacts": {"basis": 2_000_000}}
        | {"kl": interval(kl), "top1": interval(0.5), "dnll": interval(0.01), "tasks": {"lookup": 0.75}}
        | {"by_kind": {"prose": {"cr": cr, "kl": interval(kl)}}, "escaped_segments": 3, "segments": 9}
        for cr, kl in ((4.0, 0.004), (8.0, 0.06))
    ]
    at = [{"kl": 0.0045, "cr": 4.2, "low": 3.0, "high": None}]
    return {
        "command": "kvserve bench quality --out here",
        "texts": [{"kind": "prose"}, {"kind": "prose"}],
        "tasks": {"uncompressed": {"lookup": 1.0, "copy": 0.1}, "counted": ["lookup"]},
        "families": [{"family": "p", "about": "Some.", "calibrated": "", "points": 2, "at": at}],
        "pipelines": [*rows, {"pipeline": "gone", "problem": "not here"}],
    }


def test_results_become_tables(generator: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "quality_smollm2.json").write_text(json.dumps(result()))
    (tmp_path / "quality_robustness.json").write_text(json.dumps(result()))
    (tmp_path / "quality_tasks.json").write_text(json.dumps(result() | {"command": "kvserve bench quality --tasks 9"}))
    text = generator.document(tmp_path)
    assert "    kvserve bench quality --out here\n" in text
    assert "| p | no | 4.2 [3.0, ?] |" in text
    assert "| p,step=4 | 4.00 | 0.0040 [0.0020, 0.0080] |" in text
    assert "| 0.75 | basis 2.0 MB |" in text
    assert "Not counted: copy." in text
    assert "| p,step=8 | nothing | 8.0 / 0.0600 | 3 of 9 |" in text
    assert "Share of 9 questions" in text
    assert "| p,step=8 | 8.00 | 0.75 |" in text
    assert "gone" not in text
    assert "tasks not measured" not in text


def test_a_pipeline_without_task_scores_has_blank_cells(generator: ModuleType, tmp_path: Path) -> None:
    made = result()
    del made["pipelines"][1]["tasks"]
    (tmp_path / "quality_smollm2.json").write_text(json.dumps(made))
    text = generator.document(tmp_path)
    assert "Without a score: tasks not measured." in text
    assert "|  | basis 2.0 MB |" in text
    assert "| 0.75 | basis 2.0 MB |" in text
