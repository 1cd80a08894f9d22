from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvserve_core.artefacts import NONE
from kvserve_core.errors import UnsupportedSpecError
from kvserve_core.pipeline import Pipeline
from kvserve_core.profile import PipelineSpec
from kvserve_core.spec import DType, KVSpec, LayerGroup, PlanePart, PlaneSpec, Region, RopeSpec, whole
from kvserve_plugins.kernels import rope
from kvserve_plugins.transforms.derope import Derope
from plugins.stage_checks import CPU, same_bits


def spec_of(dim: int = 16, rotary: int | None = None, **fields: Any) -> RopeSpec:
    rotary = rotary or dim
    return RopeSpec(tuple(1e4 ** (-2 * i / rotary) for i in range(rotary // 2)), rotary, **{"style": "neox"} | fields)


def model(rope_spec: RopeSpec | None, dim: int = 16) -> KVSpec:
    k = PlaneSpec("k", 2, (PlanePart("k", dim, rope_spec),), DType.BF16)
    v = PlaneSpec("v", 2, (PlanePart("v", dim),), DType.BF16)
    return KVSpec("derope", (LayerGroup(0, (0, 1), (k, v)),))


def place(tokens: int, plane: str = "k", start: int = 512) -> Region:
    return Region(0, plane, (0, 1), (0, 1), start, start + tokens)


def values(tokens: int, dim: int = 16) -> Tensor:
    return torch.randn(2, 2, tokens, dim, generator=torch.Generator().manual_seed(0))


def by_hand(x: Tensor, spec: RopeSpec, position: int) -> Tensor:
    """One vector turned in double precision, by the definition."""
    out, half = x.double().clone(), spec.rotary_dim // 2
    for i, f in enumerate(spec.inv_freq):
        a, b = (i, i + half) if spec.style == "neox" else (2 * i, 2 * i + 1)
        c, s = math.cos(position * f) * spec.attn_factor, math.sin(position * f) * spec.attn_factor
        out[a], out[b] = x[a] * c - x[b] * s, x[b] * c + x[a] * s
    return out


SPECS = [
    spec_of(),
    spec_of(style="gptj"),
    spec_of(rotary=8),
    spec_of(rotary=8, style="gptj", attn_factor=1.25),
    spec_of(attn_factor=0.8),
]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("position", [0, 1, 4097, 1_000_000])
def test_positions_are_applied_as_defined(spec: RopeSpec, position: int) -> None:
    x = values(1)[0, 0]
    turned = rope.turn(x, spec, position, back=False)
    torch.testing.assert_close(turned[0].double(), by_hand(x[0], spec, position), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(rope.turn(turned, spec, position, back=True), x, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("tokens", [0, 1, 256])
def test_round_trip(spec: RopeSpec, tokens: int) -> None:
    at = place(tokens)
    stage = Derope(Derope.Config()).bind(at, model(spec), CPU, NONE)
    x = values(tokens).bfloat16()
    kept = x.clone()
    y, params = stage.encode(x, at)
    assert (y.shape, y.dtype, params) == (x.shape, torch.float32, {})
    assert same_bits(stage.decode(y, params, at).bfloat16(), x)
    assert same_bits(x, kept)
    if tokens:
        assert not torch.equal(y, x.float())


def test_equal_keys_become_equal_again_at_every_position() -> None:
    at = place(256)
    plain = values(1).expand(2, 2, 256, 16)
    stage = Derope(Derope.Config()).bind(at, model(spec_of()), CPU, NONE)
    y, _ = stage.encode(stage.decode(plain, {}, at), at)
    torch.testing.assert_close(y, plain, atol=1e-5, rtol=1e-5)


def test_of_both_planes_only_the_keys_turn() -> None:
    at = place(9, "kv")
    stage = Derope(Derope.Config()).bind(at, model(spec_of()), CPU, NONE)
    x = torch.cat([values(9), values(9)], -1)
    y, _ = stage.encode(x, at)
    assert torch.equal(y[..., 16:], x[..., 16:])
    keys = Derope(Derope.Config()).bind(place(9), model(spec_of()), CPU, NONE)
    assert torch.equal(y[..., :16], keys.encode(x[..., :16], place(9))[0])
    torch.testing.assert_close(stage.decode(y, {}, at), x)


def test_slices_give_the_same_bits() -> None:
    x, at = values(64), place(64)
    y, _ = Derope(Derope.Config()).bind(at, model(spec_of()), CPU, NONE).encode(x, at)
    part = replace(at, layers=(1,), heads=(0,))
    z, _ = Derope(Derope.Config()).bind(part, model(spec_of()), CPU, NONE).encode(x[1:, :1], part)
    assert same_bits(z, y[1:, :1])


@pytest.mark.parametrize(("plane", "known"), [("v", True), ("k", False), ("kv", False)])
def test_what_cannot_be_turned_is_refused_at_build(plane: str, known: bool) -> None:
    kv = model(spec_of() if known else None)
    chain = {"transforms": ["derope"], "quantizer": "uniform"}
    spec = PipelineSpec.model_validate({"planes": {plane: chain}})
    with pytest.raises(UnsupportedSpecError, match=rf"planes\.{plane}\.transforms\.0.*no part with a known rotary"):
        Pipeline.build(spec, kv, whole(kv))
