from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvserve_core.tensor import Quantized
from kvserve_plugins.quantizers.fp8 import AXES, FP8, LARGEST, values
from plugins.quantizer_checks import check_all, check_largest_floats, check_not_a_number, check_parameter, coded
from plugins.stage_checks import CPU, check_head_slices


def fp8(**config: object) -> FP8:
    return FP8(FP8.Config.model_validate(config))


def documented(x: Tensor, q: Quantized, _: Tensor) -> Tensor:
    return torch.maximum(x.abs() / 16, q.params["scale"].float() * 2**-10) * (1 + 2**-20)


@pytest.mark.parametrize("axis", AXES)
def test_conformance(axis: str) -> None:
    check_all(lambda: fp8(axis=axis), documented)
    check_head_slices(lambda: fp8(axis=axis))


def test_the_table_is_torch_s_e4m3() -> None:
    every = torch.arange(256).to(torch.uint8)
    expected = every.view(torch.float8_e4m3fn).to(torch.float32)
    assert torch.equal(values(CPU).isnan(), expected.isnan())
    assert torch.equal(values(CPU).nan_to_num(0), expected.nan_to_num(0))


def test_values_beyond_448_do_not_saturate() -> None:
    def change(x: Tensor) -> None:
        x[0, 0, 0, 0], x[0, 0, 0, 1] = 12345.0, -6000.0

    made = coded(fp8(), change=change)
    torch.testing.assert_close(made.back[0, 0, 0, :2], made.x[0, 0, 0, :2].float(), rtol=1 / 16, atol=0)


@pytest.mark.parametrize("axis", AXES)
def test_the_largest_value_of_a_group_just_fits(axis: str) -> None:
    q = coded(fp8(axis=axis), tokens=256).q
    top = values(CPU)[q.parts[0].codes.view(q.shape).long()].abs().amax(AXES[axis])
    assert (top <= LARGEST).all()
    assert (top >= 416).all()  # the step below 448, as the scale is rounded up


def test_the_largest_floats_survive() -> None:
    made = check_largest_floats(fp8())
    assert ((made.back - made.x.float()).abs() <= made.x.abs().amax().float() / 16).all()


def test_what_it_cannot_take_is_refused() -> None:
    check_not_a_number(fp8(), float("nan"))
    check_parameter(fp8(), "scale")
