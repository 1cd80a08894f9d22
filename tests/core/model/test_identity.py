"""The identity of weights: stable over how files are cut, different for different weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from kvserve_core.errors import ArtefactError
from kvserve_core.model import model_id
from tiny_models import llama_config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    LlamaForCausalLM(llama_config()).save_pretrained(tmp_path / "m")
    return tmp_path / "m"


def test_a_resharded_copy_is_the_same_model(folder: Path, tmp_path: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "config.json").write_text((folder / "config.json").read_text())
    names = sorted(weights)
    halves = {"b.safetensors": names[::2], "a.safetensors": names[1::2]}
    for file, members in halves.items():
        save_file({n: weights[n] for n in members}, copy / file, metadata={"made": "by hand"})
    index = {"weight_map": {n: file for file, members in halves.items() for n in members}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    assert model_id(copy) == model_id(folder)
    assert model_id(folder).startswith("llama-")


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w["model.layers.1.self_attn.k_proj.weight"].mul_(1.01),
        lambda w: w.update({"model.norm.weight": w["model.norm.weight"].to(torch.bfloat16)}),
        lambda w: w.update({"extra": w.pop("model.norm.weight")}),
    ],
)
def test_other_weights_are_another_model(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    before = model_id(folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    assert model_id(folder) != before


def test_the_output_head_does_not_count(folder: Path) -> None:
    before = model_id(folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = torch.zeros(4, 4)
    save_file(weights, folder / "model.safetensors")
    assert model_id(folder) == before


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "no 'config.json'"),
        (lambda f: (f / "model.safetensors").unlink(), "no safetensors files"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 64), "not a safetensors file"),
        (lambda f: _truncate(f / "model.safetensors"), "truncated"),
    ],
)
def test_a_damaged_folder_says_what_is_wrong(folder: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(folder)
    with pytest.raises(ArtefactError, match=message):
        model_id(folder)


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
