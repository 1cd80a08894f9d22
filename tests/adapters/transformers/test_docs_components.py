"""The generated list of components and their measured quality."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvserve_core.component import KINDS, Kind
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


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("quantizer", "cachegen", "per layer, cuda; per head with `axis` token_head"),
        ("transform", "klt", "per head, calibrated, cuda, planes k kv v; not per head with `per` all"),
        ("codec", "rans", "exact, per head, per layer, cuda; calibrated with `tables`"),
        ("quantizer", "identity", "exact, per head, per layer, cuda"),
    ],
)
def test_capabilities_are_those_of_the_default_configuration(
    generator: ModuleType, kind: Kind, name: str, said: str
) -> None:
    assert generator.capabilities(kind, name) == said


def test_capabilities_of_quantizers_that_work_in_groups_or_with_others(generator: ModuleType) -> None:
    assert generator.capabilities("quantizer", "kivi").startswith("per head, per layer, cuda, 32 tokens; ")
    assert "64 tokens with `group_size` 64" in generator.capabilities("quantizer", "kivi")
    assert generator.capabilities("quantizer", "mixhq").startswith("per head, per layer, cuda; ")


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


def test_what_the_drift_guard_misses_is_said_in_figures(generator: ModuleType, tmp_path: Path) -> None:
    made = result()
    for row, calibrated in zip(made["pipelines"], ("prose", ""), strict=False):
        row |= {"calibrated": calibrated}
        row["by_kind"]["humaneval"] = {"cr": row["cr"], "kl": interval(row["kl"]["mean"])}
    (tmp_path / "quality_robustness.json").write_text(json.dumps(made))
    text = " ".join(generator.document(tmp_path).split())
    assert "humaneval goes at a ratio of 4.0 with a KL of 0.0040, where `p,step=8`, which needs no" in text
    assert "has 0.0600." in text


def test_the_commands_that_make_calibrated_files_are_printed(generator: ModuleType, tmp_path: Path) -> None:
    made = result()
    made["command"] = "kvserve bench quality --model smollm2 --calibrated here"
    for row in made["pipelines"][:2]:
        row["calibrated"] = "calibrate klt --per all"
    (tmp_path / "quality_smollm2.json").write_text(json.dumps(made))
    line = "    kvserve calibrate klt --per all --model smollm2 --out here/basis.safetensors\n"
    assert generator.document(tmp_path).count(line) == 1


def test_a_result_of_tasks_says_how_many(generator: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "quality_tasks.json").write_text(json.dumps(result()))
    with pytest.raises(ValueError, match="does not say '--tasks'"):
        generator.document(tmp_path)


def test_a_pipeline_without_task_scores_has_blank_cells(generator: ModuleType, tmp_path: Path) -> None:
    made = result()
    del made["pipelines"][1]["tasks"]
    (tmp_path / "quality_smollm2.json").write_text(json.dumps(made))
    text = generator.document(tmp_path)
    assert "Without a score: tasks not measured." in text
    assert "|  | basis 2.0 MB |" in text
    assert "| 0.75 | basis 2.0 MB |" in text
