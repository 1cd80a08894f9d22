"""Libraries of measured profiles, with the calibrated files that they read."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kvserve_core.errors import ArtefactError, ConfigError
from kvserve_core.evaluation.bench import Bench
from kvserve_core.evaluation.engine import TokenText
from kvserve_core.latency import Speed
from kvserve_core.library import ProfileLibrary
from kvserve_core.spec import DType
from kvserve_hf import measured
from kvserve_hf.bench.pipelines import Calibrated
from kvserve_hf.texts import LoadedText, PinnedText
from tiny_models import VOCAB, make

SCORES = {"scores": [[1.0, 0.0], [0.5, 0.2], [0.1, 0.9]], "provenance": {}}
MIXED = {"name": "mixhq", "configuration": {"scores_artefact": {"$artefact": "heads"}, "low_ratio": 0.5}}
PIPELINES = {
    "plain": {"planes": {"*": {"quantizer": {"name": "uniform", "configuration": {"levels": 16}}, "codec": "bitpack"}}},
    "mixed": {"planes": {"*": {"quantizer": MIXED, "codec": "bitpack"}}},
}


@pytest.fixture
def files(tmp_path: Path) -> Calibrated:
    (tmp_path / "heads.json").write_text(json.dumps(SCORES))
    return Calibrated(tmp_path)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[LoadedText]:
    """Two texts of 60 tokens, 40 of them the prompt; speeds are not measured."""
    g = torch.Generator().manual_seed(5)
    made = [TokenText(f"t{i}", tuple(torch.randint(3, VOCAB, (60,), generator=g).tolist())) for i in range(2)]
    monkeypatch.setattr(measured, "tokens", lambda texts, tokenize: made)
    monkeypatch.setattr(measured, "Bench", partial(Bench, prompt_tokens=40))
    monkeypatch.setattr(measured, "measure_speed", lambda *_: (Speed(0.0, 1e-9), Speed(0.0, 1e-9)))
    return [LoadedText(PinnedText(t.name, "prose", "acme", "1", "f", 0, 1, "a", "0"), "x", True) for t in made]


def write(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value))
    return path


def test_a_library_carries_the_files_that_its_profiles_read(
    tmp_path: Path, files: Calibrated, small: list[LoadedText]
) -> None:
    specs = measured.read_pipelines(write(tmp_path / "p.json", PIPELINES), files)
    seen: list[str] = []
    engine = make("llama", DType.BF16)
    made, rows = measured.measure_library(engine, specs, small, lambda name, *_: seen.append(name), files.artefacts)
    assert [p.name for p in made.profiles] == ["raw", "lossless", "plain", "mixed"]
    assert list(dict.fromkeys(seen)) == [p.name for p in made.profiles]
    digest = files.digest("heads")
    assert [p.artefacts for p in made.profiles] == [(), (), (), (digest,)]
    made.save(tmp_path / "m.kvlib")
    loaded = ProfileLibrary.load(tmp_path / "m.kvlib")
    assert json.loads(loaded.artefacts.read(digest)) == SCORES
    assert loaded.profile("mixed") == made.profile("mixed")
    table = {row["profile"]: row for row in measured.as_table(rows)}
    assert table["raw"]["kl"] == 0.0
    assert table["mixed"]["cr"] > table["plain"]["cr"] > 1.0
    assert engine.held == ()


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "p.json", PIPELINES)
    with pytest.raises(ArtefactError, match="no calibrated file 'heads'"):
        measured.read_pipelines(path)
    with pytest.raises(ConfigError, match="planes"):
        measured.read_pipelines(write(path, {"a": {"planes": {}}}))
    for data in (b"\xff\xfe{", b"[" * 100_000):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match="cannot be read"):
            measured.read_pipelines(path)
