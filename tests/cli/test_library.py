from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from blake3 import blake3

from kvserve_core.library import ProfileLibrary

DATA = Path(__file__).parents[1] / "data" / "kvserve"
LIBRARY, SCORES = DATA / "library_qwen7b_qasper_5090.json", DATA / "Qwen2.5-7B-Instruct_scores.csv"
Kvserve = Callable[..., object]


@pytest.fixture
def imported(kvserve: Kvserve, tmp_path: Path) -> Path:
    out = tmp_path / "q.kvlib"
    more = ("--scores", str(SCORES), "--codec", "zstd", "--fingerprint", "f" * 64)
    done = kvserve("library", "import-kvserve", str(LIBRARY), "--out", str(out), *more, "--json")
    assert (done.code, done.json["kind"], done.json["profiles"]) == (0, "library", 12)
    assert any("harmonic mean" in note for note in done.json["notes"])
    return out


def test_show_and_validate(kvserve: Kvserve, imported: Path) -> None:
    shown = kvserve("library", "show", str(imported), "--json").json
    assert (shown["model_id"], shown["checked"], len(shown["profiles"])) == ("Qwen2.5-7B-Instruct", False, 12)
    checked = kvserve("library", "validate", str(imported))
    assert checked.code == 0
    assert "qwen25-7b_qasper_5090_c0" in checked.out


def test_validate_finds_a_wrong_field(kvserve: Kvserve, imported: Path, tmp_path: Path) -> None:
    library = ProfileLibrary.load(imported)
    library.save(tmp_path / "folder")
    text = (tmp_path / "folder" / "library.json").read_text()
    (tmp_path / "folder" / "library.json").write_text(text.replace('"levels": 12', '"levels": 0'))
    done = kvserve("library", "validate", str(tmp_path / "folder"))
    assert done.code == 2
    assert "levels" in done.err
    assert kvserve("library", "show", str(tmp_path / "folder")).code == 0


def test_import_of_configurations(kvserve: Kvserve, tmp_path: Path) -> None:
    configs = json.loads((DATA / "reference_configs.json").read_text())
    (tmp_path / "one.json").write_text(json.dumps(configs["default"]))
    (tmp_path / "two.json").write_text(json.dumps({n: configs[n] for n in ("default", "original_top_nvcomp")}))
    for name, keys in (("one", {"one"}), ("two", {"default", "original_top_nvcomp"})):
        out = tmp_path / "out.json"
        given = ("--out", str(out), "--scores", str(SCORES))
        done = kvserve("library", "import-kvserve", str(tmp_path / f"{name}.json"), *given)
        assert done.code == 0
        assert "note: codes stop at levels - 1" in done.out
        assert json.loads(out.read_text()).keys() == keys


def test_many_scores_become_a_file_of_their_own(kvserve: Kvserve, tmp_path: Path) -> None:
    configs = json.loads((DATA / "reference_configs.json").read_text())
    (tmp_path / "one.json").write_text(json.dumps(configs["default"]))
    (tmp_path / "s.csv").write_text("0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8\n" * 32)
    given = ("--out", str(tmp_path / "out.json"), "--scores", str(tmp_path / "s.csv"))
    assert "too many for the header" in kvserve("library", "import-kvserve", str(tmp_path / "one.json"), *given).out
    digest = blake3((tmp_path / "out.scores.json").read_bytes()).hexdigest()
    assert f'"scores_artefact": "{digest}"' in (tmp_path / "out.json").read_text()


def test_import_of_scores(kvserve: Kvserve, tmp_path: Path) -> None:
    out = tmp_path / "scores.json"
    done = kvserve("library", "import-kvserve", str(SCORES), "--out", str(out), "--json")
    assert (done.json["kind"], done.json["layers"], done.json["heads"]) == ("scores", 28, 4)
    assert len(json.loads(out.read_text())["scores"]) == 28


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("shwo", "x"), "did you mean 'show'"),
        (("show", "missing.kvlib"), "missing.kvlib"),
        (("import-kvserve", str(LIBRARY)), "needs --out"),
        (("import-kvserve", str(LIBRARY), "--out", "x.kvlib"), "--scores"),
        (("import-kvserve", str(LIBRARY), "--out", "x.kvlib", "--codec", "zst"), "--codec: unknown codec 'zst'"),
        (("import-kvserve", "missing.json", "--out", "x"), "missing.json: cannot be read"),
        (("import-kvserve", str(DATA / "README.md"), "--out", "x"), "not JSON"),
    ],
)
def test_errors_are_one_line(
    kvserve: Kvserve, arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = kvserve("library", *arguments)
    assert done.code == 2
    assert done.err.startswith("error: ")
    assert message in done.err


def test_without_a_fingerprint_it_says_what_follows(kvserve: Kvserve, tmp_path: Path) -> None:
    given = ("--out", str(tmp_path / "q.kvlib"), "--scores", str(SCORES), "--codec", "zstd")
    assert "note: no --fingerprint" in kvserve("library", "import-kvserve", str(LIBRARY), *given).out
