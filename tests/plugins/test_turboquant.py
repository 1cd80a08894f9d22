from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvserve_core.tensor import Quantized
from kvserve_plugins.kernels.lloyd_max import POSITIVE, boundaries, centroids, dequantize, quantize
from kvserve_plugins.quantizers.turboquant import TurboQuant
from plugins.quantizer_checks import check_all, check_largest_floats, check_not_a_number, check_parameter, coded
from plugins.stage_checks import CPU, check_head_slices

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

    check_all(make, length)
    check_head_slices(make)


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
    made = coded(turboquant(bits=bits, norm_correction=False), kind, 256, 128)
    relative = (made.back - made.x.float()).square().sum(-1) / made.x.float().square().sum(-1)
    assert abs(float(relative.mean()) / ERRORS[bits] - 1) < 0.15


def test_norm_correction_keeps_lengths() -> None:
    made = coded(turboquant(bits=2), "outlier", 64, 128)
    torch.testing.assert_close(made.back.norm(dim=-1), made.x.float().norm(dim=-1), rtol=2**-7, atol=0)


def test_norms_hold_the_whole_range_of_bf16() -> None:
    def change(x: Tensor) -> None:
        x.fill_(6000.0)
        x[:, :, 0] = 1.2e5
        x[:, :, 1] = torch.finfo(torch.bfloat16).max
        x[:, :, 2] = 1e-38
        x[:, :, 3] = 0

    made = coded(turboquant(bits=5), dim=128, change=change)
    assert made.q.params["norm"].isfinite().all()
    assert made.back.isfinite().all()
    assert (made.back[:, :, 3] == 0).all()
    assert ((made.back.double() - made.x.double()).abs() <= 0.7 * made.x.double().abs()).all()


def test_what_it_cannot_take_is_refused() -> None:
    check_largest_floats(turboquant())
    check_not_a_number(turboquant(), float("nan"))
    check_parameter(turboquant(), "norm")


def test_bits_are_checked() -> None:
    assert turboquant(bits=3).caps.max_alphabet == 8
    with pytest.raises(ValueError, match="bits"):
        turboquant(bits=6)
