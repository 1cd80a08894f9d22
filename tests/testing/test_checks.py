"""The kit finds what is wrong with a component, and nothing wrong with one that is right."""

from __future__ import annotations

import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest
import torch

import kvserve_core.testing as kit
from kvserve_core.artefacts import Artefacts
from kvserve_core.errors import ConfigError, UnknownNameError
from kvserve_core.library_files import write_bytes
from kvserve_core.registry import Registry
from kvserve_core.testing import Skipped, Subject, checks_for, checks_golden, result
from kvserve_core.testing.catalogue import CHECKS
from kvserve_core.testing.checks_golden import write
from testing.bad_stages import BAD, GOOD, GoodCodec, GoodQuantizer, GoodTransform, kind_of, name_of, registry


@lru_cache(maxsize=1)
def components() -> Registry:
    return registry()


def subject(cls: type, **more: object) -> Subject:
    return Subject.of(kind_of(cls), name_of(cls), None, components(), **more)


@pytest.mark.parametrize("cls", GOOD, ids=lambda c: c.__name__)
def test_a_good_component_passes(cls: type) -> None:
    on = subject(cls)
    results = [result(each, on) for each in checks_for(on)]
    assert {r.status for r in results} == {"ok"}, [r for r in results if r.status != "ok"]
    assert all(r.detail for r in results)


@pytest.mark.parametrize(("cls", "name"), BAD, ids=lambda v: v if isinstance(v, str) else v.__name__)
def test_a_broken_promise_is_found(cls: type, name: str) -> None:
    on = subject(cls)
    (found,) = [result(each, on) for each in checks_for(on) if each.name == name]
    assert found.status == "failed", found
    assert found.detail


def test_a_default_error_is_no_larger_than_the_values(recwarn: pytest.WarningsRecorder) -> None:
    on = subject(GoodTransform, max_error=lambda x, _: -1 + 0 * x)
    (found,) = [result(each, on) for each in checks_for(on) if each.name == "kinds_of_values"]
    assert "above max_error" in found.detail
    assert not recwarn


def test_checks_are_chosen_by_kind_and_capabilities() -> None:
    names = {cls: {c.name for c in checks_for(subject(cls))} for cls in GOOD}
    assert "head_slices" in names[GoodTransform]
    assert "corruption" in names[GoodCodec]
    assert not {"head_slices", "golden_frames", "every_bit_pattern"} & names[GoodCodec]
    assert all(each.about.endswith(".") for each in CHECKS)
    assert len({(each.name, each.kinds) for each in CHECKS}) == len(CHECKS)


def test_golden_frames_are_written_once_and_asked_for(tmp_path: Path) -> None:
    on = subject(GoodTransform, golden=tmp_path / "new")
    (check,) = [each for each in checks_for(on) if each.name == "golden_frames"]
    missing = result(check, on)
    assert "kvserve check bad.goodtransform --kind transform --golden" in missing.detail
    path = write(on)
    assert path is not None
    before = path.read_bytes()
    assert result(check, on).status == "ok"
    assert write(on) is None
    assert path.read_bytes() == before


def test_a_golden_frame_that_decodes_to_something_else_is_found(tmp_path: Path) -> None:
    on = subject(GoodTransform, golden=tmp_path)
    path = write(on)
    assert path is not None
    (check,) = [each for each in checks_for(on) if each.name == "golden_frames"]
    values = path.with_suffix(".bin")
    values.write_bytes(values.read_bytes()[:-2] + b"\x00\x44")
    assert "decodes to other values" in result(check, on).detail
    values.write_bytes(values.read_bytes()[:-2])
    assert "another number of bytes" in result(check, on).detail
    other = tmp_path / "transform-bad.goodtransform@1-more.kv"
    other.write_bytes(b"not a frame")
    assert "FrameError" in result(check, on).detail or "another number" in result(check, on).detail


def test_a_golden_frame_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on = subject(GoodTransform, golden=tmp_path)

    def full(path: Path, data: bytes) -> None:
        if path.suffix == ".kv":
            raise OSError(28, "No space left on device")
        write_bytes(path, data)

    with monkeypatch.context() as patched:
        patched.setattr(checks_golden, "write_bytes", full)
        with pytest.raises(ConfigError, match="No space left"):
            write(on)
    assert not list(tmp_path.glob("*.kv"))
    assert write(on) is not None
    (check,) = [each for each in checks_for(on) if each.name == "golden_frames"]
    assert result(check, on).status == "ok"
    assert {p.suffix for p in tmp_path.iterdir()} == {".kv", ".bin"}


def test_golden_frames_are_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="is a file; name its folder"):
        write(subject(GoodTransform, golden=tmp_path / "file"))


def test_an_interrupt_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(GoodTransform, "encode", stopped)
    on = subject(GoodTransform)
    (check,) = [each for each in checks_for(on) if each.name == "kinds_of_values"]
    with pytest.raises(KeyboardInterrupt):
        result(check, on)


def test_a_quantizer_keeps_its_promise_in_a_frame() -> None:
    on = subject(GoodQuantizer, max_error=lambda x, _: 0 * x)
    (found,) = [result(each, on) for each in checks_for(on) if each.name == "decodes_in_a_frame"]
    assert "above max_error" in found.detail


def test_an_older_version_without_its_frame_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GoodTransform, "format_version", 2)
    monkeypatch.setattr(GoodTransform, "reads", frozenset({1, 2}))
    on = subject(GoodTransform, golden=tmp_path)
    write(on)
    (check,) = [each for each in checks_for(on) if each.name == "golden_frames"]
    assert "take it from the release that wrote version 1" in result(check, on).detail


def test_a_frame_that_was_sent_raw_shows_nothing(tmp_path: Path) -> None:
    on = subject(GoodCodec, golden=tmp_path)
    raw = Subject.of("quantizer", "identity", None, components(), golden=tmp_path)
    path = write(raw)
    assert path is not None
    path.rename(tmp_path / "codec-bad.goodcodec@1.kv")
    (check,) = [each for each in checks_for(on) if each.name == "golden_frames"]
    assert "holds no 'codec:bad.goodcodec@1'" in result(check, on).detail


def test_what_reads_files_is_skipped_without_them_and_what_needs_a_gpu_on_a_cpu() -> None:
    spec = {"scores_artefact": "0" * 64}
    on = Subject.of("quantizer", "mixhq", spec, components())
    assert all(result(each, on).status == "skipped" for each in checks_for(on))
    with_files = Subject.of("quantizer", "mixhq", spec, components(), artefacts=Artefacts({"0" * 64: b""}))
    assert with_files.obstacle() is None
    elsewhere = subject(GoodCodec, device=torch.device("meta"))
    with pytest.raises(Skipped, match="encodes on cpu only"):
        checks_for(elsewhere)[0](elsewhere)


def test_required_fields_take_what_the_profiler_would_try() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'hadamard'"):
        Subject.of("transform", "hadamart", None, components())
    on = Subject.of("transform", "hadamard", None, components())
    assert on.configuration == {}


def test_the_kit_imports_neither_pytest_nor_torch_before_it_is_used() -> None:
    probe = "import sys, kvserve_core.testing as t; assert not {'torch', 'pytest'} & set(sys.modules); t.Subject"
    probe += "; t.checks_for; t.result; assert 'pytest' not in sys.modules; assert 'hypothesis' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_plugin_is_light() -> None:
    probe = "import sys, kvserve_core.testing.plugin; assert not {'torch', 'pydantic', 'numpy'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_public_names() -> None:
    assert dir(kit) == kit.__all__
    assert all(getattr(kit, name) for name in kit.__all__)
    with pytest.raises(AttributeError, match="no attribute 'TransformTest'"):
        kit.__getattr__("TransformTest")
