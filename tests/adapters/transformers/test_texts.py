"""Pinned texts and prompts."""

from __future__ import annotations

import gzip
import importlib.metadata
import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from kvserve_hf.texts import (
    Kind,
    PinnedText,
    PinnedTextError,
    as_json,
    calibration_texts,
    demo_prompts,
    domain_texts,
    load_text,
    load_texts,
    pin,
    pinned_texts,
    tokens,
)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package 'acme-texts' with one file."""
    info = tmp_path / "acme_texts-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-texts\nVersion: 1.0\n\n" + "readme words " * 900)
    (tmp_path / "acme.py").write_text("".join(f"line_{i} = {i}\n" for i in range(900)))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "acme.py"


def made() -> PinnedText:
    return pin("t", "code", "acme-texts", "acme.py", 300)


def test_a_pinned_text_is_loaded(package: Path) -> None:
    loaded = load_text(made())
    assert loaded.pinned
    assert loaded.text == package.read_text()[300:6300]
    readme = pin("r", "prose", "acme-texts", "METADATA", 70)
    assert (readme.version, load_text(readme).pinned) == ("1.0", True)


def test_a_text_that_moved_is_found_again(package: Path) -> None:
    p = made()
    package.write_text("# a new first line\n" + package.read_text())
    assert load_text(p).pinned


def test_a_text_that_changed_is_refused_unless_allowed(package: Path) -> None:
    p = made()
    package.write_text(package.read_text().replace("line_90 ", "row_90 "))
    with pytest.raises(PinnedTextError, match=r"pip install 'acme-texts==1.0', or pass --allow-unpinned"):
        load_text(p)
    loaded = load_text(p, allow_unpinned=True)
    assert not loaded.pinned
    assert len(loaded.text) == p.length
    package.write_text("short")
    with pytest.raises(PinnedTextError, match="is not in the installed"):
        load_text(p, allow_unpinned=True)


def test_all_problems_are_named_at_once(package: Path) -> None:
    p = made()
    gone = replace(p, name="a", package="kvserve-no-such-package")
    moved = replace(p, name="b", file="no_such_file.py")
    with pytest.raises(PinnedTextError, match=r"kvserve-no-such-package.*no_such_file"):
        load_texts([p, gone, moved], allow_unpinned=True)


def test_texts_become_equally_many_tokens(package: Path) -> None:
    texts = [load_text(made())]
    assert [len(t.ids) for t in tokens(texts, lambda s: s.encode(), 960)] == [960]
    with pytest.raises(PinnedTextError, match="has 6000 tokens, 9000 are needed"):
        tokens(texts, lambda s: s.encode(), 9000)


def test_the_shipped_list_is_prose_and_code_from_disjoint_sources() -> None:
    pins = pinned_texts()
    assert [sum(p.kind == kind for p in pins) for kind in ("prose", "code")] == [8, 8]
    assert len({p.package for p in pins}) == len(pins)
    assert (
        as_json(pins)
        == (Path(importlib.import_module("kvserve_hf.texts").__file__).parent / "pinned_texts.json").read_text()
    )


def test_calibration_and_test_texts_share_no_package() -> None:
    calibration = {p.package.lower() for p in calibration_texts()}
    domains = [p for kind in get_args(Kind) for p in domain_texts(kind)]
    assert calibration.isdisjoint(p.package.lower() for p in domains)
    assert {p.kind for p in domains} == set(get_args(Kind))


def test_an_unknown_domain_gives_the_nearest() -> None:
    with pytest.raises(PinnedTextError, match="did you mean 'manual'"):
        domain_texts("manuals")


def test_humaneval_is_read_as_code(package: Path) -> None:
    rows = [{"prompt": f"def f{i}():\n", "canonical_solution": f"    return {i}\n"} for i in range(300)]
    data = "\n".join(map(json.dumps, rows)).encode()
    (package.parent / "problems.jsonl.gz").write_bytes(gzip.compress(data))
    loaded = load_text(pin("h", "humaneval", "acme-texts", "problems.jsonl.gz", 0, 60))
    assert loaded.text.startswith("def f0():\n    return 0\n\n\ndef f1():\n")


def test_a_licence_is_found_beside_the_metadata(package: Path) -> None:
    folder = package.parent / "acme_texts-1.0.dist-info" / "licenses"
    folder.mkdir()
    (folder / "LICENSE").write_text("Permission is granted. " * 300)
    made = pin("l", "licence", "acme-texts", "licenses/LICENSE", 23, 500)
    assert (load_text(made).text[:10], len(load_text(made).text)) == ("Permission", 500)


def test_the_shipped_list_matches_where_its_versions_are_installed() -> None:
    checked = 0
    for p in pinned_texts():
        try:
            installed = importlib.metadata.version(p.package)
        except importlib.metadata.PackageNotFoundError:
            continue
        if installed == p.version:
            assert load_text(p).pinned
            checked += 1
    if not checked:
        pytest.skip("none of the pinned versions is installed here")


def test_the_demo_has_a_document_code_and_a_question() -> None:
    prompts = demo_prompts()
    assert [p.name for p in prompts] == ["document", "code", "question"]
    document, code, question = (len(p.text) for p in prompts)
    assert document > 5000 > code > 1200 > question
