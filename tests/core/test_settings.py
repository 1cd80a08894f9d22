from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kvserve_core.component import ComponentSpec
from kvserve_core.errors import ConfigError
from kvserve_core.settings import Origin, Settings, cache_dir, load_settings


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "kv.toml"
    path.write_text(
        'library = "m.kvlib"\nmin_quality = 0.98\nslo = "1s"\npolicy = "static"\n'
        '[transport]\nname = "tcp"\n[transport.tcp]\nbind = "10.0.0.5"\nport = 7\n[peers]\naccept = "any"\n',
        encoding="utf-8",
    )
    return path


def error_of(extra: dict[str, Any] | None = None, environ: dict[str, str] | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_settings(extra, environ or {})
    return caught.value


def test_without_anything_all_values_are_defaults() -> None:
    loaded = load_settings(None, {})
    assert loaded.settings == Settings()
    assert {origin for _, _, origin in loaded.values()} == {Origin("default")}
    settings = loaded.settings
    assert (settings.min_quality, settings.slo, settings.bandwidth) == (0.99, 2.0, 1.25e9)
    assert (settings.lease, settings.deadline, settings.published_bytes_max) == (30.0, 30.0, 4 * 2**30)
    assert (settings.library, settings.peers.accept, settings.wire_compat) == (None, "portable", None)
    assert settings.transport.spec() == ComponentSpec(name="tcp")


def test_extra_config_beats_environment_beats_file_beats_default(toml: Path) -> None:
    environ = {"KVSERVE_CONFIG": str(toml), "KVSERVE_SLO": "2s", "KVSERVE_TRANSPORT__TCP__PORT": "8"}
    loaded = load_settings({"slo": "3s"}, environ)
    settings = loaded.settings
    assert settings.slo == 3.0
    assert settings.min_quality == 0.98
    assert settings.deadline == 30.0
    assert settings.transport.spec().configuration == {"bind": "10.0.0.5", "port": "8"}
    origins = {path: origin for path, _, origin in loaded.values()}
    assert origins["slo"] == Origin("extra_config")
    assert origins["transport.tcp.port"] == Origin("env", "KVSERVE_TRANSPORT__TCP__PORT")
    assert origins["transport.tcp.bind"] == origins["min_quality"] == Origin("file", str(toml))
    assert origins["deadline"] == Origin("default")
    assert origins["policy.name"] == Origin("file", str(toml))  # a bare name stands for its table


def test_a_library_in_a_file_is_relative_to_that_file(toml: Path) -> None:
    assert load_settings(None, {}, toml).settings.library == toml.parent / "m.kvlib"
    assert load_settings({"library": "m.kvlib"}, {}, toml).settings.library == Path("m.kvlib")


def test_a_named_file_beats_the_variable(toml: Path, tmp_path: Path) -> None:
    loaded = load_settings(None, {"KVSERVE_CONFIG": str(tmp_path / "absent.toml")}, toml)
    assert loaded.file == toml


def test_variables_take_json_and_lists_take_commas() -> None:
    environ = {
        "KVSERVE_ALLOW_UNPROFILED": "fast, small",
        "KVSERVE_POLICY": json.dumps({"name": "static", "configuration": {"profile": "raw"}}),
        "KVSERVE_TRANSPORT": json.dumps({"name": "acme.rdma", "acme.rdma": {"rails": 2}}),
        "KVSERVE_LIBRARY": "/models/m.kvlib",
        "KVSERVE_WIRE_COMPAT": "1.0",
        "KVSERVE_GPU__SMS": "16",
        "KVSERVE_GPU__BATCH_BYTES": "64MiB",
        "KVSERVE_CPU__DECODE_SHARE": "0.5",
    }
    settings = load_settings(None, environ).settings
    assert settings.allow_unprofiled == ("fast", "small")
    assert settings.policy == ComponentSpec(name="static", configuration={"profile": "raw"})
    assert settings.transport.spec() == ComponentSpec(name="acme.rdma", configuration={"rails": 2})
    assert settings.library == Path("/models/m.kvlib")
    assert settings.wire_compat == "1.0"
    assert (settings.gpu.sms, settings.gpu.batch_bytes) == (16, 64 * 2**20)
    assert (settings.cpu.decoders, settings.cpu.decode_share) == (0, 0.5)


def test_a_table_in_a_variable_comes_before_its_fields() -> None:
    environ = {"KVSERVE_TRANSPORT__TCP__PORT": "9", "KVSERVE_TRANSPORT": '{"tcp": {"port": 1, "bind": "::1"}}'}
    assert load_settings(None, environ).settings.transport.spec().configuration == {"port": "9", "bind": "::1"}


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({"bandwidth": 20}, "bandwidth"),
        ({"priors": {"rack": 2.5}}, "priors.rack"),
        ({"transport": {"tcp": {"max_bandwidth": 20}}}, "transport.tcp.max_bandwidth"),
    ],
)
def test_a_bandwidth_without_a_unit_is_refused_with_what_to_write(given: dict[str, Any], path: str) -> None:
    with pytest.raises(
        ConfigError, match=r"has no unit; write for example '(20|2\.5)Gbps' or '(20|2\.5)B/s'"
    ) as caught:
        load_settings(given, environ={})
    assert caught.value.path == path


def test_a_variable_without_a_unit_is_refused_and_sizes_are_bytes() -> None:
    assert load_settings(environ={"KVSERVE_PUBLISHED_BYTES_MAX": "4096"}).settings.published_bytes_max == 4096
    for name in ("KVSERVE_BANDWIDTH", "KVSERVE_SLO"):
        with pytest.raises(ConfigError, match=r"'200' has no unit; write for example .* \(from env KVSERVE_"):
            load_settings(environ={name: "200"})


@pytest.mark.parametrize("policy", ["analytic", {"name": "analytic"}])
def test_another_policy_does_not_inherit_the_configuration_of_the_one_before(policy: object) -> None:
    environ = {"KVSERVE_POLICY": '{"name": "static", "configuration": {"profile": "raw"}}'}
    assert load_settings({"policy": policy}, environ).settings.policy == ComponentSpec(name="analytic")


def test_the_same_policy_keeps_what_is_not_given_again() -> None:
    environ = {"KVSERVE_POLICY": "static", "KVSERVE_POLICY__CONFIGURATION__PROFILE": "raw"}
    settings = load_settings({"policy": {"configuration": {"fallback": "lossless"}}}, environ).settings
    assert settings.policy == ComponentSpec(name="static", configuration={"profile": "raw", "fallback": "lossless"})


def test_the_given_extra_config_is_not_changed() -> None:
    extra: dict[str, Any] = {"transport": {"tcp": {"port": 1}}}
    load_settings(extra, {"KVSERVE_TRANSPORT__TCP__BIND": "::1"})
    assert extra == {"transport": {"tcp": {"port": 1}}}


@pytest.mark.parametrize(
    ("extra", "path", "start"),
    [
        ({"min_qualty": 1}, "min_qualty", "unknown setting 'min_qualty'; did you mean 'min_quality'? allowed: "),
        ({"peers": {"accpt": "any"}}, "peers.accpt", "unknown setting 'accpt'; did you mean 'accept'? allowed: accept"),
        ({"peers": {"accept": "al"}}, "peers.accept", "Input should be 'portable' or 'any', got 'al'"),
        ({"gpu": {"sms": -1}}, "gpu.sms", "Input should be greater than or equal to 0, got -1"),
        ({"cpu": {"decode_share": 0}}, "cpu.decode_share", "Input should be greater than 0, got 0"),
        ({"gpu": {"batch_bytes": "1GiB"}}, "gpu.batch_bytes", "Input should be less than or equal to 268435456"),
        (
            {"policy": {"name": "static", "confguration": {}}},
            "policy.confguration",
            "unknown setting 'confguration'; did",
        ),
        (
            {"transport": {"nam": "tcp"}},
            "transport.nam",
            "unknown setting 'nam'; did you mean 'name'? allowed: name, or a",
        ),
        ({"min_quality": 1.5}, "min_quality", "Input should be less than or equal to 1, got 1.5"),
        ({"min_quality": float("nan")}, "min_quality", "Input should be "),
        ({"slo": "2 parsecs"}, "slo", "duration '2 parsecs' is not understood; write for example '200ms' or '2s'"),
        ({"bandwidth": 0}, "bandwidth", "Input should be greater than 0, got 0"),
        (
            {"wire_compat": "latest"},
            "wire_compat",
            "frame version 'latest' cannot be written, this kvserve writes '1.0'",
        ),
        (
            {"wire_compat": "1.1"},
            "wire_compat",
            "frame version '1.1' cannot be written, this kvserve writes '1.0' only",
        ),
        ({"wire_compat": 1.0}, "wire_compat", "Input should be a valid string, got 1.0"),
        ({"policy": 3}, "policy", "Input should be a valid dictionary"),
        ({"transport": "tcp"}, "transport", "Input should be a valid dictionary"),
    ],
)
def test_a_wrong_setting_names_its_path_and_where_it_came_from(extra: dict[str, Any], path: str, start: str) -> None:
    error = error_of(extra)
    assert error.path == path
    assert error.reason.startswith(start)
    assert error.reason.endswith("(from extra_config)")


@pytest.mark.parametrize("extra", [[1], [], "x", "", 5, 0, {1: "2s"}])
def test_an_extra_config_that_is_no_table_is_refused(extra: Any) -> None:
    assert error_of(extra).reason.startswith("the engine's extra config must be a table of settings like {'slo': '2s'}")


def test_text_that_is_nested_too_deep_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "kv.toml"
    path.write_text("slo = " + "[" * 10_000 + "]" * 10_000, encoding="utf-8")
    assert "is not TOML" in str(error_of(None, {"KVSERVE_CONFIG": str(path)}))
    assert "begins like JSON" in str(error_of(None, {"KVSERVE_POLICY": "[" * 100_000}))


def test_the_documented_split_covers_every_setting() -> None:
    text = Settings.__doc__ or ""
    assert [name for name in Settings.model_fields if f"``{name}" not in text] == []


def test_a_wrong_variable_is_named() -> None:
    assert str(error_of(None, {"KVSERVE_MIN_QUALITY": "high"})).endswith("(from env KVSERVE_MIN_QUALITY)")
    message = "the variable 'KVSERVE_POLICY' begins like JSON but is not"
    assert str(error_of(None, {"KVSERVE_POLICY": "{static}"})).startswith(message)


def test_a_file_that_is_absent_or_not_toml_is_named(tmp_path: Path) -> None:
    absent, wrong, binary = tmp_path / "absent.toml", tmp_path / "wrong.toml", tmp_path / "binary.toml"
    wrong.write_text("slo = 2s", encoding="utf-8")
    binary.write_bytes(b"\xff\xfe")
    assert "absent.toml' cannot be read: No such file" in str(error_of(None, {"KVSERVE_CONFIG": str(absent)}))
    assert "wrong.toml' is not TOML: " in str(error_of(None, {"KVSERVE_CONFIG": str(wrong)}))
    assert "binary.toml' is not TOML: " in str(error_of(None, {"KVSERVE_CONFIG": str(binary)}))


def test_variables_that_name_no_setting_are_listed_and_ignored() -> None:
    environ = {
        "KVSERVE_TRANPORT": "x",
        "KVSERVE_PEERS__ACCPT": "any",
        "KVSERVE_SLO__S": "3",
        "KVSERVE_": "x",
        "KVSERVE_CACHE": "/c",
        "KVSERVE_TRACEBACK": "1",
        "KVSERVE_DISABLED_PLUGINS": "a",
        "KVSERVE_FAULT_TCP": "drop",
        "UNRELATED": "x",
    }
    loaded = load_settings(None, environ)
    assert loaded.settings == Settings()
    assert loaded.unknown_env == ("KVSERVE_", "KVSERVE_PEERS__ACCPT", "KVSERVE_SLO__S", "KVSERVE_TRANPORT")


def test_the_process_environment_is_read_when_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSERVE_WORKLOAD", "chat")
    assert load_settings().settings.workload == "chat"


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError):
        Settings().slo = 3.0  # type: ignore[misc]  # wrong on purpose


def test_the_cache_folder_follows_the_variable_then_the_desktop_standard() -> None:
    assert cache_dir({"KVSERVE_CACHE": "/c", "XDG_CACHE_HOME": "/x"}) == Path("/c")
    assert cache_dir({"XDG_CACHE_HOME": "/x"}) == Path("/x/kvserve")
    assert cache_dir({}) == Path.home() / ".cache" / "kvserve"


def test_priors_by_link_and_chunks_are_settings() -> None:
    found = load_settings({"priors": {"east": "5Gbps"}, "chunk_bytes": "4MiB"}, {"KVSERVE_PRIORS": '{"west": "1Gbps"}'})
    assert found.settings.priors == {"east": 6.25e8, "west": 1.25e8}
    assert found.settings.chunk_bytes == 4 * 2**20
    assert {path: str(origin) for path, _, origin in found.values()}["priors.west"] == "env KVSERVE_PRIORS"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"priors": {"east": "0Gbps"}}, "priors.east: .*greater than 0"),
        ({"priors": {"east": "fast"}}, "priors.east: bandwidth 'fast' is not understood"),
        ({"priors": "5Gbps"}, "priors: "),
        ({"chunk_bytes": 0}, "chunk_bytes: .*greater than 0"),
    ],
)
def test_priors_and_chunks_that_cannot_be(given: dict[str, Any], message: str) -> None:
    assert re.search(message, str(error_of(given)))
