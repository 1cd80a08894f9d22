"""The rotation kernels in Triton's interpreter (or on a GPU) against the stages that they replace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kvserve_core import DType, KVSpec, LayerGroup, Pipeline, PlanePart, PlaneSpec
from kvserve_core.decoder import Decoder
from kvserve_core.plan import Planned
from kvserve_core.spec import RopeSpec, whole
from kvserve_core.wire import FrameHeader, Segment
from kvserve_plugins.kernels import fused_rotation
from kvserve_plugins.kernels.fused_launch import Pages
from triton_cases import DEVICE, INTERPRETED

ROPE = RopeSpec(tuple(10000 ** (-i / 32) for i in range(32)), 64, "neox")
MIXED = {
    "name": "mixhq",
    "configuration": {
        "scores": [[0.1, 0.9], [0.8, 0.2], [0.5, 0.4], [0.3, 0.7]],
        "high": {"name": "uniform", "configuration": {"levels": 12, "axis": "token_head"}},
        "low": {"name": "uniform", "configuration": {"levels": 5, "axis": "token_head"}},
    },
}


def uniform(levels: int, axis: str) -> dict[str, Any]:
    return {"name": "uniform", "configuration": {"levels": levels, "axis": axis}}


CHAINS = {
    "packed": (["hadamard"], uniform(16, "token_head"), "bitpack"),
    "packed, derope": (["derope", "hadamard"], uniform(16, "token_head"), "bitpack"),
    "codes": (["hadamard"], uniform(10, "token_head"), "zstd"),
    "codes, derope": (["derope", "hadamard"], uniform(10, "token_head"), "zstd"),
    "channel": (["hadamard"], uniform(16, "channel"), "zstd"),
    "mixhq": (["hadamard"], MIXED, "zstd"),
}


def spec(dim: int) -> KVSpec:
    rope, layers = (ROPE, (0, 1, 2, 3)) if dim == 64 else (None, (0, 1, 2))
    return KVSpec("m", (LayerGroup(0, layers, (PlaneSpec("k", 2, (PlanePart("k", dim, rope),), DType.BF16),)),))


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Kernels on, and how many segments went through them."""
    seen: list[int] = []
    monkeypatch.setattr(fused_rotation, "available", lambda device: True)
    for name in ("_encode", "_decode"):  # of segments of one kind
        inner = getattr(fused_rotation.Rotation, name)

        def counted(self: Any, batch: Any, placed: Any, inner: Any = inner) -> Any:
            seen.append(len(batch))
            return inner(self, batch, placed)

        monkeypatch.setattr(fused_rotation.Rotation, name, counted)
    return seen


def built(chain: str, dim: int, layer_block: int = 2, head_groups: int | None = None) -> Pipeline:
    transforms, quantizer, codec = CHAINS[chain]
    if codec == "zstd" and DEVICE.type == "cuda":
        codec = "bitpack"  # zstd works on a CPU only
    planes = {"*": {"transforms": transforms, "quantizer": quantizer, "codec": codec}}
    kv = spec(dim)
    cut = {"layer_block": layer_block, "head_groups": head_groups, "sink_tokens": 0}
    return Pipeline.build({"planes": planes, **cut}, kv, whole(kv), DEVICE)


def coded(
    pipeline: Pipeline, total: int, seed: int = 0
) -> tuple[FrameHeader, list[tuple[Planned, Tensor]], list[Segment]]:
    header, planned = pipeline.header("r", total, "p")
    torch.manual_seed(seed)
    dim = pipeline.kv.groups[0].planes[0].dim
    batch = [
        (p, torch.randn(len(p.at.layers), len(p.at.heads), p.at.num_tokens, dim).bfloat16().to(DEVICE)) for p in planned
    ]
    return header, batch, pipeline.encode(batch)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize(("chain", "dim"), [(c, 64) for c in CHAINS] + [("packed", 128), ("channel", 128)])
def test_kernels_and_stages_read_each_other(
    chain: str, dim: int, fused: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    total = 300 if chain == "packed" else 200  # more cells, or one that is not full
    header, batch, segments = coded(built(chain, dim), total)
    assert sum(fused) == len(batch)
    assert all(s.chain != 0 for s in segments)
    by_kernel = [x for _, x in Decoder(header, spec(dim), DEVICE).decode(segments)]
    assert sum(fused) == 2 * len(batch)
    monkeypatch.setattr(fused_rotation, "available", lambda device: False)
    by_stage = [x for _, x in Decoder(header, spec(dim), DEVICE).decode(segments)]
    reference = built(chain, dim).encode(batch)
    plain = [x for _, x in Decoder(header, spec(dim), DEVICE).decode(reference)]
    assert sum(fused) == 2 * len(batch)
    for (_, x), mine, theirs, ideal in zip(batch, by_kernel, by_stage, plain, strict=True):
        assert mine.shape == x.shape
        # Decoding is normative: what differs is f32 arithmetic before one rounding to bf16.
        step = 2**-7 * theirs.float().abs() + 2**-9
        assert ((mine.float() - theirs.float()).abs() <= step).all()
        assert relative(mine, x) <= 1.0025 * relative(ideal, x)


@pytest.mark.parametrize("chain", [c for c in CHAINS if c != "mixhq"])  # which wants both classes in a segment
def test_segments_of_one_head_arrive(chain: str, fused: list[int]) -> None:
    header, batch, segments = coded(built(chain, 64, layer_block=1, head_groups=2), 64)
    assert {p.at.heads for p, _ in batch} == {(0,), (1,)}
    decoded = Decoder(header, spec(64), DEVICE).decode(segments)
    worst = max(relative(y, x) for (_, x), (_, y) in zip(batch, decoded, strict=True))
    assert worst < 0.25


@pytest.mark.parametrize("chain", ["codes", "codes, derope", "channel", "mixhq"])
def test_codes_differ_from_the_stages_in_one_place_of_a_hundred_at_most(chain: str, fused: list[int]) -> None:
    pipeline = built(chain, 64)
    _, planned = pipeline.header("r", 256, "p")
    torch.manual_seed(3)
    for p in planned:
        x = torch.randn(len(p.at.layers), len(p.at.heads), p.at.num_tokens, 64).bfloat16().to(DEVICE)
        bound = pipeline._chains.bound(p.chain, p.at)
        assert bound.fusion is not None
        (mine,) = bound.fusion.encode([(p.at, x)])
        stages, plain = bound.quantize(x, p.at)
        assert [set(s) for s in mine.stages] == [set(s) for s in stages]
        for a, b in zip(mine.quantized.parts, plain.parts, strict=True):
            assert (a.alphabet, a.rows) == (b.alphabet, b.rows)
            off = (a.codes.int() - b.codes.int()).abs()
            assert off.max() <= 1
            assert (off > 0).float().mean() <= 0.01


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, about just these values, from the interpreter
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e36])
@pytest.mark.parametrize("chain", ["packed", "codes", "channel"])
def test_values_that_no_grid_holds_arrive(chain: str, value: float, fused: list[int]) -> None:
    pipeline = built(chain, 64)
    header, planned = pipeline.header("r", 64, "p")
    batch = [(p, torch.randn(len(p.at.layers), 1, 64, 64).bfloat16().to(DEVICE)) for p in planned]
    batch[1][1][0, 0, 17, 5] = value
    segments = pipeline.encode(batch)
    for (p, x), (at, y) in zip(batch, Decoder(header, spec(64), DEVICE).decode(segments), strict=True):
        assert at == p.at
        assert torch.equal(x.isnan(), y.isnan())
        assert torch.equal(x.isinf(), y.isinf())
    assert [s.chain for s in segments].count(0) == (0 if value == 1e36 else 1)


@pytest.mark.parametrize("chain", ["packed", "codes", "channel"])
def test_sums_that_no_float_holds_are_left_to_the_stages(chain: str, fused: list[int]) -> None:
    pipeline = built(chain, 64)
    header, planned = pipeline.header("r", 64, "p")
    batch = [(p, torch.randn(len(p.at.layers), 1, 64, 64).bfloat16().to(DEVICE)) for p in planned]
    batch[1][1][0, 0, 17] *= 3e36
    decoded = Decoder(header, spec(64), DEVICE).decode(pipeline.encode(batch))
    assert all(y.isfinite().all() for _, y in decoded)


def test_a_constant_head_decodes_to_itself(fused: list[int]) -> None:
    pipeline = built("packed", 64)
    header, planned = pipeline.header("r", 64, "p")
    batch = [(p, torch.zeros(len(p.at.layers), 1, 64, 64, dtype=torch.bfloat16, device=DEVICE)) for p in planned]
    assert all(not x.any() for _, x in Decoder(header, spec(64), DEVICE).decode(pipeline.encode(batch)))


def test_odd_rows_go_stage_by_stage(fused: list[int]) -> None:
    pipeline = built("packed", 64, layer_block=1)
    header, batch, segments = coded(pipeline, 257)
    assert sum(fused) == 8  # not the last cell, of one token: two codes of a byte would be of one row
    decoded = Decoder(header, spec(64), DEVICE).decode(segments)
    assert [x.shape for _, x in decoded] == [x.shape for _, x in batch]


@pytest.mark.parametrize("chain", ["packed", "packed, derope", "codes"])
def test_blocks_are_read_and_written_in_place(chain: str, fused: list[int]) -> None:
    """An engine's layout: blocks of 16 tokens in any order, keys and values of a head side by side."""
    pipeline = built(chain, 64)
    _, planned = pipeline.header("r", 256, "p")
    torch.manual_seed(5)
    cache = torch.randn(4, 20, 16, 2, 128).bfloat16().to(DEVICE)  # layer, block, token, head, K and V
    blocks = torch.randperm(20)[:16].to(DEVICE)
    pages = Pages(blocks.int(), 16, cache.stride(1), cache.stride(2))
    gathered = cache[:, blocks].flatten(1, 2)[..., :64].transpose(1, 2)  # layer, head, token, K
    (fusion,) = {id(f): f for f in (pipeline._chains.bound(p.chain, p.at).fusion for p in planned)}.values()
    regions = [p.at for p in planned]
    heads = [[cache[layer, 0, 0, h].data_ptr() for layer in at.layers for h in at.heads] for at in regions]
    plain = [gathered[list(at.layers)][:, list(at.heads)].contiguous() for at in regions]
    mine, theirs = fusion.encode_pages(regions, heads, pages), fusion.encode(list(zip(regions, plain, strict=True)))
    out = torch.zeros_like(cache)
    there = [[out[layer, 0, 0, h].data_ptr() for layer in at.layers for h in at.heads] for at in regions]
    given = []
    for at, a, b in zip(regions, mine, theirs, strict=True):
        data = [e.data for e in a.encoded] if a.encoded else [p.codes for p in a.quantized.parts]
        again = [e.data for e in b.encoded] if b.encoded else [p.codes for p in b.quantized.parts]
        assert all(torch.equal(x, y) for x, y in zip(data, again, strict=True))
        given.append((at, [{k: v.cpu() for k, v in s.items()} for s in a.stages], data))
    assert fusion.decode_pages(given, there, pages).all()
    restored = out[:, blocks].flatten(1, 2)[..., :64].transpose(1, 2)
    assert relative(restored, gathered) < 0.2
    untouched = torch.ones(20, dtype=torch.bool)
    untouched[blocks.cpu()] = False
    assert not out[:, untouched.to(DEVICE)].any()
    assert not out[..., 64:].any()


@pytest.mark.skipif(INTERPRETED, reason="needs an NVIDIA GPU: the interpreter cannot tell whether a stream waits")
@pytest.mark.gpu
def test_launching_does_not_wait(fused: list[int]) -> None:
    pipeline = built("packed", 64)
    _, batch, _ = coded(pipeline, 256)
    torch.cuda._sleep(200_000_000)
    done = torch.cuda.Event()
    launched = pipeline.launch(batch)
    done.record()
    assert not done.query()
    launched.finish()
