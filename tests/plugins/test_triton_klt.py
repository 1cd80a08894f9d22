"""The kernels behind ``klt`` and ``fixed_step`` in Triton's interpreter (or on a GPU) against these stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvserve_core import Pipeline
from kvserve_core.artefacts import Artefacts
from kvserve_core.decoder import Decoder
from kvserve_core.spec import whole
from kvserve_plugins.kernels import fused_klt
from plugins.klt_files import OVER_ALL, PER_HEAD, Source, model
from triton_cases import DEVICE


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Kernels on, and how many segments went through them."""
    seen: list[int] = []
    monkeypatch.setattr(fused_klt, "available", lambda device: True)
    for name in ("encode", "decode"):
        inner = getattr(fused_klt.Projection, name)

        def counted(self: Any, batch: Any, inner: Any = inner) -> Any:
            seen.append(len(batch))
            return inner(self, batch)

        monkeypatch.setattr(fused_klt.Projection, name, counted)
    return seen


def made(per: str, step: float = 0.25) -> tuple[Pipeline, Artefacts]:
    artefacts = Artefacts()
    basis = artefacts.add(Source().file(PER_HEAD if per == "head" else OVER_ALL))
    klt = {"name": "klt", "configuration": {"basis": basis, "per": per}}
    codec = "zstd" if DEVICE.type == "cpu" else "bitpack"
    chain = {
        "transforms": [klt], "quantizer": {"name": "fixed_step", "configuration": {"step": step}}, "codec": codec,
    }  # fmt: skip
    spec = {"planes": {"kv": chain}, "layer_block": 2, "sink_tokens": 0, "head_groups": 1}
    return Pipeline.build(spec, model(), whole(model()), DEVICE, artefacts=artefacts), artefacts


def batch_of(pipeline: Pipeline, total: int) -> tuple[Any, list[tuple[Any, Tensor]]]:
    header, planned = pipeline.header("r", total, "p")
    return header, [(p, Source().values(p.at, model(), p.index).to(DEVICE)) for p in planned]


@pytest.mark.parametrize("per", ["head", "all"])
def test_kernels_and_stages_read_each_other(per: str, fused: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, artefacts = made(per)
    header, batch = batch_of(pipeline, 256 if per == "all" else 70)  # full cells, and one that is not
    segments = pipeline.encode(batch)
    assert fused == [len(batch)]
    assert all(s.chain != 0 for s in segments)
    mine = [x for _, x in Decoder(header, model(), DEVICE, artefacts=artefacts).decode(segments)]
    assert fused == [len(batch)] * 2
    monkeypatch.setattr(fused_klt, "available", lambda device: False)
    theirs = [x for _, x in Decoder(header, model(), DEVICE, artefacts=artefacts).decode(segments)]
    plain, again = made(per)
    reference = Decoder(header, model(), DEVICE, artefacts=again).decode(plain.encode(batch))
    for (_, x), a, b, (_, ideal) in zip(batch, mine, theirs, reference, strict=True):
        scale = x.float().abs().amax()
        assert (a.float() - b.float()).abs().amax() <= 2**-6 * scale
        assert (a.float() - x.float()).norm() <= 1.05 * (ideal.float() - x.float()).norm()


def test_what_does_not_fit_into_bytes_goes_stage_by_stage(fused: list[int]) -> None:
    pipeline, artefacts = made("head", step=0.01)
    header, batch = batch_of(pipeline, 64)
    segments = pipeline.encode(batch)
    assert all(s.chain != 0 for s in segments)
    decoded = Decoder(header, model(), DEVICE, artefacts=artefacts).decode(segments)
    assert fused == [len(batch)]  # codes of two bytes are not for the kernels
    for (_, x), (_, y) in zip(batch, decoded, strict=True):
        assert (x.float() - y.float()).abs().amax() <= 2**-6 * x.float().abs().amax()


def test_strange_values_go_raw(fused: list[int]) -> None:
    pipeline, artefacts = made("head")
    header, batch = batch_of(pipeline, 64)
    batch[1] = (batch[1][0], 50 * torch.randn(batch[1][1].shape, device=DEVICE).bfloat16())
    segments = pipeline.encode(batch)
    assert [s.chain == 0 for s in segments] == [i == 1 for i in range(len(batch))]
    assert torch.equal(Decoder(header, model(), DEVICE, artefacts=artefacts).decode(segments)[1][1], batch[1][1])
