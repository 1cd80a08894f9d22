from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from kvserve_core.plugins import Broken, Loaded, by_kind, disabled_names, load_plugins, malformed
from kvserve_core.registry import locate
from plugin_folders import BUILT_INS, FOLDER, Fakes, forget, points


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fakes]:
    locate.cache_clear()
    yield Fakes(monkeypatch)
    forget()
    locate.cache_clear()


def names(loaded: Loaded) -> list[str]:
    return [m.component.name for m in loaded.manifests]


def only(loaded: Loaded) -> Broken:
    (broken,) = loaded.broken
    return broken


def test_a_good_plugin_gives_manifests_with_their_provider(fakes: Fakes) -> None:
    loaded = fakes.load("good")
    assert names(loaded) == ["acme.rle", "acme.fpga", "acme.first"]
    assert [m.kind for m in loaded.manifests] == ["codec", "codec", "policy"]
    provider = loaded.manifests[0].provider
    assert (provider.plugin, provider.distribution, provider.version) == ("acme", "acme-good", "1.2")
    assert loaded.broken == []
    assert "acme_good.rle" not in sys.modules  # manifests only: no class was imported


def test_a_plugin_that_prints_and_warns_is_quiet_and_its_words_are_in_the_debug_log(
    fakes: Fakes, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "kvserve_core.plugins"):
        loaded = fakes.load("good")  # its warning would be an error in this test run
    assert loaded.broken == []
    assert capfd.readouterr() == ("", "")
    assert "acme was imported" in caplog.text
    assert "acme complains" in caplog.text


def test_a_failing_import_is_one_row_and_the_others_load(fakes: Fakes) -> None:
    loaded = fakes.load("import_error", "good")
    assert names(loaded) == ["acme.rle", "acme.fpga", "acme.first"]
    broken = only(loaded)
    assert (broken.kind, broken.name) == ("plugin", "lost")
    assert broken.reason == "ModuleNotFoundError: No module named 'acme_module_that_is_not_there'"
    assert broken.provider.distribution == "acme-import-error"


def test_a_plugin_that_exits_does_not_end_the_process(fakes: Fakes) -> None:
    assert only(fakes.load("exits")).reason == "SystemExit: usage: acme"


def test_what_was_declared_before_a_hook_raised_is_kept_and_so_are_other_hooks(fakes: Fakes) -> None:
    loaded = fakes.load("raising")
    assert sorted(names(loaded)) == ["raising.before", "raising.policy"]
    broken = only(loaded)
    assert (broken.kind, broken.name) == ("codec", "raising")
    assert broken.reason == "kvserve_codecs raised RuntimeError: no licence found"  # one line


def test_a_misspelt_hook_gives_the_nearest_name_and_an_optional_one_is_let_pass(fakes: Fakes) -> None:
    loaded = fakes.load("misspelt")
    assert names(loaded) == ["misspelt.right"]
    broken = only(loaded)
    assert broken.kind == "plugin"
    assert broken.reason.startswith("unknown hook 'kvserve_codec'; did you mean 'kvserve_codecs'? allowed: ")


def test_a_forgotten_marker_and_an_empty_plugin_say_so(fakes: Fakes) -> None:
    reasons = {b.name: b.reason for b in fakes.load("no_hook").broken}
    assert reasons["unmarked"] == "kvserve_codecs is not marked; put @kvserve_core.hookimpl before it"
    assert reasons["empty"].startswith("no hook is implemented; known hooks: kvserve_transforms, ")


def test_a_hook_with_arguments_and_a_wrapper_are_refused(fakes: Fakes) -> None:
    loaded = fakes.load("signature")
    assert loaded.manifests == []
    reasons = {b.name: b.reason for b in loaded.broken}
    assert "PluginValidationError" in reasons["arguments"]
    assert "registry" in reasons["arguments"]
    assert reasons["wrapper"].startswith("kvserve_codecs raised TypeError: it is a hook wrapper")


def test_values_that_are_no_manifest_are_rows_and_those_around_them_stay(fakes: Fakes) -> None:
    loaded = fakes.load("not_a_component")
    assert names(loaded) == ["odd.first", "odd.last"]
    reasons = [b.reason.removeprefix("kvserve_quantizers: ") for b in loaded.broken]
    assert reasons == [
        "hooks yield Component(...) manifests, got 'dict'",
        "hooks yield Component(...) manifests, got 'str'",
        "name 'Odd Name' is not lower case letters, digits, '_' and '-', dotted for third parties",
        "target 'acme_not_a_component.parts.Target' is not written as 'package.module:Class'",
        "requires is text; write requires=('zstandard',)",
        "api '1' is not a number",
    ]
    assert [b.name for b in loaded.broken][2:] == ["Odd Name", "odd.target", "odd.requires", "odd.api"]


@pytest.mark.parametrize("body", ["Component('odd.one', 'm:C')", "None"])
def test_a_hook_that_yields_nothing_iterable_says_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fakes: Fakes, body: str
) -> None:
    text = "from kvserve_core import Component, hookimpl\n\n@hookimpl\ndef kvserve_codecs():\n    return "
    (tmp_path / "acme_returns.py").write_text(text + body, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    broken = only(load_plugins([EntryPoint("returns", "acme_returns", "kvserve")], {}))
    assert "yield Component(...), or return a list of them" in broken.reason


@pytest.mark.parametrize("disabled", ["acme", " other, acme ,", "acme-good"])
def test_a_disabled_plugin_is_not_imported(fakes: Fakes, disabled: str) -> None:
    loaded = fakes.load("good", "old_api", disabled=disabled)
    assert "acme_good" not in sys.modules
    assert "acme_old_api" in sys.modules
    assert only(loaded).reason == "disabled by KVSERVE_DISABLED_PLUGINS"


def test_an_empty_environment_is_not_the_process_environment(monkeypatch: pytest.MonkeyPatch, fakes: Fakes) -> None:
    monkeypatch.setenv("KVSERVE_DISABLED_PLUGINS", "acme")
    assert disabled_names() == {"acme"}
    assert disabled_names({}) == frozenset()
    monkeypatch.syspath_prepend(str(FOLDER / "good"))
    assert load_plugins(points("good"), {}).broken == []
    assert only(load_plugins(points("good"))).name == "acme"


def test_loading_is_idempotent_and_a_point_that_is_found_twice_counts_once(fakes: Fakes) -> None:
    once = fakes.load("good", built_ins=True)
    again = load_plugins([*points("good"), *points("good"), *BUILT_INS, *BUILT_INS], {})
    assert names(once) == names(again)
    assert again.broken == []


def test_built_ins_come_first_whatever_the_entry_points_are_called(fakes: Fakes) -> None:
    loaded = fakes.load("duplicate", built_ins=True)  # its entry point sorts before all built-in ones
    first = [m.provider.built_in for m in loaded.manifests]
    assert first == sorted(first, reverse=True)
    static = [m for m in by_kind(loaded) if m.component.name == "static"]
    assert [m.provider.built_in for m in static] == [True, False]


def test_a_well_formed_manifest_has_no_complaint(fakes: Fakes) -> None:
    assert [
        malformed(m.component) for m in fakes.load("good", built_ins=True).manifests if malformed(m.component)
    ] == []
