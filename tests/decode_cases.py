"""Small real frames of every built-in chain, for golden files and for the end-to-end fuzz target."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvserve_core.container import FrameReader
from kvserve_core.decoder import Decoder
from kvserve_core.pipeline import Pipeline
from kvserve_core.profile import Chain, PipelineSpec
from kvserve_core.spec import DType, KVSpec, LayerGroup, PlanePart, PlaneSpec, Region, whole
from kvserve_core.wire import FrameHeader, Segment

TOKENS = 24
HEADS, DIM = 2, 16


def planes(heads: int = HEADS, dim: int = DIM, dtype: DType = DType.BF16) -> tuple[PlaneSpec, ...]:
    return tuple(PlaneSpec(name, heads, (PlanePart(name, dim),), dtype) for name in ("k", "v"))


KV = KVSpec("tests/small", (LayerGroup(0, (0, 1), planes()),))
KV_96 = KVSpec("tests/small-96", (LayerGroup(0, (0, 1), planes(dim=96)),))

CHAINS: dict[str, dict[str, Any]] = {
    "raw": {"quantizer": "identity", "codec": "raw"},
    "identity-zstd": {"quantizer": "identity", "codec": "zstd"},
    "bitplane-zstd": {"quantizer": "bitplane", "codec": "zstd"},
    "transform-identity": {"transforms": ["identity"], "quantizer": "bitplane", "codec": "zstd"},
    **{
        f"uniform-{axis}": {
            "quantizer": {"name": "uniform", "configuration": {"levels": 12, "axis": axis, "group_size": 8}},
            "codec": codec,
        }
        for axis, codec in (
            ("token", "bitpack"),
            ("channel", "bitpack"),
            ("token_head", "zstd"),
            ("tensor", "bitpack"),
            ("group", "raw"),
        )
    },
    "uniform-wide": {
        "quantizer": {"name": "uniform", "configuration": {"levels": 1000, "axis": "tensor", "param_dtype": "f32"}},
        "codec": "bitpack",
    },
    "hadamard": {
        "transforms": ["hadamard"],
        "quantizer": {"name": "uniform", "configuration": {"levels": 16, "axis": "tensor"}},
        "codec": "bitpack",
    },
    "mixhq": {
        "quantizer": {"name": "mixhq", "configuration": {"scores": [[0.5, 2.0], [1.5, 0.5]]}},
        "codec": "zstd",
    },
}


LONGER_HEADS: dict[str, dict[str, Any]] = {"hadamard-96": CHAINS["hadamard"]}
"""Cases with a head_dim of 96, which is 64 + 32 to a Hadamard transform, and half the tokens."""


class Case(NamedTuple):
    """A frame before it is sealed, with the tensors that went in."""

    header: FrameHeader
    segments: list[Segment]
    inputs: dict[Region, Tensor]


def recipe(at: Region, dim: int = DIM) -> Tensor:
    """``[L, H, T, D]`` from integers alone: the same on every machine and torch version."""
    shape = (len(at.layers), len(at.heads), at.num_tokens, dim)
    n = torch.arange(torch.Size(shape).numel(), dtype=torch.int64) + 7919 * (at.start + 31 * sum(at.layers))
    noise = (n * 1103515245 + 12345 + 977 * len(at.plane)) % 2**31 // 2**15 % 509 - 254
    channel = n % dim
    return (noise * (1 + 7 * (channel == 3)) + 16 * channel).reshape(shape).to(torch.float32).div_(64).bfloat16()


@lru_cache(maxsize=64)
def case(name: str) -> Case:
    kv, dim, tokens = (KV_96, 96, TOKENS // 2) if name in LONGER_HEADS else (KV, DIM, TOKENS)
    chain = Chain.model_validate((CHAINS | LONGER_HEADS)[name])
    pipeline = Pipeline.build(PipelineSpec(planes={"*": chain}, head_groups=1), kv, whole(kv))
    header, planned = pipeline.header("golden", tokens, name)
    inputs = {p.at: recipe(p.at, dim) for p in planned}
    return Case(header, pipeline.encode([(p, inputs[p.at]) for p in planned]), inputs)


def decode_file(data: bytes, kv: KVSpec = KV) -> dict[Region, Tensor]:
    """Bytes of a frame file to tensors: the whole consumer path."""
    with FrameReader(data) as reader:
        decoder = Decoder(reader.header, kv)
        return dict(decoder.decode(list(reader.segments())))
