"""The peephole: a chain does without its kernel when that cannot be built, declines, fails or raises a flag."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvserve_core import DType, KVSpec, LayerGroup, Pipeline, PlanePart, PlaneSpec
from kvserve_core.decoder import Decoder
from kvserve_core.payload import PartMeta
from kvserve_core.plan import Planned
from kvserve_core.spec import Region, whole
from kvserve_core.stages import Fused, Fusion, Quantizer, Transform
from kvserve_core.tensor import Params, on_host
from kvserve_core.wire import FrameHeader
from kvserve_plugins.quantizers.uniform import Uniform

KV = KVSpec("m", (LayerGroup(0, (0, 1), (PlaneSpec("k", 2, (PlanePart("k", 32),), DType.BF16),)),))


class OutOfResources(Exception):
    """As Triton's: no RuntimeError."""


class Recorder(Fusion):
    """The stages themselves, as a fusion; ``fault`` says what goes wrong."""

    with_codec = False

    def __init__(self, fault: str = "") -> None:
        self.fault, self.calls = fault, 0
        self._quantizer: Quantizer

    def bind(self, at: Region, transforms: Sequence[Transform], quantizer: Quantizer) -> bool:
        self._quantizer = quantizer
        return self.fault != "bind"

    def takes(self, x: Tensor, at: Region) -> bool:
        return self.fault != "takes"

    def encode(self, batch: Sequence[tuple[Region, Tensor]]) -> list[Fused]:
        self.calls += 1
        if self.fault == "launch":
            raise OutOfResources("out of resources")
        ok = torch.tensor(self.fault != "flag")
        return [Fused([q.params], q, None, ok) for q in (self._quantizer.encode(x, at) for at, x in batch)]

    def reads(self, stages: Sequence[Params], parts: Sequence[PartMeta], at: Region) -> bool:
        return self.fault == "decode"

    def decode(self, batch: Sequence[Any]) -> Any:
        self.calls += 1
        raise OutOfResources("out of resources")


def built() -> tuple[Pipeline, FrameHeader, list[tuple[Planned, Tensor]]]:
    pipeline = Pipeline.build(
        {"planes": {"*": {"quantizer": "uniform", "codec": "zstd"}}, "sink_tokens": 0}, KV, whole(KV)
    )
    header, planned = pipeline.header("r", 300, "p")
    torch.manual_seed(0)
    return pipeline, header, [(p, torch.randn(1, len(p.at.heads), p.at.num_tokens, 32).bfloat16()) for p in planned]


def segments(monkeypatch: pytest.MonkeyPatch, fuse: Any) -> list[Any]:
    monkeypatch.setattr(Uniform, "fuse", fuse)
    pipeline, _, batch = built()
    return [replace(s, body=bytes(s.body)) for s in pipeline.encode(batch)]


@pytest.mark.parametrize("fault", ["", "bind", "takes", "launch", "flag"])
def test_the_bytes_are_those_of_the_stages_whatever_happens(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fusion = Recorder(fault)
    made = segments(monkeypatch, lambda *_: fusion)
    assert fusion.calls == (fault not in ("bind", "takes"))
    assert made == segments(monkeypatch, lambda *_: None)


def test_a_kernel_that_failed_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fusion = Recorder("launch")
    monkeypatch.setattr(Uniform, "fuse", lambda *_: fusion)
    pipeline, _, batch = built()
    with caplog.at_level(logging.WARNING):
        pipeline.encode(batch)
        pipeline.encode(batch)
    assert fusion.calls == 1
    assert caplog.text.count("stage by stage, a kernel failed: OutOfResources") == 1


def test_what_a_kernel_cannot_decode_the_stages_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Uniform, "fuse", lambda *_: None)
    pipeline, header, batch = built()
    made = pipeline.encode(batch)
    expected = Decoder(header, KV).decode(made)
    fusion = Recorder("decode")
    monkeypatch.setattr(Uniform, "fuse", lambda *_: fusion)
    decoder = Decoder(header, KV)
    for _ in range(2):
        assert all(torch.equal(x, y) for (_, x), (_, y) in zip(decoder.decode(made), expected, strict=True))
    assert fusion.calls == 1


def test_a_kernel_that_cannot_be_built_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ImportError("no triton")

    with caplog.at_level(logging.WARNING):
        made = segments(monkeypatch, broken)
    assert "planes.* runs stage by stage: ImportError: no triton" in caplog.text
    assert made == segments(monkeypatch, lambda *_: None)


def test_tensors_of_the_host_stay_where_they_are() -> None:
    x, y = torch.arange(6).reshape(2, 3), torch.arange(4)[::2]
    a, b = on_host([x, y])
    assert a is x
    assert b.is_contiguous()
    assert torch.equal(b, y)
