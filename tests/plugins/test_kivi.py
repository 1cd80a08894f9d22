from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvserve_core.errors import FrameError, NonFiniteError
from kvserve_core.pipeline import Pipeline
from kvserve_core.profile import PipelineSpec
from kvserve_core.spec import DType, KVSpec, LayerGroup, PlanePart, PlaneSpec, Region, whole
from kvserve_core.tensor import Quantized
from kvserve_plugins.quantizers.kivi import Kivi
from kvserve_plugins.quantizers.uniform import Uniform
from plugins.stage_checks import (
    bind,
    check_config,
    check_deterministic,
    check_head_slices,
    check_quantizer,
    model,
    place,
    same_bits,
    values,
)

BOTH = ("token_group", "channel_group")


def kivi(**config: object) -> Kivi:
    return Kivi(Kivi.Config.model_validate(config))


def half_a_step(x: Tensor, q: Quantized, _: Tensor) -> Tensor:
    """The bound of the min-max kernel with the largest step of the head."""
    if not x.numel():
        return x
    return q.params["scale"].float().amax((2, 3, 4))[..., None, None] * 0.51 + 2**-20 * x.abs().amax()


@pytest.mark.parametrize("axis", BOTH)
@pytest.mark.parametrize("bits", [2, 4])
def test_conformance(axis: str, bits: int) -> None:
    check_quantizer(lambda: kivi(axis=axis, bits=bits), half_a_step)
    check_head_slices(lambda: kivi(axis=axis, bits=bits))
    check_deterministic(lambda: kivi(axis=axis, bits=bits))
    check_config(kivi(axis=axis, bits=bits))


@pytest.mark.parametrize("bits", [2, 4])
def test_a_constant_channel_decodes_to_itself(bits: int) -> None:
    x = torch.randn(1, 1, 32, 4, generator=torch.Generator().manual_seed(0)).half()
    x[..., 1] = 3.0
    kv = KVSpec("m", (LayerGroup(0, (0,), (PlaneSpec("k", 1, (PlanePart("k", 4),), DType.F16),)),))
    at = Region(0, "k", (0,), (0,), 0, 32)
    stage = bind(kivi(bits=bits), kv, at)
    back = stage.decode(stage.encode(x, at), at)
    assert back.isfinite().all()
    assert torch.equal(back[..., 1], x[..., 1].float())


def test_groups_of_tokens_are_min_max_per_channel() -> None:
    x, at = values("normal", DType.BF16, 64, 64), place(64)
    stage = bind(kivi(bits=2), model(), at)
    q = stage.encode(x, at)
    assert q.params["lo"].shape == (3, 4, 2, 1, 64)
    assert torch.equal(q.params["lo"][:, :, 1, 0], x[:, :, 32:].amin(2))
    span = x[:, :, 32:].float().amax(2) - x[:, :, 32:].float().amin(2)
    torch.testing.assert_close(q.params["scale"][:, :, 1, 0].float(), span / 3, rtol=2**-6, atol=0)
    assert (q.parts[0].alphabet, q.parts[0].rows) == (4, 12)


def test_groups_of_channels_are_those_of_uniform() -> None:
    x, at = values("outlier", DType.BF16, 17, 96), place(17)
    ours = bind(kivi(axis="channel_group"), model(dim=96), at)
    theirs = bind(Uniform(Uniform.Config(axis="group", group_size=32, levels=16)), model(dim=96), at)
    assert same_bits(ours.decode(ours.encode(x, at), at), theirs.decode(theirs.encode(x, at), at))


def test_a_loud_group_does_not_touch_the_next() -> None:
    x, at = values("normal", DType.F32, 64, 64), place(64)
    stage = bind(kivi(), model(DType.F32), at)
    clean = stage.decode(stage.encode(x, at), at)
    x[:, :, 32:] *= 1e6
    loud = stage.decode(stage.encode(x, at), at)
    assert torch.equal(loud[:, :, :32], clean[:, :, :32])


def test_what_is_short_of_a_group_of_tokens_goes_raw() -> None:
    kv = model(dim=64)
    chain = {"quantizer": {"name": "kivi", "configuration": {"bits": 2}}, "codec": "bitpack"}
    spec = PipelineSpec.model_validate({"planes": {"*": chain}, "sink_tokens": 0})
    _, plan = Pipeline.build(spec, kv, whole(kv)).header("r", 300, "kivi")
    tails = {(p.at.start, p.at.stop): p.chain for p in plan if p.at.start >= 256}
    assert tails == {(256, 288): 1, (288, 300): 0}
    assert kivi(axis="channel_group").caps.token_multiple == 1


def test_codes_take_two_or_four_bits() -> None:
    assert kivi(bits=2).caps.max_alphabet == 4
    assert kivi(bits=4).caps.max_alphabet == 16
    with pytest.raises(ValueError, match="bits"):
        kivi(bits=3)


def test_non_finite_input_is_refused() -> None:
    x, at = values("normal", DType.BF16, 32, 64), place(32)
    x[1, 1, 1, 1] = float("inf")
    with pytest.raises(NonFiniteError, match="raw"):
        bind(kivi(), model(), at).encode(x, at)


@pytest.mark.parametrize("name", ["lo", "scale"])
def test_parameters_of_another_shape_are_refused(name: str) -> None:
    x, at = values("normal", DType.BF16, 64, 64), place(64)
    stage = bind(kivi(), model(), at)
    q = stage.encode(x, at)
    with pytest.raises(FrameError, match=f"'{name}'"):
        stage.decode(Quantized(q.parts, {**q.params, name: q.params[name][:, :, :1]}, q.shape), at)
