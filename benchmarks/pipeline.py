"""``hadamard + uniform + zstd`` through the pipeline on a CPU, against the same three steps written out by hand.

By hand: signs and a dense Hadamard product, min-max to uint8, one zstd frame a segment, and the inverse. The bar is
against zstandard as it comes (level 3); beside it stands the same with the zstd parameters that kvserve chose, which
leaves T, Q and what the pipeline does around them: exempt tokens, finiteness, bounds, metadata, typed errors. All work
on the same tensors, in turns, in one process; a figure is the median of the paired ratios.
``python benchmarks/pipeline.py [--json]``
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
import zstandard
from torch import Tensor

from kvserve_core.decoder import Decoder
from kvserve_core.pipeline import Pipeline
from kvserve_core.plan import Planned
from kvserve_core.profile import PipelineSpec
from kvserve_core.spec import DType, KVSpec, LayerGroup, PlanePart, PlaneSpec, whole
from kvserve_plugins.codecs.zstd import CODES
from kvserve_plugins.kernels.hadamard import matrix

BAR = 1.0
LEVELS = 16
ROUNDS = 15
SHAPES = {"smollm2 (3 heads x 64, 15 layers a segment)": (30, 3, 64, 15), "8 heads x 128, 4 layers": (16, 8, 128, 4)}
TOKENS = 1024


def model(layers: int, heads: int, dim: int) -> KVSpec:
    """K and V of a dense model in bf16."""
    planes = tuple(PlaneSpec(n, heads, (PlanePart(n, dim),), DType.BF16) for n in "kv")
    return KVSpec("benchmark", (LayerGroup(0, tuple(range(layers)), planes),))


def spec(block: int) -> PipelineSpec:
    """The pipeline under test."""
    quantizer = {"name": "uniform", "configuration": {"levels": LEVELS, "axis": "token_head"}}
    chain = {"transforms": ["hadamard"], "quantizer": quantizer, "codec": "zstd"}
    return PipelineSpec.model_validate({"planes": {"*": chain}, "layer_block": block, "sink_tokens": 0})


class ByHand:
    """The three steps in plain torch and zstandard."""

    def __init__(self, dim: int, compressor: zstandard.ZstdCompressor) -> None:
        self._h = matrix(dim) / dim**0.5
        self._signs = torch.randint(0, 2, (dim,)).float() * 2 - 1
        self._compressor = compressor
        self._decompressor = zstandard.ZstdDecompressor()

    def encode(self, x: Tensor) -> tuple[bytes, Tensor, Tensor]:
        y = (x.float() * self._signs) @ self._h
        lo, hi = y.amin(-1, keepdim=True), y.amax(-1, keepdim=True)
        scale = ((hi - lo) / (LEVELS - 1)).clamp_min(1e-8).bfloat16()
        lo = lo.bfloat16()
        codes = ((y - lo.float()) / scale.float()).round().clamp(0, LEVELS - 1).to(torch.uint8)
        return self._compressor.compress(codes.numpy().data), lo, scale

    def decode(self, data: bytes, lo: Tensor, scale: Tensor, shape: torch.Size) -> Tensor:
        codes = torch.frombuffer(bytearray(self._decompressor.decompress(data)), dtype=torch.uint8).view(shape)
        y = codes.float() * scale.float() + lo.float()
        return ((y @ self._h) * self._signs).bfloat16()


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


BASELINES = {
    "plain": zstandard.ZstdCompressor(),
    "same zstd parameters": zstandard.ZstdCompressor(compression_params=CODES),
}


def measure(name: str, layers: int, heads: int, dim: int, block: int) -> dict[str, Any]:
    """Paired ratios of pipeline time over hand-written time, for each baseline."""
    kv = model(layers, heads, dim)
    pipeline = Pipeline.build(spec(block), kv, whole(kv))
    header, planned = pipeline.header("b", TOKENS, "b")
    decoder = Decoder(header, kv)
    hands = {key: ByHand(dim, compressor) for key, compressor in BASELINES.items()}
    torch.manual_seed(0)
    data: list[tuple[Planned, Tensor]] = [
        (p, torch.randn(len(p.at.layers), len(p.at.heads), p.at.num_tokens, dim).bfloat16()) for p in planned
    ]
    nbytes = sum(x.numel() * 2 for _, x in data)
    ours: dict[str, list[float]] = {"encode": [], "decode": []}
    theirs: dict[str, list[float]] = {f"{way}, {key}": [] for key in hands for way in ours}
    for _ in range(ROUNDS + 2):
        encode_s, segments = seconds(lambda: pipeline.encode(data))
        decode_s, _ = seconds(lambda s=segments: decoder.decode(s))
        ours["encode"].append(encode_s)
        ours["decode"].append(decode_s)
        for key, hand in hands.items():
            spent, blobs = seconds(lambda h=hand: [h.encode(x) for _, x in data])
            theirs[f"encode, {key}"].append(spent)
            spent, _ = seconds(
                lambda h=hand, b=blobs: [h.decode(*blob, x.shape) for blob, (_, x) in zip(b, data, strict=True)]
            )
            theirs[f"decode, {key}"].append(spent)
    return {
        "case": name,
        "ratios": {
            key: statistics.median(a / b for a, b in zip(ours[key.split(",")[0]][2:], values[2:], strict=True))
            for key, values in theirs.items()
        },
        **{f"{way}_MB_per_s": nbytes / statistics.median(values[2:]) / 1e6 for way, values in ours.items()},
        "cr": nbytes / sum(len(s.meta) + len(s.body) for s in segments),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cases = [measure(name, *shape) for name, shape in SHAPES.items()]
    bars = [
        {"name": f"{key}, {case['case']}", "value": case["ratios"][key], "bar": BAR, "ok": case["ratios"][key] <= BAR}
        for case in cases
        for key in ("encode, plain", "decode, plain")
    ]
    report = {
        "ok": all(bar["ok"] for bar in bars),
        "bars": bars,
        "cases": cases,
        "machine": {"processor": platform.processor() or platform.machine(), "system": platform.platform()},
        "versions": {
            "python": platform.python_version(),
            **{p: version(p) for p in ("kvserve", "torch", "zstandard", "numpy")},
        },
    }
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        for bar in bars:
            print(f"{'ok  ' if bar['ok'] else 'MISS'} {bar['value']:.3f} (bar {bar['bar']}) {bar['name']}")
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
