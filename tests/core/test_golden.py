"""Golden frames of every release decode: exact chains bit for bit, the others within 2 bf16 ulp."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from decode_cases import CHAINS, KV, KV_96, LONGER_HEADS, case
from kvserve_core.container import FrameReader
from kvserve_core.decoder import Decoder

FOLDER = Path(__file__).parents[1] / "golden"
FILES = sorted(FOLDER.glob("*.kv"))
EXACT = {"raw", "identity-zstd", "bitplane-zstd", "transform-identity"}
MODELS = {kv.fingerprint: kv for kv in (KV, KV_96)}


def ordered(x: torch.Tensor) -> torch.Tensor:
    """bf16 as integers in the order of the values: neighbours differ by one ulp."""
    bits = x.view(torch.int16).to(torch.int32)
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def decode(path: Path) -> list[torch.Tensor]:
    with FrameReader(path) as reader:
        kv = MODELS[reader.header.fingerprint]
        return [x for _, x in Decoder(reader.header, kv).decode(list(reader.segments()))]


def expected(path: Path, like: list[torch.Tensor]) -> list[torch.Tensor]:
    data = torch.frombuffer(bytearray(path.with_suffix(".bin").read_bytes()), dtype=torch.bfloat16)
    return [x.reshape(y.shape) for x, y in zip(data.split([x.numel() for x in like]), like, strict=True)]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_golden_frame_decodes(path: Path) -> None:
    got = decode(path)
    want = expected(path, got)
    ulp = max(int((ordered(a) - ordered(b)).abs().max()) for a, b in zip(got, want, strict=True))
    assert ulp <= (0 if path.stem.split("@")[0] in EXACT else 2)


def test_every_built_in_chain_has_a_golden_frame() -> None:
    assert {p.stem.split("@")[0] for p in FILES} >= {*CHAINS, *LONGER_HEADS}


@pytest.mark.parametrize("name", sorted(EXACT))
def test_exact_chains_hold_their_input(name: str) -> None:
    got = decode(FOLDER / f"{name}@1.kv")
    inputs = list(case(name).inputs.values())
    assert all(torch.equal(a, b) for a, b in zip(got, inputs, strict=True))


def test_files_are_small() -> None:
    sizes = [p.stat().st_size for p in FOLDER.iterdir() if p.suffix in {".kv", ".bin"}]
    assert max(sizes) < 30_000
    assert sum(sizes) < 500_000


def test_golden_files_are_never_overwritten() -> None:
    before = {p: p.stat().st_mtime_ns for p in FILES}
    done = subprocess.run([sys.executable, str(FOLDER / "make.py")], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert {p: p.stat().st_mtime_ns for p in sorted(FOLDER.glob("*.kv"))} == before
