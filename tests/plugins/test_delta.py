from __future__ import annotations

import pytest
import torch

from kvserve_core.decoder import Decoder
from kvserve_core.errors import FrameError, NonFiniteError
from kvserve_core.pipeline import Pipeline
from kvserve_core.profile import PipelineSpec
from kvserve_core.spec import DType, whole
from kvserve_core.testing.cases import by_dim, by_tokens, by_value
from kvserve_plugins.transforms.delta import Delta, followers
from plugins.stage_checks import CPU, bind, model, place, run, subject, values


def delta(size: int = 10) -> Delta:
    return Delta(Delta.Config(group_tokens=size))


@pytest.mark.parametrize("size", [2, 10, 16])
def test_conformance(size: int) -> None:
    run(subject(lambda: delta(size)))


@pytest.mark.parametrize("size", [2, 10, 16])
def test_anchors_are_off_by_their_step_and_the_others_by_rounding(size: int) -> None:
    made = subject(lambda: delta(size))
    for case in (*by_value(made), *by_dim(made), *by_tokens(made)):
        stage, x = made.bound(case.kv, case.at), case.x.float()
        if not x.numel():
            continue
        back = stage.decode(*stage.encode(case.x, case.at), case.at)
        span = x.amax(-1) - x.amin(-1)
        assert ((back - x).abs().amax(-1) <= span / 500 + 2**-16 * x.abs().amax(-1) + 1e-37).all(), str(case)
        follow = torch.arange(x.shape[2]) % size != 0
        assert ((back - x)[:, :, follow].abs() <= 1e-6 * x.abs().amax()).all(), str(case)


def test_differences_are_to_the_decoded_anchor() -> None:
    x, at = values("normal", DType.BF16, 25, 64), place(25)
    stage = bind(delta(), model(), at)
    y, params = stage.encode(x, at)
    assert params["anchor"].shape == (3, 4, 3, 64)
    assert params["anchor"].dtype == torch.uint8
    anchors = stage.decode(torch.zeros_like(y), params, at)[:, :, ::10]
    assert not torch.equal(anchors, x[:, :, ::10].float())  # 8 bits are not exact, and the loop is closed over that
    torch.testing.assert_close(y[:, :, :9], x[:, :, 1:10].float() - anchors[:, :, :1])
    torch.testing.assert_close(y[:, :, 18:], x[:, :, 21:].float() - anchors[:, :, 2:])


def test_who_follows_whom() -> None:
    token, group = followers(8, 3, CPU)
    assert token.tolist() == [1, 2, 4, 5, 7]
    assert group.tolist() == [0, 0, 1, 1, 2]


def test_tokens_that_resemble_their_anchor_leave_little() -> None:
    base, at = values("normal", DType.F32, 26, 64), place(260)
    x = base.repeat_interleave(10, 2) + 0.01 * torch.randn(3, 4, 260, 64, generator=torch.Generator().manual_seed(1))
    y, _ = bind(delta(), model(DType.F32), at).encode(x, at)
    assert y.std() < 0.03


def test_in_a_pipeline_with_a_ragged_end() -> None:
    kv = model()
    chain = {"transforms": ["delta"], "quantizer": {"name": "uniform", "configuration": {"levels": 256}}}
    pipeline = Pipeline.build(PipelineSpec.model_validate({"planes": {"*": chain}}), kv, whole(kv))
    header, plan = pipeline.header("r", 303, "delta")
    x = torch.randn(3, 4, 303, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    cut = [(p, x[list(p.at.layers)][:, list(p.at.heads), p.at.start : p.at.stop]) for p in plan]
    for at, got in Decoder(header, kv).decode(pipeline.encode(cut)):
        want = x[list(at.layers)][:, list(at.heads), at.start : at.stop]
        torch.testing.assert_close(got.float(), want.float(), rtol=0.01, atol=0.05)


def test_non_finite_anchors_are_refused() -> None:
    x, at = values("normal", DType.BF16, 17, 64), place(17)
    x[0, 0, 10, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="raw"):
        bind(delta(), model(), at).encode(x, at)


@pytest.mark.parametrize("name", ["anchor", "lo", "scale"])
def test_anchors_for_other_tokens_are_refused(name: str) -> None:
    x, at = values("normal", DType.BF16, 25, 64), place(25)
    stage = bind(delta(), model(), at)
    y, params = stage.encode(x, at)
    with pytest.raises(FrameError, match=f"parameter {name!r} is"):
        stage.decode(y, {**params, name: params[name][:, :, :2]}, at)
    with pytest.raises(FrameError, match="21 differences do not fit 25 tokens"):
        stage.decode(y[:, :, 1:], params, at)
