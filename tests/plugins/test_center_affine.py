from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvserve_core.spec import DType
from kvserve_core.stages import Transform
from kvserve_plugins.kernels.channels import scales
from kvserve_plugins.transforms.affine import Affine
from kvserve_plugins.transforms.center import Center
from plugins.stage_checks import (
    bind,
    check_config,
    check_deterministic,
    check_head_slices,
    check_transform,
    model,
    place,
    values,
)


def center() -> Center:
    return Center(Center.Config())


def affine(scale: str = "std", shift: bool = True) -> Callable[[], Affine]:
    return lambda: Affine(Affine.Config.model_validate({"scale": scale, "shift": shift}))


MAKERS = [center, affine(), affine("max"), affine("std", False), affine("max", False)]


@pytest.mark.parametrize("make", MAKERS)
def test_round_trip(make: Callable[[], Transform]) -> None:
    check_transform(make)


@pytest.mark.parametrize("make", MAKERS)
def test_slices_and_repeats(make: Callable[[], Transform]) -> None:
    check_head_slices(make)
    check_deterministic(make)
    check_config(make())


def test_centred_channels_have_mean_zero_up_to_the_rounding_of_their_means() -> None:
    x, at = values("normal", DType.F32, 256, 64) + 100, place(256)
    y, params = bind(center(), model(DType.F32), at).encode(x, at)
    mean = params["mean"]
    assert (mean.dtype, tuple(mean.shape)) == (torch.bfloat16, (3, 4, 1, 64))
    assert (y.mean(2).abs() <= mean[:, :, 0].float().abs() * 2**-8).all()
    assert torch.equal(y, x - mean.float())


@pytest.mark.parametrize("shift", [False, True])
def test_scaled_channels_are_of_one_size(shift: bool) -> None:
    x, at = values("outlier", DType.F32, 256, 64), place(256)
    for kind in ("std", "max"):
        y, params = bind(affine(kind, shift)(), model(DType.F32), at).encode(x, at)
        assert params.keys() == ({"scale", "shift"} if shift else {"scale"})
        size = y.square().mean(2).sqrt() if kind == "std" else y.abs().amax(2)
        torch.testing.assert_close(size, torch.ones_like(size), atol=0.01, rtol=0)


def test_a_channel_of_zeros_stays() -> None:
    x, at = torch.zeros(3, 4, 17, 64), place(17)
    stage = bind(affine()(), model(DType.F32), at)
    y, params = stage.encode(x, at)
    assert torch.equal(y, x)
    assert torch.equal(stage.decode(y, params, at), x)


def test_squares_do_not_overflow_and_without_tokens_scales_are_zero() -> None:
    x = torch.tensor([1e38, -3e38]).reshape(1, 1, 2, 1)
    torch.testing.assert_close(scales(x, "std").flatten(), torch.tensor([5**0.5 * 1e38]))
    assert scales(x[:, :, :0], "std").tolist() == [[[[0.0]]]]


def test_both_sides_use_what_is_sent() -> None:
    x, at = values("normal", DType.F32, 17, 64) * 3 + 7, place(17)
    stage = bind(affine()(), model(DType.F32), at)
    y, params = stage.encode(x, at)
    sent = {name: value.clone() for name, value in params.items()}
    torch.testing.assert_close(stage.decode(y, sent, at), x, atol=1e-5, rtol=1e-5)
    sent["scale"] = sent["scale"] * 2
    assert not torch.allclose(stage.decode(y, sent, at), x, atol=0.1)
