"""Families of pipelines, their templates and calibrated files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from kvserve_core import default_registry
from kvserve_core.errors import ArtefactError, ConfigError
from kvserve_hf.bench.pipelines import Calibrated, Family, candidates, filled, read_families, shipped

UNIFORM = {"name": "uniform", "configuration": {"levels": {"$": "levels"}}}
SWEEP = {
    "name": "sweep",
    "values": [{"levels": 16}, {"levels": 8}],
    "pipeline": {"planes": {"*": {"transforms": ["hadamard"], "quantizer": UNIFORM, "codec": "zstd"}}},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one calibrated file."""
    (tmp_path / "basis.safetensors").write_bytes(b"numbers")
    (tmp_path / "notes.txt").write_text("no")
    return tmp_path


def write(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value))
    return path


def test_a_family_is_one_pipeline_for_each_value(tmp_path: Path) -> None:
    families = read_families(write(tmp_path / "p.json", {"families": [SWEEP]}))
    found = list(candidates(families, Calibrated(), default_registry()))
    assert [c.name for c in found] == ["sweep,levels=16", "sweep,levels=8"]
    assert [c.spec.planes["*"].quantizer.configuration["levels"] for c in found if c.spec] == [16, 8]
    assert [c.problem for c in found] == ["", ""]


def test_the_file_of_kvserve_measure_is_read_too(tmp_path: Path) -> None:
    named = {"a": {"planes": {"*": {"quantizer": "bitplane", "codec": "zstd"}}}}
    (family,) = read_families(write(tmp_path / "p.json", named))
    (found,) = candidates([family], Calibrated(), default_registry())
    assert (found.name, found.values) == ("a", {})


def test_templates() -> None:
    template = {"a": [{"$": "step", "times": 0.12}, {"$": "step"}], "b": "x", "c": {"$": "levels"}}
    assert filled(template, {"step": 0.5, "levels": 7}, Calibrated()) == {"a": [0.06, 0.5], "b": "x", "c": 7}
    with pytest.raises(ConfigError, match=r"names 'stp', the values are \['step'\]"):
        filled({"$": "stp"}, {"step": 1.0}, Calibrated())


def test_calibrated_files_are_named_and_measured(folder: Path) -> None:
    calibrated = Calibrated(folder)
    digest = blake3(b"numbers").hexdigest()
    assert filled({"basis": {"$artefact": "basis"}}, {}, calibrated) == {"basis": digest}
    assert calibrated.sizes(frozenset({digest})) == {"basis": 7}
    assert calibrated.artefacts.read(digest) == b"numbers"
    with pytest.raises(ArtefactError, match=r"no calibrated file 'bases'; there are: basis; make it with"):
        calibrated.digest("bases")
    with pytest.raises(ConfigError, match="is no folder and no library"):
        Calibrated(folder / "absent")


def test_what_cannot_be_measured_says_why(folder: Path) -> None:
    families = [
        Family(name="absent", pipeline={"planes": {"*": {"quantizer": "no-such-thing"}}}),
        Family(
            name="uncalibrated",
            pipeline={
                "planes": {
                    "kv": {
                        "transforms": [{"name": "klt", "configuration": {"basis": {"$artefact": "klt"}}}],
                        "quantizer": "fixed_step",
                    }
                }
            },
        ),
    ]
    found = list(candidates(families, Calibrated(folder), default_registry()))
    assert [c.spec for c in found] == [None, None]
    assert "no-such-thing" in found[0].problem
    assert "no calibrated file 'klt'" in found[1].problem


def test_mistakes_name_the_field(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_families(tmp_path / "absent.json")
    misspelt = {"families": [SWEEP | {"valuse": []}]}
    with pytest.raises(ConfigError, match="did you mean 'values'"):
        read_families(write(tmp_path / "p.json", misspelt))
    broken = SWEEP | {"pipeline": {"planes": {}, "layer_block": 3}}
    (family,) = read_families(write(tmp_path / "q.json", {"families": [broken]}))
    with pytest.raises(ConfigError, match="planes is empty"):
        list(candidates([family], Calibrated(), default_registry()))


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_the_shipped_families_are_complete(model_type: str, tmp_path: Path) -> None:
    families = shipped(model_type)
    names = {f.name for f in families}
    assert len(names) == len(families)
    assert {"lossless", "kivi", "cachegen", "reference-uniform", "turboquant", "free"} <= names
    for name in ("klt-head-15", "klt-head-5", "klt-all-5", "weights-all-10", "heads"):
        (tmp_path / f"{name}.safetensors").write_bytes(name.encode())
    for candidate in candidates(families, Calibrated(tmp_path), default_registry()):
        assert not candidate.problem or "no calibrated file" in candidate.problem
