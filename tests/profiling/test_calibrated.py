from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from safetensors.torch import save

from kvserve_core.errors import ConfigError
from kvserve_core.profiling.calibrated import calibrated_files

ABOUT = {"version": 1, "per": "head", "blocks": [{"layers": [0, 1, 2]}, {"layers": [3]}]}


def test_files_are_known_by_their_names_and_say_how_they_were_made(tmp_path: Path) -> None:
    basis = save({"x": torch.zeros(1)}, {"kvserve.klt": json.dumps(ABOUT), "other": "1"})
    (tmp_path / "klt-head-3.safetensors").write_bytes(basis)
    (tmp_path / "heads.json").write_text("[[1, 2]]", encoding="utf-8")
    (tmp_path / "notes.txt").write_text("no", encoding="utf-8")
    (heads, klt), artefacts = calibrated_files(tmp_path)
    assert (heads.name, heads.layer_block, dict(heads.about)) == ("heads", None, {})
    assert (klt.name, klt.layer_block, klt.about["per"]) == ("klt-head-3", 3, "head")
    assert klt.digest == blake3(basis).hexdigest()
    assert artefacts.read(klt.digest) == basis
    assert artefacts.hashes == {heads.digest, klt.digest}


def test_what_is_no_folder_and_what_is_no_file_of_ours_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder; name the one"):
        calibrated_files(tmp_path / "absent")
    for data in (b"\0" * 4, b"\0" * 8, _header([]), _header({"__metadata__": 1}), *map(_ours, ("5", "[1]", 5, "{"))):
        (tmp_path / "klt.safetensors").write_bytes(data)
        with pytest.raises(ConfigError, match=r"klt\.safetensors: cannot be read"):
            calibrated_files(tmp_path)
    for blocks in (5, [5], [{}], [{"layers": 3}]):
        (tmp_path / "klt.safetensors").write_bytes(_ours(json.dumps({"blocks": blocks})))
        with pytest.raises(ConfigError, match=r"klt\.safetensors: cannot be read"):
            calibrated_files(tmp_path)


def _header(value: object) -> bytes:
    text = json.dumps(value).encode()
    return len(text).to_bytes(8, "little") + text


def _ours(value: object) -> bytes:
    return _header({"__metadata__": {"kvserve.klt": value}})
