"""Pipeline.build says which field is wrong; encode and decode are inverse within what the chain promises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fake_engine import dense, hybrid, mla, truth
from kvserve_core.decoder import Decoder
from kvserve_core.errors import ConfigError, FrameError, UnknownNameError, UnsupportedSpecError
from kvserve_core.pipeline import Pipeline
from kvserve_core.plan import RAW_CHAIN_ID, Planned
from kvserve_core.profile import LOSSLESS_PIPELINE, RAW_PIPELINE, PipelineSpec
from kvserve_core.spec import KVSpec, Region, Shard, whole
from kvserve_core.wire import Codebook, Segment, pack_header

UNIFORM = {"name": "uniform", "configuration": {"levels": 16, "axis": "token_head"}}
CHAIN: dict[str, Any] = {"transforms": ["hadamard"], "quantizer": UNIFORM, "codec": "zstd"}


def spec(chain: dict[str, Any] = CHAIN, plane: str = "*", **fields: Any) -> PipelineSpec:
    return PipelineSpec.model_validate({"planes": {plane: chain}} | fields)


def composed(kv: KVSpec, at: Region) -> Tensor:
    if at.plane == "kv":
        k, v = (Region(at.group, p, at.layers, at.heads, at.start, at.stop) for p in "kv")
        return torch.cat([truth(kv, k), truth(kv, v)], -1)
    return truth(kv, at)


def build(s: PipelineSpec, kv: KVSpec, **kw: Any) -> Pipeline:
    return Pipeline.build(s, kv, whole(kv), **kw)


def roundtrip(pipeline: Pipeline, kv: KVSpec, total: int) -> list[tuple[Segment, Tensor, Tensor]]:
    header, planned = pipeline.header("t", total, "p")
    data = [(p, composed(kv, p.at)) for p in planned]
    segments = pipeline.encode(data)
    decoded = Decoder(header, kv).decode(segments)
    assert [at for at, _ in decoded] == [p.at for p in planned]
    return [(s, x, y) for s, (_, x), (_, y) in zip(segments, data, decoded, strict=True)]


@pytest.mark.parametrize(
    ("change", "path", "message"),
    [
        ({"transforms": ["hadamrd"]}, "planes.k.transforms.0", "unknown transform 'hadamrd'; did you mean 'hadamard'?"),
        ({"codec": "zst"}, "planes.k.codec", "did you mean 'zstd'?"),
        (
            {"quantizer": {"name": "uniform", "configuration": {"levels": 1}}},
            "planes.k.quantizer.configuration.levels",
            "greater than or equal to 2",
        ),
        (
            {"quantizer": {"name": "uniform", "configuration": {"level": 8}}},
            "planes.k.quantizer.configuration.level",
            "did you mean 'levels'?",
        ),
    ],
)
def test_a_bad_field_is_named_by_its_path(change: dict[str, Any], path: str, message: str) -> None:
    bad = PipelineSpec.model_validate({"planes": {"k": CHAIN | change, "v": CHAIN}})
    with pytest.raises(ConfigError) as caught:
        build(bad, dense(), path="profiles.balanced")
    assert caught.value.path == f"profiles.balanced.{path}"
    assert message in str(caught.value)
    assert str(caught.value).startswith("profiles.balanced.planes.k.")


def test_a_plane_the_model_lacks_is_named() -> None:
    with pytest.raises(UnsupportedSpecError, match="this model has no plane 'k'") as caught:
        build(PipelineSpec.model_validate({"planes": {"k": CHAIN, "*": CHAIN}}), mla())
    assert caught.value.path == "planes.k"


def test_naming_a_composite_and_its_part_is_refused() -> None:
    with pytest.raises(ValueError, match="keep one of the two"):
        PipelineSpec.model_validate({"planes": {"kv": CHAIN, "k": CHAIN}})


def test_lossy_chains_are_refused_for_state() -> None:
    with pytest.raises(UnsupportedSpecError, match="holds state; use a lossless chain"):
        build(spec(CHAIN | {"transforms": []}, "opaque"), hybrid())


def test_unknown_names_are_found_at_build_not_at_encode() -> None:
    with pytest.raises(UnknownNameError, match="allowed: "):
        build(spec(CHAIN | {"quantizer": "nope"}), dense())


@pytest.mark.parametrize(
    "kv", [dense(), dense(heads=1, dim=96), mla(), hybrid()], ids=["dense", "dim96", "mla", "hybrid"]
)
@pytest.mark.parametrize("pipeline", [RAW_PIPELINE, LOSSLESS_PIPELINE], ids=["raw", "lossless"])
def test_exact_pipelines_are_bit_exact(kv: KVSpec, pipeline: PipelineSpec) -> None:
    built = build(pipeline, kv)
    assert built.lossless
    for segment, x, y in roundtrip(built, kv, 300):
        assert torch.equal(x, y), segment.at


@settings(max_examples=25)
@given(
    total=st.integers(1, 600),
    block=st.integers(1, 4),
    plane=st.sampled_from(["*", "kv"]),
    axis=st.sampled_from(["token", "channel", "token_head", "tensor"]),
    levels=st.sampled_from([2, 5, 16, 255, 300]),
    codec=st.sampled_from(["raw", "bitpack", "zstd"]),
)
def test_any_combination_of_components_round_trips(
    total: int, block: int, plane: str, axis: str, levels: int, codec: str
) -> None:
    kv = dense(layers=3)
    quantizer = {"name": "uniform", "configuration": {"levels": levels, "axis": axis}}
    built = build(
        spec({"transforms": ["hadamard"], "quantizer": quantizer, "codec": codec}, plane, layer_block=block), kv
    )
    assert not built.lossless
    for segment, x, y in roundtrip(built, kv, total):
        error = (x.float() - y.float()).abs().max()
        assert error <= (0 if segment.chain == RAW_CHAIN_ID else 4.2 * 8 / (levels - 1)), segment.at


def test_decoding_needs_nothing_but_the_header_and_the_model() -> None:
    kv = dense()
    header, planned = build(spec(), kv).header("t", 300, "p")
    assert [c.stages for c in header.chains] == [
        ("quantizer:identity@1", "codec:raw@1"),
        ("transform:hadamard@1", "quantizer:uniform@1", "codec:zstd@1"),
    ]
    assert len(pack_header(header)) <= 4096
    assert header.num_segments == len(planned)
    assert header.raw_bytes == 300 * kv.token_bytes()


def test_a_segment_that_does_not_shrink_goes_raw() -> None:
    kv = dense()
    built = build(LOSSLESS_PIPELINE, kv)
    header, planned = built.header("t", 2, "p")
    noise = torch.randint(-(2**15), 2**15, (4, 1, 2, 32), dtype=torch.int16).view(torch.bfloat16)
    segments = built.encode([(p, noise) for p in planned])
    assert {s.chain for s in segments} == {RAW_CHAIN_ID}
    assert all(
        torch.equal(y.view(torch.int16), noise.view(torch.int16)) for _, y in Decoder(header, kv).decode(segments)
    )
    sealed = [Codebook(header).seal(s) for s in segments]
    assert all(s.nbytes <= noise.numel() * 2 + 192 for s in sealed)


def test_encode_leaves_its_input_alone_and_is_deterministic() -> None:
    kv = dense()
    built = build(spec(layer_block=2), kv)
    planned = list(built.regions(range(300), 300))
    data = [(p, composed(kv, p.at)) for p in planned]
    before = [x.clone() for _, x in data]
    first, second = built.encode(data), built.encode(data)
    assert all(torch.equal(x, y) for (_, x), y in zip(data, before, strict=True))
    assert [(s.meta, bytes(s.body)) for s in first] == [(s.meta, bytes(s.body)) for s in second]


def test_batches_do_not_change_bytes() -> None:
    kv = dense()
    built = build(spec(), kv)
    data = [(p, composed(kv, p.at)) for p in built.regions(range(300), 300)]
    together = [(s.meta, bytes(s.body)) for s in built.encode(data)]
    apart = [(s.meta, bytes(s.body)) for item in data for s in built.encode([item])]
    assert together == apart


def test_slices_of_heads_have_the_bytes_of_the_whole() -> None:
    kv = dense(heads=4)
    whole_ = {s.at: bytes(s.body) for s in _segments(kv, whole(kv))}
    sliced = {s.at: bytes(s.body) for r in range(4) for s in _segments(kv, Shard(whole(kv).layers, r, 4))}
    assert sliced == whole_


def _segments(kv: KVSpec, shard: Shard) -> list[Segment]:
    built = Pipeline.build(spec(), kv, shard)
    return built.encode([(p, composed(kv, p.at)) for p in built.regions(range(300), 300)])


@pytest.mark.parametrize(
    "at",
    [
        Region(9, "k", (0,), (0,), 0, 4),
        Region(0, "latent", (0,), (0,), 0, 4),
        Region(0, "k", (77,), (0,), 0, 4),
        Region(0, "k", (0,), (5,), 0, 4),
        Region(0, "k", (0, 0), (0,), 0, 4),
    ],
    ids=["group", "plane", "layer", "head", "twice"],
)
def test_a_segment_of_a_place_that_does_not_exist_is_refused(at: Region) -> None:
    kv = dense()
    built = build(RAW_PIPELINE, kv)
    header, planned = built.header("t", 4, "p")
    good = built.encode([(planned[0], composed(kv, planned[0].at))])[0]
    with pytest.raises(FrameError, match=r"group|plane|layers|twice"):
        Decoder(header, kv).decode([Segment(0, at, good.chain, good.meta, good.body)])


def test_a_segment_of_another_size_is_refused() -> None:
    kv = dense()
    built = build(RAW_PIPELINE, kv)
    header, planned = built.header("t", 4, "p")
    good = built.encode([(planned[0], composed(kv, planned[0].at))])[0]
    shorter = Region(*(getattr(good.at, f) for f in ("group", "plane", "layers", "heads", "start")), 3)
    with pytest.raises(FrameError, match=r"does not decode|out of bounds|expected"):
        Decoder(header, kv).decode([Segment(0, shorter, good.chain, good.meta, good.body)])


def test_a_frame_of_another_model_is_refused() -> None:
    header, _ = build(RAW_PIPELINE, dense()).header("t", 4, "p")
    with pytest.raises(FrameError, match="both sides must load the same weights"):
        Decoder(header, dense(dim=64))


def test_planned_regions_of_a_chunk_are_encoded_alone() -> None:
    kv = dense()
    built = build(spec(), kv)
    first = list(built.regions(range(256), 600))
    assert first
    assert all(isinstance(p, Planned) and p.at.stop <= 256 for p in first)
