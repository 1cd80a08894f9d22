from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvserve_core.component import tunables
from kvserve_core.errors import NonFiniteError, UnsupportedSpecError
from kvserve_core.spec import DType, KVSpec, LayerGroup, PlanePart, PlaneSpec, Region
from kvserve_core.stages import Quantizer
from kvserve_core.tensor import TORCH, Quantized
from kvserve_plugins.quantizers.bitplane import Bitplane
from kvserve_plugins.quantizers.channel_mean import ChannelMean
from kvserve_plugins.quantizers.identity import Identity
from kvserve_plugins.quantizers.uniform import AXES, Axis, Uniform
from plugins.stage_checks import (
    FLOATS,
    any_bits,
    bind,
    check_config,
    check_deterministic,
    check_exact_bits,
    check_head_slices,
    check_quantizer,
    model,
    place,
    same_bits,
    values,
)


def identity() -> Identity:
    return Identity(Identity.Config())


def bitplane() -> Bitplane:
    return Bitplane(Bitplane.Config())


def channel_mean() -> ChannelMean:
    return ChannelMean(ChannelMean.Config())


def uniform(**config: object) -> Uniform:
    return Uniform(Uniform.Config.model_validate(config))


def bound_of(levels: int, axis: Axis, group_size: int) -> Callable[[Tensor, Quantized, Tensor], Tensor]:
    """The documented bound, with each value's own scale and the largest magnitude of everything."""

    def limit(x: Tensor, q: Quantized, _: Tensor) -> Tensor:
        scale = q.params["scale"].float()
        if axis == "group":
            scale = scale.expand(*scale.shape[:-1], group_size).flatten(-2)[..., : x.shape[-1]]
        return scale * (0.5 + levels * 2**-22) + 2**-22 * x.abs().amax(-1, keepdim=True).amax(1, keepdim=True)

    return limit


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("levels", [2, 16, 255])
def test_uniform_error_bound(axis: Axis, levels: int) -> None:
    size = 32
    check_quantizer(lambda: uniform(axis=axis, levels=levels, group_size=size), bound_of(levels, axis, size))


@pytest.mark.parametrize("levels", [257, 4096, 32768])
def test_uniform_wide_codes(levels: int) -> None:
    check_quantizer(lambda: uniform(levels=levels, axis="token_head"), bound_of(levels, "token_head", 1))


def test_uniform_f32_parameters() -> None:
    check_quantizer(lambda: uniform(param_dtype="f32", levels=16), bound_of(16, "channel", 1))


@pytest.mark.parametrize("make", [identity, bitplane])
def test_exact_quantizers(make: Callable[[], Quantizer]) -> None:
    check_quantizer(make)
    check_exact_bits(make)
    check_head_slices(make)
    check_deterministic(make)
    check_config(make())


def test_channel_mean() -> None:
    check_quantizer(channel_mean)
    check_head_slices(channel_mean)
    check_config(channel_mean())
    x, at = values("normal", DType.BF16, 17, 64), place(17)
    back = bind(channel_mean(), model(), at)
    decoded = back.decode(back.encode(x, at), at)
    torch.testing.assert_close(decoded[:, :, 5], x.float().mean(2), atol=0, rtol=2**-8)


def test_channel_mean_of_constants_and_of_the_largest_values() -> None:
    at, stage = place(256), bind(channel_mean(), model(), place(256))
    for number in (3.0, -0.0, 3.3895313892515355e38):
        x = torch.full((3, 4, 256, 64), number)
        assert torch.equal(stage.decode(stage.encode(x, at), at), x)


@pytest.mark.parametrize("axis", AXES)
def test_uniform_slices_and_repeats(axis: Axis) -> None:
    stage = uniform(axis=axis)
    assert stage.caps.head_local == (axis in ("channel", "token_head", "group"))
    check_deterministic(lambda: uniform(axis=axis))
    check_config(stage)
    if stage.caps.head_local:
        check_head_slices(lambda: uniform(axis=axis, group_size=40))


def test_capabilities_follow_the_configuration_and_leave_the_class_alone() -> None:
    assert uniform(levels=12).caps.max_alphabet == 12
    assert not uniform(axis="tensor").caps.head_local
    assert Uniform.caps.head_local
    assert Uniform.caps.max_alphabet == 2**15


@pytest.mark.parametrize(
    ("axis", "shape"),
    [
        ("token", (3, 1, 17, 1)),
        ("channel", (3, 4, 1, 96)),
        ("token_head", (3, 4, 17, 1)),
        ("tensor", (3, 1, 1, 1)),
        ("group", (3, 4, 17, 3, 1)),
    ],
)
def test_uniform_groups(axis: Axis, shape: tuple[int, ...]) -> None:
    x, at = values("normal", DType.BF16, 17, 96), place(17)
    q = bind(uniform(axis=axis, group_size=40), model(dim=96), at).encode(x, at)
    assert {name: tuple(v.shape) for name, v in q.params.items()} == {"lo": shape, "scale": shape}
    assert all(v.dtype == torch.bfloat16 for v in q.params.values())
    assert (q.parts[0].rows, q.parts[0].alphabet) == (12, 16)


def test_a_group_sees_only_its_own_channels() -> None:
    x, at = values("normal", DType.F32, 17, 96), place(17)
    stage = bind(uniform(axis="group", group_size=40), model(DType.F32, 96), at)
    clean = stage.decode(stage.encode(x, at), at)
    x[..., 80:] *= 1e6  # the last, short group
    loud = stage.decode(stage.encode(x, at), at)
    assert torch.equal(loud[..., :80], clean[..., :80])
    assert not torch.equal(loud[..., 80:], clean[..., 80:])


def test_codes_of_a_head_lie_together() -> None:
    x, at = values("normal", DType.BF16, 17, 64), place(17)
    whole = bind(uniform(), model(), at).encode(x, at).parts[0].codes.view(12, -1)
    one = place(17, layers=(1,), heads=(2,))
    alone = bind(uniform(), model(), one).encode(x[1:2, 2:3], one).parts[0].codes
    assert torch.equal(whole[1 * 4 + 2], alone)


def test_more_levels_mean_less_error() -> None:
    x, at = values("normal", DType.BF16, 256, 64), place(256)
    errors = []
    for levels in (2, 3, 6, 16, 64, 256):
        stage = bind(uniform(levels=levels), model(), at)
        errors.append(float((stage.decode(stage.encode(x, at), at) - x.float()).pow(2).mean()))
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("levels", [2, 4, 16])
def test_a_constant_channel_decodes_to_itself(levels: int) -> None:
    x = torch.randn(1, 1, 32, 4, generator=torch.Generator().manual_seed(0)).half()
    x[..., 1] = 3.0
    kv = KVSpec("m", (LayerGroup(0, (0,), (PlaneSpec("k", 1, (PlanePart("k", 4),), DType.F16),)),))
    at = Region(0, "k", (0,), (0,), 0, 32)
    stage = bind(uniform(levels=levels), kv, at)
    back = stage.decode(stage.encode(x, at), at)
    assert back.isfinite().all()
    assert torch.equal(back[..., 1], x[..., 1].float())


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16])
@pytest.mark.parametrize("levels", [2, 3, 16, 255, 256])
def test_every_finite_constant_of_a_plane_decodes_to_itself(dtype: DType, levels: int) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(TORCH[dtype])
    constants = every[every.float().isfinite()]
    x = constants.view(1, 1, 1, -1).expand(1, 1, 3, -1)
    stage, at = uniform(levels=levels), place(3)
    back = stage.decode(stage.encode(x, at), at).to(TORCH[dtype])
    assert torch.equal(back, x)


@pytest.mark.parametrize(("params", "relative"), [("bf16", 2**-14), ("f32", 2**-23)])
def test_constants_in_f32(params: str, relative: float) -> None:
    constants = torch.randn(4096, generator=torch.Generator().manual_seed(2)).double().exp().pow(9).float()
    x = constants.view(1, 1, 1, -1).expand(1, 1, 5, -1)
    stage, at = uniform(param_dtype=params), place(5)
    back = stage.decode(stage.encode(x, at), at)
    assert ((back - x).abs() <= relative * x.abs()).all()


@pytest.mark.parametrize("levels", [2, 3, 4, 16, 256, 257])
@pytest.mark.parametrize("axis", AXES)
def test_the_full_range_of_bf16_does_not_overflow(levels: int, axis: Axis) -> None:
    largest = torch.finfo(torch.bfloat16).max
    x, at = values("normal", DType.BF16, 17, 64), place(17)
    x[:, :, ::2, ::3] = largest
    x[:, :, 1::2, ::2] = -largest
    stage = bind(uniform(levels=levels, axis=axis), model(), at)
    q = stage.encode(x, at)
    assert all(v.isfinite().all() for v in q.params.values())
    back = stage.decode(q, at)
    assert back.isfinite().all()
    step = 2 * largest / (levels - 1)
    assert ((back.double() - x.double()).abs() <= step * 0.51).all()


def test_metadata_holds_large_values() -> None:
    x, at = torch.full((3, 4, 17, 128), 6000.0), place(17)
    x[:, :, ::3] = 1.2e5
    stage = bind(uniform(levels=256), model(dim=128), at)
    q = stage.encode(x.bfloat16(), at)
    assert q.params["scale"].isfinite().all()
    torch.testing.assert_close(stage.decode(q, at), x.bfloat16().float(), rtol=0.05, atol=0)


@pytest.mark.parametrize("make", [uniform, channel_mean])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", FLOATS)
def test_non_finite_input_is_refused(make: Callable[[], Quantizer], bad: float, dtype: DType) -> None:
    x, at = values("normal", dtype, 17, 64), place(17)
    x[1, 2, 3, 4] = bad
    with pytest.raises(NonFiniteError, match="raw"):
        bind(make(), model(dtype), at).encode(x, at)


def test_both_infinities_are_refused_by_channel_mean() -> None:
    x, at = values("normal", DType.F32, 17, 64), place(17)
    x[0, 0, 0, 0], x[0, 0, 1, 0] = float("inf"), -float("inf")
    with pytest.raises(NonFiniteError):
        bind(channel_mean(), model(DType.F32), at).encode(x, at)


@pytest.mark.parametrize("make", [identity, bitplane])
def test_exact_quantizers_refuse_the_f32_of_a_transform(make: Callable[[], Quantizer]) -> None:
    at = place(17)
    with pytest.raises(UnsupportedSpecError, match="takes the plane's own dtype"):
        bind(make(), model(), at).encode(values("normal", DType.F32, 17, 64), at)


def test_identity_takes_integer_planes() -> None:
    at = place(17)
    for dtype in (DType.U8, DType.I16, DType.I32):
        x = any_bits(dtype, (3, 4, 17, 64))
        stage = bind(identity(), model(dtype), at)
        assert same_bits(stage.decode(stage.encode(x, at), at), x)


def test_bitplane_streams_separate_signal_from_noise() -> None:
    x, at = values("normal", DType.BF16, 256, 64), place(256)
    exponent, rest = bind(bitplane(), model(), at).encode(x, at).parts
    assert exponent.codes.unique().numel() < 32
    assert rest.codes.unique().numel() == 256
    assert exponent.rows == 12


@pytest.mark.parametrize("config", [{"levels": 1}, {"levels": 32769}, {"axis": "head"}, {"group_size": 0}])
def test_uniform_configuration_is_checked(config: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(config))):
        uniform(**config)


def test_what_the_profiler_may_search() -> None:
    assert tunables(Uniform.Config).keys() == {"levels", "axis", "group_size"}
    assert set(tunables(Uniform.Config)["axis"].choices) == set(AXES)
