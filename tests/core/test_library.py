"""The library's schema, its two forms on disk, and errors that name the field."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from kvserve_core.artefacts import Artefacts
from kvserve_core.component import ComponentSpec, Kind
from kvserve_core.errors import ArtefactError, ConfigError
from kvserve_core.latency import Speed
from kvserve_core.library import (
    LOSSLESS_PROFILE,
    RAW_PROFILE,
    Profile,
    ProfileLibrary,
    QualityRecord,
    usual_workload,
)
from kvserve_core.profile import LOSSLESS_PIPELINE, RAW_PIPELINE, Chain, PipelineSpec

BASIS = b"a calibrated basis"
DIGEST = blake3(BASIS).hexdigest()
UNIFORM = Chain(
    transforms=(ComponentSpec(name="hadamard"),),
    quantizer=ComponentSpec(name="uniform", configuration={"levels": 16}),
    codec=ComponentSpec(name="zstd"),
)
RECORD = QualityRecord(value=0.99, lower=0.98, upper=1.0, metric="exp(-kl)", samples=8)


def library(artefacts: tuple[str, ...] = ()) -> ProfileLibrary:
    balanced = Profile(
        name="balanced",
        pipeline=PipelineSpec(planes={"k": UNIFORM, "v": UNIFORM}),
        cr=4.0,
        encode=Speed(1e-3, 1e-9),
        decode=Speed(5e-4, 5e-10),
        quality={"default": RECORD},
        artefacts=artefacts,
    )
    return ProfileLibrary(
        model_id="tiny",
        fingerprint="f" * 64,
        device="cpu",
        created="2025-01-01T00:00:00Z",
        provenance={"texts": 8},
        profiles=(LOSSLESS_PROFILE, balanced),
    ).with_artefacts(Artefacts({DIGEST: BASIS}))


def as_json() -> Any:
    return json.loads(library().model_dump_json())


@pytest.mark.parametrize("name", ["lib", "lib.kvlib", "not/yet/there.kvlib", "not/yet/folder"])
def test_round_trip_as_folder_and_as_one_file(tmp_path: Path, name: str) -> None:
    ours = library((DIGEST,))
    ours.save(tmp_path / name)
    theirs = ProfileLibrary.load(tmp_path / name)
    assert theirs.model_dump() == ours.model_dump()
    assert theirs.artefacts.read(DIGEST) == BASIS


def test_a_kvlib_is_the_same_bytes_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library((DIGEST,)).save(tmp_path / "a.kvlib")
    monkeypatch.setattr("time.time", lambda: 2e9)
    library((DIGEST,)).save(tmp_path / "b.kvlib")
    assert (tmp_path / "a.kvlib").read_bytes() == (tmp_path / "b.kvlib").read_bytes()


def test_save_writes_only_artefacts_that_a_profile_names(tmp_path: Path) -> None:
    library().save(tmp_path / "lib")
    assert ProfileLibrary.load(tmp_path / "lib").artefacts.hashes == frozenset()


@pytest.mark.parametrize("name", ["lib", "lib.kvlib"])
def test_a_failed_save_leaves_the_old_library_and_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    library().save(tmp_path / name)
    before = sorted(p.name for p in tmp_path.rglob("*"))

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ArtefactError, match=r"cannot be written.*No space left"):
        library().model_copy(update={"device": "other"}).save(tmp_path / name)
    assert sorted(p.name for p in tmp_path.rglob("*")) == before
    assert ProfileLibrary.load(tmp_path / name).device == "cpu"


def test_saving_without_an_artefact_that_a_profile_names_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match="is not in the loaded library"):
        library((DIGEST,)).with_artefacts(Artefacts()).save(tmp_path / "lib")
    assert not (tmp_path / "lib").exists()


def test_a_missing_artefact_is_known_by_profile(tmp_path: Path) -> None:
    library((DIGEST,)).save(tmp_path / "lib")
    (tmp_path / "lib" / "artefacts" / DIGEST).unlink()
    loaded = ProfileLibrary.load(tmp_path / "lib")
    assert [loaded.missing(p) for p in loaded.profiles] == [(), (DIGEST,)]


def test_a_changed_artefact_is_found_when_it_is_read(tmp_path: Path) -> None:
    library((DIGEST,)).save(tmp_path / "lib")
    (tmp_path / "lib" / "artefacts" / DIGEST).write_bytes(b"something else")
    with pytest.raises(ArtefactError, match="does not match its hash"):
        ProfileLibrary.load(tmp_path / "lib").artefacts.read(DIGEST)


def test_what_is_not_a_library_says_what_was_expected(tmp_path: Path) -> None:
    (tmp_path / "text.kvlib").write_text("hello")
    (tmp_path / "empty").mkdir()
    with zipfile.ZipFile(tmp_path / "other.kvlib", "w") as archive:
        archive.writestr("something", "else")
    with zipfile.ZipFile(tmp_path / "bomb.kvlib", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("library.json", b" " * 10**6)
    reasons = {
        "gone": "there is no",
        "empty": "there is no",
        "text.kvlib": "cannot be read",
        "other.kvlib": "library.json",
    }
    for name, reason in (reasons | {"bomb.kvlib": "is compressed"}).items():
        with pytest.raises(ConfigError, match=f"{reason}.*kvserve measure"):
            ProfileLibrary.load(tmp_path / name)


def test_text_that_is_not_a_json_object() -> None:
    with pytest.raises(ConfigError, match="not JSON"):
        ProfileLibrary.parse("{")
    with pytest.raises(ConfigError, match="must hold an object, got list"):
        ProfileLibrary.parse("[]")


DEEP = b"[" * 200_000


def test_json_that_is_nested_too_deep_says_what_was_expected(tmp_path: Path) -> None:
    (tmp_path / "library.json").write_bytes(DEEP)
    with pytest.raises(ConfigError, match=r"not JSON: .*kvserve measure"):
        ProfileLibrary.load(tmp_path)


def test_a_path_that_no_file_can_have(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read.*kvserve measure"):
        ProfileLibrary.load(f"{tmp_path}/a\0b.kvlib")
    with pytest.raises(ArtefactError, match="cannot be written"):
        library().save(f"{tmp_path}/a\0b.kvlib")


def saved(folder: Path) -> bytes:
    library((DIGEST,)).save(folder / "good.kvlib")
    return (folder / "good.kvlib").read_bytes()


@pytest.mark.parametrize(
    ("what", "offset", "value"),
    [
        ("encrypted", 8, 0x01),
        ("patched", 8, 0x20),
        ("zip version", 6, 0xFF),
        ("claimed size", 27, 0x70),
    ],
)
def test_a_damaged_entry_says_what_was_expected(tmp_path: Path, what: str, offset: int, value: int) -> None:
    data = bytearray(saved(tmp_path))
    data[data.index(b"PK\1\2") + offset] = value
    if what in ("encrypted", "patched"):
        data[6] = value  # Python believes the entry's own header
    (tmp_path / "bad.kvlib").write_bytes(data)
    with pytest.raises(ConfigError, match=r"bad\.kvlib' cannot be read: .*kvserve measure"):
        ProfileLibrary.load(tmp_path / "bad.kvlib")


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Some bytes set, cut out or put in; half of the time in the directory at the end, where the structure is."""
    found = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        at = chance.randrange(len(found) if chance.random() < 0.5 else 320) + 1
        at = len(found) - min(at, len(found))
        kind = chance.choice(("set", "set", "set", "cut", "put"))
        if kind == "set":
            found[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
        elif kind == "cut":
            del found[at : at + chance.choice((1, 4, 64, 4096))]
        else:
            found[at:at] = chance.randbytes(chance.choice((1, 4, 64)))
        if not found:
            return b""
    return bytes(found)


def test_a_damaged_file_is_always_a_config_error(tmp_path: Path) -> None:
    data, path, chance = saved(tmp_path), tmp_path / "bad.kvlib", random.Random(0)
    reasons: list[str] = []
    with path.open("wb", buffering=0) as file:  # kept open: opening it anew costs more than all the rest
        for _ in range(2500):
            file.seek(0)
            file.write(mutated(data, chance))
            file.truncate()
            try:
                ProfileLibrary.load(path)
            except ConfigError as error:
                reasons.append(error.reason)
    assert len(reasons) > 2000
    assert all(reasons)


@pytest.mark.parametrize("seed", range(5))
def test_a_damaged_index_is_always_a_config_error(seed: int) -> None:
    text, chance = library((DIGEST,)).model_dump_json().encode(), random.Random(seed)
    reasons: list[str] = []
    for _ in range(100):
        try:
            ProfileLibrary.parse(mutated(text, chance))
        except ConfigError as error:
            reasons.append(error.reason)
    assert len(reasons) > 50
    assert all(reasons)


def put(at: Any, path: str, value: object) -> None:
    *parents, last = path.split("/")
    for key in parents:
        at = at[int(key)] if isinstance(at, list) else at[key]
    at[last] = value


CHAIN = "profiles/1/pipeline/planes/k"


@pytest.mark.parametrize(
    ("where", "value", "path", "says"),
    [
        (f"{CHAIN}/quantizer/configuration", 3, "profiles.balanced.planes.k.quantizer.configuration", "dictionary"),
        (f"{CHAIN}/quantiser", "x", "profiles.balanced.planes.k.quantiser", "did you mean 'quantizer'"),
        (f"{CHAIN}/codec/configuratoin", {}, "profiles.balanced.planes.k.codec.configuratoin", "mean 'configuration'"),
        (f"{CHAIN}/transforms/0/nmae", 1, "profiles.balanced.planes.k.transforms.0.nmae", "did you mean 'name'"),
        ("profiles/1/pipeline/sink_token", 4, "profiles.balanced.sink_token", "did you mean 'sink_tokens'"),
        ("profiles/1/pipeline/layer_block", 0, "profiles.balanced.layer_block", "got 0"),
        ("profiles/1/cr", 0, "profiles.balanced.cr", "got 0"),
        ("profiles/1/cr", float("inf"), "profiles.balanced.cr", "finite"),
        ("profiles/1/cr", 5e-324, "profiles.balanced.cr", "greater than or equal to 0.001"),
        ("profiles/1/cr", 1e7, "profiles.balanced.cr", "less than or equal to 1000000"),
        ("profiles/1/encode/fixed_s", -1.0, "profiles.balanced.encode", "from 0 to 86400"),
        ("profiles/1/decode/fixed_s", 86401.0, "profiles.balanced.decode", "from 0 to 86400"),
        ("profiles/1/decode/s_per_byte", 1e308, "profiles.balanced.decode", "from 0 to 86400"),
        ("profiles/1/encode/fixd_s", 1.0, "profiles.balanced.encode.fixd_s", "did you mean 'fixed_s'"),
        ("profiles/1/quality/default/lower", 0.995, "profiles.balanced.quality.default", "lower <= value <= upper"),
        ("profiles/1/quality/default/sample", 1, "profiles.balanced.quality.default.sample", "mean 'samples'"),
        ("profiles/1/notse", "", "profiles.balanced.notse", "did you mean 'notes'"),
        ("profiles/1/name", "raw", "profiles.raw", "reserved"),
        ("profiles/1/name", "a b", "profiles.a b.name", "got 'a b'"),
        ("profile", [], "profile", "did you mean 'profiles'"),
        ("profiles", {}, "profiles", "valid tuple"),
        ("profiles", [3], "profiles.[0]", "valid dictionary"),
        ("schema_version", 2, "", "schema_version is 2, this kvserve reads 1; upgrade"),
    ],
)
def test_an_error_names_the_path_of_the_bad_field(where: str, value: object, path: str, says: str) -> None:
    raw = as_json()
    put(raw, where, value)
    with pytest.raises(ConfigError) as caught:
        ProfileLibrary.parse(json.dumps(raw))
    assert caught.value.path == path
    assert says in caught.value.reason


def test_a_profile_without_a_name_is_named_by_its_place() -> None:
    raw = as_json()
    del raw["profiles"][1]["name"]
    with pytest.raises(ConfigError) as caught:
        ProfileLibrary.parse(json.dumps(raw))
    assert caught.value.path == "profiles.[1].name"


def test_a_misspelt_field_is_named_rather_than_the_one_it_leaves_missing() -> None:
    raw = as_json()
    raw["profiles"][1]["encoed"] = raw["profiles"][1].pop("encode")
    with pytest.raises(ConfigError) as caught:
        ProfileLibrary.parse(json.dumps(raw))
    assert caught.value.path == "profiles.balanced.encoed"
    assert "did you mean 'encode'" in caught.value.reason


def test_two_profiles_of_one_name_are_refused() -> None:
    raw = as_json()
    raw["profiles"].append(raw["profiles"][1])
    with pytest.raises(ConfigError, match="'balanced' is used more than once"):
        ProfileLibrary.parse(json.dumps(raw))


def test_check_creates_every_component_under_its_path() -> None:
    seen: list[tuple[Kind, str, str]] = []

    def create(kind: Kind, spec: ComponentSpec, path: str) -> None:
        seen.append((kind, spec.name, path))

    library().check(create)
    assert ("quantizer", "uniform", "profiles.balanced.planes.k.quantizer") in seen
    assert ("transform", "hadamard", "profiles.balanced.planes.v.transforms.0") in seen
    assert ("codec", "zstd", "profiles.lossless.planes.*.codec") in seen


def test_quality_falls_back_to_the_default_workload() -> None:
    code = RECORD.model_copy(update={"lower": 0.5})
    profile = library().profiles[1].model_copy(update={"quality": {"code": code, "default": RECORD}})
    assert profile.quality_for("code") == code
    assert profile.quality_for("chat") == RECORD
    assert profile.model_copy(update={"quality": {"code": code}}).quality_for("chat") is None


def test_raw_and_lossless_exist_in_every_library() -> None:
    ours = library()
    assert ours.profile("raw") == RAW_PROFILE
    assert ours.profile("lossless") == ours.profiles[0]
    assert ours.profile("nothing") is None
    assert (RAW_PROFILE.pipeline, LOSSLESS_PROFILE.pipeline) == (RAW_PIPELINE, LOSSLESS_PIPELINE)
    assert RAW_PROFILE.exact
    assert not ours.profiles[1].exact


def changed(**fields: Any) -> ProfileLibrary:
    ours = library()
    return ours.model_copy(update={"profiles": (ours.profiles[0], ours.profiles[1].model_copy(update=fields))})


def test_the_digest_tells_libraries_apart_by_what_estimates_are_made_of() -> None:
    ours = library().digest
    assert library((DIGEST,)).digest == changed(notes="x").digest == ours
    others = [
        changed(cr=4.1),
        changed(name="other"),
        changed(encode=Speed(2e-3, 1e-9)),
        changed(decode=Speed(5e-4, 0.0)),
    ]
    others.append(library().model_copy(update={"fingerprint": "e" * 64}))
    assert len({other.digest for other in others} | {ours}) == 6


def test_workloads_are_those_that_anything_was_measured_on() -> None:
    measured = changed(quality={"code": RECORD, "chat": RECORD})
    assert (library().workloads, measured.workloads) == (("default",), ("chat", "code"))
    assert [usual_workload(each) for each in (None, library(), measured)] == ["default"] * 3
    assert usual_workload(changed(quality={"code": RECORD})) == "code"


def test_a_profile_is_a_line_of_the_envelope() -> None:
    line = library().profiles[1].line(1e6, model_s=1.0)
    assert line.intercept == pytest.approx(1.0 + 1.5e-3 + 1.5e-9 * 1e6)
    assert line.slope == pytest.approx(2.5e5)


def test_library_and_controller_import_no_torch() -> None:
    modules = "kvserve_core.library, kvserve_core.controller, kvserve_plugins.policies.static"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
