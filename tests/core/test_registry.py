from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from kvserve_core import registry as registry_module
from kvserve_core.component import KINDS, Component, ComponentSpec
from kvserve_core.errors import ConfigError, UnavailableComponentError, UnknownNameError
from kvserve_core.plugins import load_plugins
from kvserve_core.registry import Registry, Row, default_registry, locate, source_of, summary_of, unavailable
from plugin_folders import Fakes, forget


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fakes]:
    locate.cache_clear()
    yield Fakes(monkeypatch)
    forget()
    locate.cache_clear()


def rows(registry: Registry, *, strict: bool = False) -> dict[str, Row]:
    return {row.name: row for row in registry.rows(strict=strict)}


def good(fakes: Fakes) -> Registry:
    return Registry(fakes.load("good", built_ins=True))


def test_a_row_says_who_provides_a_component_and_where_it_is(fakes: Fakes) -> None:
    found = rows(good(fakes))
    assert found["acme.rle"] == Row(
        "codec", "acme.rle", "ok", "", "acme-good", "1.2", "acme_good/rle.py", "Run-length codes."
    )
    assert found["acme.first"].source == "acme_good/policies/__init__.py"
    assert found["static"].source == "kvserve_plugins/policies/static.py"
    assert Path(found["static"].source).is_file()


def test_every_built_in_opens_where_its_row_says_and_its_summary_is_its_first_docstring_line() -> None:
    registry = default_registry()
    built_in = [m for m in registry.manifests.values() if m.provider.built_in]
    assert len(built_in) >= 2
    for manifest in built_in:
        assert (Path(registry_module.__file__).parents[1] / source_of(manifest.component)).is_file()
        if unavailable(manifest.component) is None:
            assert summary_of(registry.load(manifest.kind, manifest.component.name)) == manifest.component.summary
            assert len(manifest.component.summary) <= 90


def test_a_missing_library_is_unavailable_with_what_to_install(fakes: Fakes) -> None:
    registry = good(fakes)
    row = rows(registry)["acme.fpga"]
    reason = "needs 'acme_missing_driver.codecs', which is not installed; pip install 'acme-good[fpga]'"
    assert (row.status, row.reason) == ("unavailable", reason)
    with pytest.raises(UnavailableComponentError, match=r"'acme\.fpga' cannot be used here: needs"):
        registry.load("codec", "acme.fpga")


def test_a_device_that_is_missing_or_unknown_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Component("acme.gpu", "acme.gpu:Gpu", needs=("cuda",))
    monkeypatch.setattr(registry_module, "_has_cuda", lambda: False)
    assert unavailable(gpu) == "needs an NVIDIA GPU; no libcuda was found"
    monkeypatch.setattr(registry_module, "_has_cuda", lambda: True)
    assert unavailable(gpu) is None
    unknown = unavailable(Component("acme.x", "acme.x:X", needs=("abacus",)))
    assert unknown == "needs 'abacus', which this kvserve cannot detect; it knows 'cuda'"


def test_looking_for_cuda_answers_and_loads_no_torch_device() -> None:
    registry_module._has_cuda.cache_clear()
    assert registry_module._has_cuda() in (True, False)


def test_an_incompatible_api_says_who_should_upgrade(fakes: Fakes) -> None:
    registry = Registry(fakes.load("old_api"))
    found = rows(registry)
    assert found["old.codec"].reason == "written for plugin api 0, this kvserve has 1; upgrade acme-old-api"
    assert found["new.codec"].reason == "written for plugin api 99, this kvserve has 1; upgrade kvserve"
    with pytest.raises(UnavailableComponentError, match=r"codec 'old\.codec' is broken: written for plugin api 0"):
        registry.create("codec", "old.codec")


def test_of_two_equal_names_the_built_in_stands_and_the_other_is_a_row(fakes: Fakes) -> None:
    registry = Registry(fakes.load("duplicate", built_ins=True))
    assert registry.manifest("policy", "static").provider.built_in
    broken = [row for row in registry.rows() if row.status == "broken"]
    assert [row.reason for row in broken] == [
        "policy 'dup.twice' is declared twice by 'acme-duplicate'; 'acme_duplicate.policies:First' is used",
        "policy 'static' of 'acme-duplicate' is already provided by 'kvserve_plugins.policies'; rename it",
    ]


def test_an_undotted_name_of_a_third_party_works_with_advice(fakes: Fakes) -> None:
    row = rows(Registry(fakes.load("duplicate")))["undotted"]
    assert row.status == "ok"
    assert row.reason.endswith("so that they never collide: 'aaa_first_by_name.undotted'")


def test_unfit_classes_are_ok_until_they_are_imported(fakes: Fakes) -> None:
    registry = Registry(fakes.load("unfit"))
    assert {row.status for row in registry.rows()} == {"ok", "unavailable"}
    assert "acme_unfit.policies" not in sys.modules
    found = rows(registry, strict=True)
    reasons = {name.removeprefix("unfit."): row.reason for name, row in found.items() if row.status == "broken"}
    wanted = {
        "nobase": "does not subclass 'kvserve_core.policy.Policy'",
        "noconfig": "has no nested class Config(ComponentConfig)",
        "abstract": "does not implement 'choose'",
        "a_function": "is not a class but 'function'",
        "absent": "has no attribute 'Absent'",
        "crash": "cannot be imported: driver too old",
        "nowhere": "No module named 'acme_unfit.nowhere'",
    }
    assert reasons.keys() == wanted.keys()
    for name, end in wanted.items():
        assert reasons[name].endswith(end), reasons[name]


@pytest.mark.parametrize("name", ["nobase", "noconfig", "abstract", "absent", "a_function", "crash", "nowhere"])
def test_creating_an_unfit_component_is_a_typed_error_with_the_path(fakes: Fakes, name: str) -> None:
    registry = Registry(fakes.load("unfit"))
    with pytest.raises(UnavailableComponentError, match=rf"^planes.k.codec: policy 'unfit.{name}' ") as caught:
        registry.create("policy", f"unfit.{name}", "planes.k.codec")
    assert caught.value.path == "planes.k.codec"


def test_an_unknown_name_gives_the_nearest_and_all_allowed(fakes: Fakes) -> None:
    with pytest.raises(
        UnknownNameError, match=r"unknown codec 'acme.rel'; did you mean 'acme.rle'\? allowed: .*acme.fpga"
    ):
        good(fakes).create("codec", "acme.rel")


def test_a_wrong_field_is_named_with_its_whole_path(fakes: Fakes) -> None:
    registry = good(fakes)
    spec = ComponentSpec(name="acme.rle", configuration={"label": "x", "longst": 3})
    with pytest.raises(ConfigError) as caught:
        registry.create("codec", spec, "profiles.fast.planes.k.codec")
    assert caught.value.path == "profiles.fast.planes.k.codec.configuration.longst"
    assert "unknown field of 'acme.rle' 'longst'; did you mean 'longest'? allowed: label, longest" in str(caught.value)


@pytest.mark.parametrize(
    ("configuration", "path", "message"),
    [
        ({"label": "x", "longest": 1}, "configuration.longest", "greater than or equal to 2, got 1"),
        (
            {"label": "x", "order": "diagonal"},
            "configuration.order",
            "Input should be 'row' or 'column', got 'diagonal'",
        ),
        ({}, "configuration.label", "Field required"),
    ],
)
def test_a_bad_value_is_named_with_what_was_expected(
    fakes: Fakes, configuration: dict[str, object], path: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        good(fakes).create("codec", ComponentSpec(name="acme.rle", configuration=configuration))
    assert caught.value.path == path
    assert caught.value.reason.endswith(message)


def test_create_gives_an_instance_with_its_validated_configuration(fakes: Fakes) -> None:
    registry = good(fakes)
    codec = registry.create("codec", ComponentSpec(name="acme.rle", configuration={"label": "x", "longest": 9}))
    assert (type(codec).__name__, codec.config.longest) == ("RunLength", 9)
    cls, config = registry.configure("policy", "acme.first")
    assert isinstance(config, cls.Config)


@pytest.mark.parametrize("spec", [3, None, ["zstd"], ""])
def test_what_is_no_spec_is_refused_with_how_to_write_one(fakes: Fakes, spec: object) -> None:
    with pytest.raises(ConfigError, match="a component is written as 'name' or"):
        good(fakes).create("codec", spec)  # type: ignore[arg-type]  # wrong on purpose


def test_a_misspelt_key_of_a_spec_is_named(fakes: Fakes) -> None:
    with pytest.raises(
        ConfigError, match=r"^x.confguration: unknown field of a component .* did you mean 'configuration'"
    ):
        good(fakes).create("codec", {"name": "zstd", "confguration": {}}, "x")  # type: ignore[arg-type]  # from JSON


def test_locate_imports_no_parent_package(fakes: Fakes) -> None:
    fakes.load("unfit")
    forget()
    assert locate("acme_unfit.policies") is not None
    assert locate("acme_unfit.nowhere") is None
    assert locate("acme_unfit.policies.deeper") is None
    assert locate("acme_module_that_is_not_there.sub") is None
    assert "acme_unfit" not in sys.modules


def test_locate_survives_a_module_without_a_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    locate.cache_clear()
    monkeypatch.setitem(sys.modules, "acme_specless", type(sys)("acme_specless"))
    assert locate("acme_specless") is None


def test_the_registry_is_read_only_and_names_are_sorted(fakes: Fakes) -> None:
    registry = good(fakes)
    with pytest.raises(TypeError):
        registry.manifests["codec", "x"] = None  # type: ignore[index]  # wrong on purpose
    assert registry.names("codec") == sorted(registry.names("codec"))
    assert registry.names("evaluator") == ["continuation", "copy_lookup", "lm_eval", "passkey"]


def test_rows_are_ordered_by_kind_then_built_ins_then_name(fakes: Fakes) -> None:
    listed = [(row.kind, row.name) for row in good(fakes).rows()]
    policies = [name for kind, name in listed if kind == "policy"]
    assert policies == [*sorted(policies[:-1]), "acme.first"]
    assert "static" in policies
    kinds = [kind for kind, _ in listed]
    assert kinds == sorted(kinds, key=list(KINDS).index)


def test_one_unreadable_plugin_leaves_the_built_ins_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "acme_syntax.py").write_text("def broken(:\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    loaded = load_plugins([EntryPoint("syntax", "acme_syntax", "kvserve")], {})
    assert loaded.broken[0].reason.startswith("SyntaxError: ")
