from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvserve_core.errors import FrameError, NonFiniteError
from kvserve_core.spec import DType
from kvserve_core.tensor import Quantized
from kvserve_plugins.kernels.lloyd_max import POSITIVE, boundaries, centroids, dequantize, quantize
from kvserve_plugins.quantizers.turboquant import TurboQuant
from plugins.stage_checks import (
    CPU,
    bind,
    check_config,
    check_deterministic,
    check_head_slices,
    check_quantizer,
    model,
    place,
    values,
)

ERRORS = {1: 0.36338, 2: 0.11748, 3: 0.034548, 4: 0.0095010, 5: 0.0025047}


def turboquant(**config: object) -> TurboQuant:
    return TurboQuant(TurboQuant.Config.model_validate(config))


def length(x: Tensor, _q: Quantized, _back: Tensor) -> Tensor:
    """No value further off than twice the length of its head at that token (both have about that length)."""
    return 2.05 * x.double().norm(dim=-1, keepdim=True).float()


@pytest.mark.parametrize("bits", [1, 2, 4, 5])
@pytest.mark.parametrize("corrected", [True, False])
def test_conformance(bits: int, corrected: bool) -> None:
    def make() -> TurboQuant:
        return turboquant(bits=bits, norm_correction=corrected)

    check_quantizer(make, length)
    check_head_slices(make)
    check_deterministic(make)
    check_config(make())


@pytest.mark.parametrize("bits", POSITIVE)
def test_the_codebooks_are_optimal(bits: int) -> None:
    points, edges = centroids(bits, CPU).double(), boundaries(bits, CPU).double()
    normal = torch.distributions.Normal(torch.tensor(0.0).double(), torch.tensor(1.0).double())
    bounds = torch.cat((torch.tensor([-40.0]).double(), edges, torch.tensor([40.0]).double()))
    mass = normal.cdf(bounds).diff()
    mean = -(normal.log_prob(bounds).exp()).diff() / mass
    torch.testing.assert_close(points, mean, rtol=0, atol=3e-7)  # each centroid is the mean of its cell
    error = 1 - (mass * points.square()).sum()
    assert abs(float(error) - ERRORS[bits]) < 1e-4 * ERRORS[bits]


def test_quantize_takes_the_nearest_centroid() -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(1)) * 2
    for bits in POSITIVE:
        nearest = (x[:, None] - centroids(bits, CPU)).abs().amin(1)
        torch.testing.assert_close((x - dequantize(quantize(x, bits), bits)).abs(), nearest)


@pytest.mark.parametrize("bits", POSITIVE)
@pytest.mark.parametrize("kind", ["normal", "outlier", "large", "tiny"])
def test_the_error_is_that_of_a_normal_variable_whatever_the_data(bits: int, kind: str) -> None:
    x, at = values(kind, DType.BF16, 256, 128), place(256)
    stage = bind(turboquant(bits=bits, norm_correction=False), model(dim=128), at)
    back = stage.decode(stage.encode(x, at), at)
    relative = (back - x.float()).square().sum(-1) / x.float().square().sum(-1)
    assert abs(float(relative.mean()) / ERRORS[bits] - 1) < 0.15


def test_norm_correction_keeps_lengths() -> None:
    x, at = values("outlier", DType.BF16, 64, 128), place(64)
    stage = bind(turboquant(bits=2), model(dim=128), at)
    back = stage.decode(stage.encode(x, at), at)
    torch.testing.assert_close(back.norm(dim=-1), x.float().norm(dim=-1), rtol=2**-7, atol=0)


def test_norms_hold_the_whole_range_of_bf16() -> None:
    x, at = torch.full((3, 4, 17, 128), 6000.0).bfloat16(), place(17)
    x[:, :, 0] = 1.2e5
    x[:, :, 1] = torch.finfo(torch.bfloat16).max
    x[:, :, 2] = 1e-38
    x[:, :, 3] = 0
    stage = bind(turboquant(bits=5), model(dim=128), at)
    q = stage.encode(x, at)
    back = stage.decode(q, at)
    assert q.params["norm"].isfinite().all()
    assert back.isfinite().all()
    assert (back[:, :, 3] == 0).all()
    assert ((back.double() - x.double()).abs() <= 0.7 * x.double().abs()).all()


def test_non_finite_input_is_refused() -> None:
    x, at = values("normal", DType.BF16, 17, 64), place(17)
    x[1, 1, 1, 1] = float("nan")
    with pytest.raises(NonFiniteError, match="raw"):
        bind(turboquant(), model(), at).encode(x, at)


def test_a_norm_of_another_shape_is_refused() -> None:
    x, at = values("normal", DType.BF16, 17, 64), place(17)
    stage = bind(turboquant(), model(), at)
    q = stage.encode(x, at)
    with pytest.raises(FrameError, match="'norm'"):
        stage.decode(Quantized(q.parts, {"norm": q.params["norm"][..., 0]}, q.shape), at)


def test_bits_are_checked() -> None:
    assert turboquant(bits=3).caps.max_alphabet == 8
    with pytest.raises(ValueError, match="bits"):
        turboquant(bits=6)
