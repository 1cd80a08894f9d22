"""``hadamard + uniform + zstd`` through the pipeline on a CPU, against the same three steps written out by hand.

By hand: signs and a dense Hadamard product, min-max to uint8, one zstd frame with the pipeline's own parameters, per
segment, and the inverse. The pipeline does more: exempt tokens, finiteness, bounds, metadata, typed errors. Both sides
work on the same tensors, in turns, in one process; the figure is the median of the paired ratios.
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

    def __init__(self, dim: int) -> None:
        self._h = matrix(dim) / dim**0.5
        self._signs = torch.randint(0, 2, (dim,)).float() * 2 - 1
        self._compressor = zstandard.ZstdCompressor(compression_params=CODES)
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


def measure(name: str, layers: int, heads: int, dim: int, block: int) -> dict[str, Any]:
    """Paired ratios of pipeline time over hand-written time."""
    kv = model(layers, heads, dim)
    pipeline = Pipeline.build(spec(block), kv, whole(kv))
    header, planned = pipeline.header("b", TOKENS, "b")
    decoder, hand = Decoder(header, kv), ByHand(dim)
    torch.manual_seed(0)
    data: list[tuple[Planned, Tensor]] = [
        (p, torch.randn(len(p.at.layers), len(p.at.heads), p.at.num_tokens, dim).bfloat16()) for p in planned
    ]
    nbytes = sum(x.numel() * 2 for _, x in data)
    rows: dict[str, list[float]] = {"encode": [], "decode": [], "pipeline_encode_s": [], "pipeline_decode_s": []}
    for i in range(ROUNDS + 2):
        ours_e, segments = seconds(lambda: pipeline.encode(data))
        hand_e, plain = seconds(lambda: [hand.encode(x) for _, x in data])
        ours_d, _ = seconds(lambda s=segments: decoder.decode(s))
        hand_d, _ = seconds(lambda p=plain: [hand.decode(*blob, x.shape) for blob, (_, x) in zip(p, data, strict=True)])
        if i >= 2:
            for key, value in zip(rows, (ours_e / hand_e, ours_d / hand_d, ours_e, ours_d), strict=True):
                rows[key].append(value)
    medians = {key: statistics.median(values) for key, values in rows.items()}
    return {
        "case": name,
        "encode_ratio": medians["encode"],
        "decode_ratio": medians["decode"],
        "encode_MB_per_s": nbytes / medians["pipeline_encode_s"] / 1e6,
        "decode_MB_per_s": nbytes / medians["pipeline_decode_s"] / 1e6,
        "cr": nbytes / sum(len(s.meta) + len(s.body) for s in segments),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cases = [measure(name, *shape) for name, shape in SHAPES.items()]
    bars = [
        {"name": f"{key}, {case['case']}", "value": case[f"{key}_ratio"], "bar": BAR, "ok": case[f"{key}_ratio"] <= BAR}
        for case in cases
        for key in ("encode", "decode")
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
