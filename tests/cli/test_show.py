from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvserve_core.component import ComponentSpec, Kind
from kvserve_core.errors import ConfigError
from kvserve_core.registry import default_registry

Run = Callable[..., Any]
Install = Callable[..., None]


def test_all_that_a_class_says_of_itself(kvserve: Run, install: Install) -> None:
    install("good")
    about = kvserve("show", "acme.rle", "--json").json
    assert about["status"] == "ok"
    assert (about["kind"], about["provider"], about["version"]) == ("codec", "acme-good", "1.2")
    assert about["docstring"].startswith("Run-length codes.\n\nRuns of up to")
    assert Path(about["file"]).is_file()
    assert about["capabilities"]["exact"] is True
    assert about["capabilities"]["dtypes"] == ["bfloat16", "float16", "float32"]
    assert (about["format_version"], about["reads"]) == (1, [1])
    fields = {field["name"]: field for field in about["config"]}
    assert fields["longest"] == {
        "name": "longest",
        "type": "int",
        "required": False,
        "default": 255,
        "allowed": ">= 2, <= 255",
        "tunable": {"choices": [], "low": 2, "high": 255, "log": True, "when": []},
        "description": "longest run",
    }
    assert fields["order"]["allowed"] == '"row" | "column"'
    assert fields["table"]["type"] == "str | None"
    assert fields["label"]["required"]
    assert about["example"]["configuration"] == {"longest": 255, "order": "row", "table": None, "label": "<str>"}


def test_text_shows_the_same(kvserve: Run, install: Install) -> None:
    install("good")
    out = kvserve("show", "acme.rle").out
    for text in ("codec acme.rle: ok", "Runs of up to", "2 .. 255 (log)", "required", "head_local", "as a spec: {"):
        assert text in out
    assert 'as a spec: "acme.first"' in kvserve("show", "acme.first").out


def test_types_are_shown_without_their_validators(kvserve: Run, install: Install) -> None:
    install()
    fields = {field["name"]: field["type"] for field in kvserve("show", "tcp", "--json").json["config"]}
    assert fields["max_bandwidth"] == "float | None"
    assert fields["key_dir"] == "Path | None"
    assert fields["bind"] == "str"
    fields = {field["name"]: field["type"] for field in kvserve("show", "mixhq", "--json").json["config"]}
    assert fields["scores"] == "tuple[tuple[float, ...], ...] | None"


def test_an_ambiguous_name_asks_for_the_kind(kvserve: Run, install: Install) -> None:
    install()
    done = kvserve("show", "identity")
    assert done.code == 2
    assert "'identity' is the name of a transform and a quantizer; add '--kind transform' or" in done.err
    assert kvserve("show", "identity", "--kind", "quantizer", "--json").json["kind"] == "quantizer"


def test_an_unknown_name_gives_the_nearest_of_all_kinds(kvserve: Run, install: Install) -> None:
    install()
    assert "unknown component 'statc'; did you mean 'static'?" in kvserve("show", "statc").err
    assert "unknown policy 'statc'; did you mean 'static'?" in kvserve("show", "statc", "--kind", "policy").err


def test_an_unavailable_component_is_shown_as_its_manifest(kvserve: Run, install: Install) -> None:
    install("good")
    about = kvserve("show", "acme.fpga", "--json").json
    assert about["status"] == "unavailable"
    assert "pip install 'acme-good[fpga]'" in about["reason"]
    assert about["requires"] == ["acme_missing_driver.codecs"]
    assert "config" not in about
    assert "Codes on an FPGA." in kvserve("show", "acme.fpga").out


def test_a_component_that_cannot_be_imported_is_broken(kvserve: Run, install: Install) -> None:
    install("unfit")
    about = kvserve("show", "unfit.crash", "--json").json
    assert (about["status"], about["reason"].endswith("driver too old")) == ("broken", True)


def test_a_refused_manifest_says_why(kvserve: Run, install: Install) -> None:
    install("old_api")
    assert "codec 'old.codec' is broken: written for plugin api 0" in kvserve("show", "old.codec").err


@pytest.mark.parametrize(("kind", "name"), list(default_registry().manifests))
def test_the_example_of_every_built_in_is_its_defaults(kvserve: Run, kind: Kind, name: str) -> None:
    registry = default_registry()
    about = kvserve("show", name, "--kind", kind, "--json").json
    assert about["status"] in ("ok", "unavailable")
    spec = ComponentSpec.model_validate(about["example"])
    assert spec.configuration.keys() == {field["name"] for field in about.get("config", ())}
    try:
        _, defaults = registry.configure(kind, name)
    except ConfigError:  # it cannot be used here, or cannot be used without a choice
        return
    assert registry.configure(kind, spec)[1] == defaults
