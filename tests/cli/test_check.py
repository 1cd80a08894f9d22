from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvserve_core.cli import check as module
from kvserve_core.library import ProfileLibrary
from testing.bad_stages import CannotBeCreated, CannotSayWhatItCanDo, EndsAGenerator, Exits, name_of, registry

LIBRARY = Path(module.__file__).parents[2] / "adapters/transformers/kvserve_hf/smollm2-135m.kvlib"
Run = Callable[..., Any]
Install = Callable[..., None]


def test_a_line_for_each_check(kvserve: Run) -> None:
    done = kvserve("check", "raw")
    assert done.code == 0
    assert "codec raw" in done.out
    assert "round_trip" in done.out
    assert done.out.rstrip().endswith("0 skipped, 0 failed")


def test_as_json(kvserve: Run) -> None:
    done = kvserve("check", "identity", "--kind", "quantizer", "--only", "summary", "--json")
    assert done.code == 0
    assert done.json == {
        "kind": "quantizer",
        "name": "identity",
        "configuration": {},
        "checks": [
            {
                "check": "summary",
                "status": "ok",
                "detail": "The manifest's summary is the first docstring line of the class, one short sentence.",
            }
        ],
    }


def test_what_fails_says_why_and_exits_with_1(kvserve: Run, install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("good")
    done = kvserve("check", "acme.rle", "--config", '{"label": "x"}', "--json")
    assert done.code == 1
    failed = {c["check"]: c["detail"] for c in done.json["checks"] if c["status"] == "failed"}
    assert "RuntimeError" in failed["corruption"]
    assert "raise FrameError" in failed["corruption"]


def test_a_configuration_that_is_not_one(kvserve: Run) -> None:
    for text, said in (
        ("{", "is not JSON"),
        ("[1]", "expected a JSON object"),
        ('{"lewel": 1}', "did you mean 'level'"),
    ):
        done = kvserve("check", "zstd", "--config", text)
        assert done.code == 2
        assert said in done.err


def test_a_required_field_is_asked_for(kvserve: Run) -> None:
    done = kvserve("check", "static")
    assert done.code == 2
    assert "profile" in done.err
    assert "pass --config JSON" in done.err
    assert kvserve("check", "static", "--config", '{"profile": "raw"}').code == 0


def test_names_that_do_not_exist(kvserve: Run) -> None:
    assert "did you mean 'zstd'" in kvserve("check", "zst").err
    assert "add '--kind transform' or '--kind quantizer'" in kvserve("check", "identity").err
    done = kvserve("check", "zstd", "--only", "nothing")
    assert done.code == 2
    assert "no check of a codec is called 'nothing'" in done.err


def test_golden_frames(kvserve: Run, tmp_path: Path) -> None:
    arguments = ("check", "hadamard", "--only", "golden_frames", "--golden", str(tmp_path))
    assert kvserve(*arguments).code == 1
    written = kvserve(*arguments, "--write-golden")
    assert written.code == 0
    assert "transform-hadamard@1.kv" in written.out
    assert "never rewritten" in kvserve(*arguments, "--write-golden").out
    assert kvserve(*arguments, "--json").json["checks"][0]["status"] == "ok"


def test_devices_and_folders_that_are_none(kvserve: Run, tmp_path: Path) -> None:
    done = kvserve("check", "raw", "--device", "banana")
    assert done.code == 2
    assert done.err.startswith("error: --device: no device 'banana'")
    (tmp_path / "file").write_text("x")
    done = kvserve("check", "raw", "--golden", str(tmp_path / "file"), "--write-golden")
    assert done.code == 2
    assert "is a file; name the folder" in done.err
    assert kvserve("check", "raw", "--write-golden").code == 2


def test_a_configuration_that_is_nested_too_deep(kvserve: Run) -> None:
    done = kvserve("check", "raw", "--config", "[" * 100_000)
    assert done.code == 2
    assert "nested too deep" in done.err


def test_nothing_checked_is_no_success(kvserve: Run) -> None:
    config = f'{{"basis": "{"0" * 64}"}}'
    done = kvserve("check", "klt", "--config", config)
    assert done.code == 1
    assert "nothing was checked: it reads calibrated files" in done.err
    assert kvserve("check", "klt", "--config", config, "--json").code == 1


@pytest.mark.parametrize(
    ("cls", "said"),
    [
        (CannotBeCreated, "unexpected ValueError: no"),
        (CannotSayWhatItCanDo, "unexpected ValueError: no"),
        (Exits, "unexpected SystemExit: 0"),
        (EndsAGenerator, "unexpected GeneratorExit"),
    ],
)
@pytest.mark.parametrize("write", [False, True])
def test_whatever_it_raises_is_a_failure(
    kvserve: Run, cls: type, said: str, write: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    components = registry()
    monkeypatch.setattr(module, "default_registry", lambda: components)
    more = ("--golden", str(tmp_path), "--write-golden") if write else ()
    done = kvserve("check", name_of(cls), "--json", *more)
    assert done.code == 1
    assert said in {c["detail"].rstrip(": ") if "Generator" in said else c["detail"] for c in done.json["checks"]}


def test_files_that_are_for_another_model(kvserve: Run) -> None:
    basis = sorted(ProfileLibrary.load(LIBRARY).artefacts.hashes)[0]
    config = f'{{"basis": "{basis}"}}'
    done = kvserve("check", "klt", "--config", config, "--library", str(LIBRARY), "--json")
    assert done.code == 0
    said = {c["check"]: (c["status"], c["detail"]) for c in done.json["checks"]}
    assert said["configuration"][0] == "ok"
    assert said["kinds_of_values"][0] == "skipped"
    assert "are for another model than the kit's" in said["kinds_of_values"][1]


def test_files_of_a_library(kvserve: Run) -> None:
    assert kvserve("check", "raw", "--only", "summary", "--library", str(LIBRARY)).code == 0
    assert kvserve("check", "raw", "--library", "nothing.kvlib").code == 2
