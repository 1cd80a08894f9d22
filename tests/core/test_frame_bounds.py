"""What real pipelines put on the wire: never more than raw plus the fixed overhead, whatever the values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_cases import CHAINS, decode_file, planes
from frame_cases import make_file
from kvserve_core.pipeline import Pipeline
from kvserve_core.profile import Chain, PipelineSpec
from kvserve_core.spec import DType, KVSpec, LayerGroup, whole

KINDS = ("random", "constant", "noise bits", "nan", "zero")


def values(kind: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "noise bits":
        bits = torch.randint(-(2**15), 2**15, shape, generator=generator).to(torch.int16)
        return bits.view(torch.bfloat16)
    x = torch.randn(shape, generator=generator).bfloat16()
    if kind == "nan":
        x.view(-1)[seed % x.numel()] = float("nan")
    return {"constant": torch.full(shape, 0.1).bfloat16(), "zero": torch.zeros(shape).bfloat16()}.get(kind, x)


@given(
    st.sampled_from(sorted(CHAINS)),
    st.sampled_from(KINDS),
    st.integers(1, 70),
    st.integers(0, 8),
    st.sampled_from([1, 3, 16, 96]),
    st.integers(0, 2**31),
)
@settings(max_examples=150, deadline=None)
def test_a_file_stays_within_its_bound(name: str, kind: str, tokens: int, sinks: int, dim: int, seed: int) -> None:
    kv = KVSpec("tests/bounds", (LayerGroup(0, (0, 1), planes(2, dim, DType.BF16)),))
    chain = Chain.model_validate(CHAINS[name])
    spec = PipelineSpec(planes={"*": chain}, head_groups=1, segment_tokens=16, sink_tokens=sinks)
    pipeline = Pipeline.build(spec, kv, whole(kv))
    header, planned = pipeline.header("r", tokens, name)
    inputs = {p.at: values(kind, (len(p.at.layers), 2, p.at.num_tokens, dim), seed + p.index) for p in planned}
    data = make_file(header, pipeline.encode([(p, inputs[p.at]) for p in planned]))
    assert len(data) <= header.raw_bytes + (192 + 48) * len(planned) + 4096
    out = decode_file(data, kv)
    assert out.keys() == inputs.keys()
    for at, x in out.items():
        if pipeline.lossless:
            assert torch.equal(x.view(torch.int16), inputs[at].view(torch.int16))
        elif not inputs[at].isfinite().all():
            assert torch.equal(x.view(torch.int16), inputs[at].view(torch.int16)), "sent raw, bit for bit"


@pytest.mark.parametrize("name", sorted(CHAINS.keys() - {"mixhq"}))  # its scores are for two layers
def test_incompressible_segments_go_raw(name: str) -> None:
    kv = KVSpec("tests/bounds", (LayerGroup(0, (0,), planes(2, 1, DType.BF16)),))
    spec = PipelineSpec(planes={"*": Chain.model_validate(CHAINS[name] | {"transforms": []})}, sink_tokens=0)
    pipeline = Pipeline.build(spec, kv, whole(kv))
    _, planned = pipeline.header("r", 1, name)
    batch = [(p, torch.ones(1, len(p.at.heads), 1, 1).bfloat16()) for p in planned]
    assert {s.chain for s in pipeline.encode(batch)} == {0}
