from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvserve_core.errors import FrameError, NonFiniteError
from kvserve_core.spec import DType
from kvserve_core.tensor import Quantized
from kvserve_plugins.quantizers.fp8 import AXES, FP8, LARGEST, values
from plugins.stage_checks import (
    CPU,
    bind,
    check_config,
    check_deterministic,
    check_head_slices,
    check_quantizer,
    model,
    place,
)
from plugins.stage_checks import values as data


def fp8(**config: object) -> FP8:
    return FP8(FP8.Config.model_validate(config))


def documented(x: Tensor, q: Quantized, _: Tensor) -> Tensor:
    return torch.maximum(x.abs() / 16, q.params["scale"].float() * 2**-10) * (1 + 2**-20)


@pytest.mark.parametrize("axis", AXES)
def test_conformance(axis: str) -> None:
    check_quantizer(lambda: fp8(axis=axis), documented)
    check_head_slices(lambda: fp8(axis=axis))
    check_deterministic(lambda: fp8(axis=axis))
    check_config(fp8(axis=axis))


def test_the_table_is_torch_s_e4m3() -> None:
    every = torch.arange(256).to(torch.uint8)
    expected = every.view(torch.float8_e4m3fn).to(torch.float32)
    assert torch.equal(values(CPU).isnan(), expected.isnan())
    assert torch.equal(values(CPU).nan_to_num(0), expected.nan_to_num(0))


def test_values_beyond_448_do_not_saturate() -> None:
    x, at = data("normal", DType.BF16, 17, 64), place(17)
    x[0, 0, 0, 0], x[0, 0, 0, 1] = 12345.0, -6000.0
    stage = bind(fp8(), model(), at)
    back = stage.decode(stage.encode(x, at), at)
    torch.testing.assert_close(back[0, 0, 0, :2], x[0, 0, 0, :2].float(), rtol=1 / 16, atol=0)


@pytest.mark.parametrize("axis", AXES)
def test_the_largest_value_of_a_group_just_fits(axis: str) -> None:
    x, at = data("normal", DType.BF16, 256, 64), place(256)
    q = bind(fp8(axis=axis), model(), at).encode(x, at)
    top = values(CPU)[q.parts[0].codes.view(q.shape).long()].abs().amax(AXES[axis])
    assert (top <= LARGEST).all()
    assert (top >= 416).all()  # the step below 448, as the scale is rounded up


def test_the_largest_floats_survive() -> None:
    x, at = data("normal", DType.BF16, 17, 64), place(17)
    x[:, :, ::2, ::3] = torch.finfo(torch.bfloat16).max
    stage = bind(fp8(), model(), at)
    back = stage.decode(stage.encode(x, at), at)
    assert back.isfinite().all()
    assert ((back - x.float()).abs() <= x.abs().amax().float() / 16).all()


def test_non_finite_input_is_refused() -> None:
    x, at = data("normal", DType.BF16, 17, 64), place(17)
    x[1, 1, 1, 1] = float("nan")
    with pytest.raises(NonFiniteError, match="raw"):
        bind(fp8(), model(), at).encode(x, at)


def test_a_scale_of_another_shape_is_refused() -> None:
    x, at = data("normal", DType.BF16, 17, 64), place(17)
    stage = bind(fp8(), model(), at)
    q = stage.encode(x, at)
    with pytest.raises(FrameError, match="'scale'"):
        stage.decode(Quantized(q.parts, {"scale": q.params["scale"][:1]}, q.shape), at)
