from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvserve_core.errors import FrameError
from kvserve_core.spec import DType, KVSpec, LayerGroup, PlanePart, PlaneSpec, Region
from kvserve_core.tensor import Quantized
from kvserve_plugins.quantizers.cachegen import AXES, CacheGen, runs
from plugins.quantizer_checks import check_all, check_largest_floats, check_not_a_number, check_parameter, coded
from plugins.stage_checks import bind, check_head_slices, model, place, values


def cachegen(**config: object) -> CacheGen:
    return CacheGen(CacheGen.Config.model_validate(config))


def half_a_step(x: Tensor, q: Quantized, _: Tensor) -> Tensor:
    return q.params["scale"].float() / 14 * 1.001 if x.numel() else x  # 16 bins for the last of three layers: M = 7


@pytest.mark.parametrize("axis", AXES)
def test_conformance(axis: str) -> None:
    check_all(lambda: cachegen(axis=axis), half_a_step)


def test_scales_per_head_work_on_any_slice() -> None:
    check_head_slices(lambda: cachegen(axis="token_head"))
    assert not cachegen().caps.head_local
    assert cachegen().caps.layer_local


def deep(layers: int) -> KVSpec:
    plane = PlaneSpec("k", 4, (PlanePart("k", 64),), DType.BF16)
    return KVSpec("deep", (LayerGroup(0, tuple(range(layers)), (plane,)),))


def test_levels_fall_with_depth() -> None:
    layers = tuple(range(30))
    at = Region(0, "k", layers, (0, 1, 2, 3), 0, 16)
    x = torch.randn(30, 4, 16, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    stage = bind(cachegen(), deep(30), at)
    q = stage.encode(x, at)
    assert [p.alphabet for p in q.parts] == [31, 15, 11]
    assert [p.codes.numel() // (4 * 16 * 64) for p in q.parts] == [10, 11, 9]  # below 9.9, below 20.1, the rest
    errors = (stage.decode(q, at) - x.float()).square().mean((1, 2, 3))
    assert errors[:10].max() < errors[10:21].min()
    assert errors[10:21].max() < errors[21:].min()


def test_the_schedule_of_the_shipped_code() -> None:
    stage = cachegen(levels=(32, 16), until=(0.32,))
    assert [stage.levels_at(i, 32) for i in (0, 10, 11, 31)] == [32, 32, 16, 16]


def test_a_slice_of_layers_has_the_levels_of_its_global_layers() -> None:
    at = Region(0, "k", (25, 28), (0, 1, 2, 3), 0, 16)
    x = torch.randn(2, 4, 16, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert [p.alphabet for p in bind(cachegen(), deep(30), at).encode(x, at).parts] == [11]


def test_a_row_is_a_channel() -> None:
    x, at = values("normal", DType.BF16, 17, 64), place(17, layers=(0,))
    x = x[:1].contiguous()
    x[0, 1, :, 5] = 0
    q = bind(cachegen(), model(), at).encode(x, at)
    (part,) = q.parts
    assert part.rows == 4 * 64
    rows = part.codes.view(4, 64, 17)
    assert (rows[1, 5] == 15).all()  # 0 is the middle code
    assert rows[1, 6].unique().numel() > 1


def test_zero_is_exact_and_the_largest_is_near() -> None:
    def change(x: Tensor) -> None:
        x[:, :, 3] = 0

    made = coded(cachegen(), "outlier", change=change)
    assert (made.back[:, :, 3] == 0).all()
    top = made.x.float().abs().amax((1, 3))
    torch.testing.assert_close(made.back.abs().amax((1, 3)), top, rtol=2**-7, atol=0)


def test_what_it_cannot_take_is_refused() -> None:
    check_largest_floats(cachegen())
    check_not_a_number(cachegen(), float("inf"))
    check_parameter(cachegen(), "scale")


def test_another_number_of_streams_is_refused() -> None:
    made = coded(cachegen())
    with pytest.raises(FrameError, match="1 streams, these layers have 2"):
        made.stage.decode(Quantized(made.q.parts[:1], made.q.params, made.q.shape), made.at)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"until": (0.5,)}, "one fraction less"),
        ({"until": (0.6, 0.3)}, "rising fractions"),
        ({"until": (0.0, 0.3)}, "rising fractions"),
        ({"levels": (3, 4, 5)}, "from 4 to 256"),
        ({"levels": (512, 4, 5)}, "from 4 to 256"),
    ],
)
def test_the_schedule_is_checked(config: dict[str, object], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        cachegen(**config)


def test_runs_of_equal_levels() -> None:
    assert runs([15, 15, 7]) == [(0, 2, 15), (2, 3, 7)]
    assert runs([5, 7, 5]) == [(0, 1, 5), (1, 2, 7), (2, 3, 5)]
