from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

Kvserve = Callable[..., Any]
"""The fixture that runs a command; what it gives is in conftest."""


def test_it_counts_families_and_says_what_is_left_out(kvserve: Kvserve) -> None:
    done = kvserve("space")
    assert done.code == 0
    first, *rows = done.out.splitlines()
    counts = {row.split()[0]: int(row.split()[1]) for row in rows if row.split()[1].isdigit()}
    assert first == f"{sum(counts.values())} candidates"
    assert counts["kivi"] == 144
    assert counts["reference"] == 0
    assert "needs a calibrated file 'heads'" in done.out


def test_the_list_is_as_long_as_the_count(kvserve: Kvserve) -> None:
    found = kvserve("space", "--json", "--family", "kivi", "--family", "fp8").json
    assert found["count"] == len(found["candidates"]) == sum(found["families"].values()) == 152
    assert found["dimensions"]["k.kivi.bits"] == [2, 4]
    assert len({c["key"] for c in found["candidates"]}) == 152
    names = kvserve("space", "--list", "--family", "fp8").out.splitlines()
    assert "fp8-raw-k.token_head-v.channel" in names


def test_a_limit_draws_by_the_seed(kvserve: Kvserve) -> None:
    one, again, other = (kvserve("space", "--json", "--limit", "20", "--seed", seed).json for seed in ("1", "1", "2"))
    assert len(one["candidates"]) == 20 < one["count"]
    assert one["fingerprint"] == again["fingerprint"] != other["fingerprint"]


def test_a_component_can_be_left_out(kvserve: Kvserve) -> None:
    found = kvserve("space", "--json", "--family", "kivi", "--without", "zstd").json
    assert {c["values"]["codec"] for c in found["candidates"]} == {"bitpack"}


def test_calibrated_files_add_their_families(kvserve: Kvserve, tmp_path: Path) -> None:
    about = json.dumps({"per": "all", "blocks": [{"layers": [0, 1]}]})
    (tmp_path / "klt-all-2.safetensors").write_bytes(save({"x": torch.zeros(1)}, {"kvserve.klt": about}))
    (tmp_path / "heads.json").write_text("[[1.0]]", encoding="utf-8")
    found = kvserve("space", "--json", "--family", "klt", "--family", "reference", "--calibrated", str(tmp_path)).json
    assert found["families"] == {"reference": 144, "klt": 96}
    assert found["left_out"] == {}


def test_a_file_of_ones_own(kvserve: Kvserve, tmp_path: Path) -> None:
    path = tmp_path / "space.json"
    family = {"name": "mine", "planes": {"kv": {"quantizer": ["fp8"], "codec": ["zstd"]}}}
    path.write_text(json.dumps({"families": [family]}), encoding="utf-8")
    found = kvserve("space", "--json", "--config", str(path)).json
    assert found["families"] == {"mine": 6}  # two axes by three levels of zstd


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--family", "kiwi"), "unknown family 'kiwi'; did you mean 'kivi'?"),
        (("--without", "zsdt"), "unknown component 'zsdt'; did you mean 'zstd'?"),
        (("--config", "absent.json"), "absent.json: cannot be read"),
        (("--calibrated", "absent"), "absent: is no folder"),
    ],
)
def test_mistakes_are_one_line(kvserve: Kvserve, arguments: tuple[str, ...], said: str) -> None:
    done = kvserve("space", *arguments)
    assert done.code == 2
    assert done.err.startswith("error: ")
    assert said in done.err
