"""TurboQuant: a random rotation, then the best scalar quantizer of a normal variable."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from kvserve_core.artefacts import Artefacts
from kvserve_core.component import ANY, Capabilities, ComponentConfig, Tunable
from kvserve_core.spec import KVSpec, Region
from kvserve_core.stages import Quantizer
from kvserve_core.tensor import Part, Quantized
from kvserve_plugins.kernels.hadamard import gemm_is_exact, norms, sums
from kvserve_plugins.kernels.lloyd_max import dequantize, quantize
from kvserve_plugins.kernels.norms import BF16_MAX, SMALLEST, root_mean_square
from kvserve_plugins.kernels.shapes import reduced, require_shape, shape_of
from kvserve_plugins.kernels.signs import signs

Bits = Literal[1, 2, 3, 4, 5]


class TurboQuant(Quantizer):
    """Rotates each head at random, then rounds to the best levels for a normal variable.

    With r the root mean square of a head's channels at a token, ``y = fwht(s * x / r)`` has coordinates close to
    N(0, 1), whatever x was; each goes to the nearest of 2^bits Lloyd-Max centroids c, and
    ``x' = norm * s * fwht(c)``. s are signs by global layer, head and channel
    (:func:`kvserve_plugins.kernels.signs.signs`). ``norm_correction`` stores ``r / rms(c)`` instead of r, so that x'
    has the length of x; that costs a little squared error and keeps attention logits unbiased in scale.

    One stream of codes in the order L, H, T, D and one parameter, ``norm`` ``[L, H, T, 1]`` in bf16. The mean square
    instead of the norm, and bf16 instead of f16, keep it finite for every finite bf16 input; an all-zero head is exact.
    Values beyond bf16's range come back within it. TurboQuant_mse of arXiv 2504.19874; ``bits`` per plane by its chain.
    """

    class Config(ComponentConfig):
        """bits a code; norm_correction: keep lengths; seed: both sides must agree, it travels with the chain."""

        bits: Bits = Tunable(4, choices=(1, 2, 3, 4, 5))
        norm_correction: bool = Tunable(True, choices=(True, False))
        seed: int = Field(0x3333, ge=0, lt=2**63)

    config: Config
    caps = Capabilities(
        encode_on=frozenset({"cpu", "cuda"}),
        decode_on=frozenset({"cpu", "cuda"}),
        planes=ANY,
        head_local=True,
        layer_local=True,
        max_alphabet=32,
    )

    _signs: Tensor  # [L, H, 1, D] of +-1/sqrt(piece)
    _gemm: bool

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.caps = replace(type(self).caps, max_alphabet=1 << config.bits)

    def bind(self, at: Region, spec: KVSpec, device: torch.device, artefacts: Artefacts) -> Self:
        """Compute the signs of this place."""
        bound = super().bind(at, spec, device, artefacts)
        dim = spec.group(at.group).plane(at.plane).dim
        unit = torch.from_numpy(signs(self.config.seed, at.layers, at.heads, dim))
        bound._signs = (unit * norms(dim)).unsqueeze(2).to(device)
        bound._gemm = device.type == "cpu" and gemm_is_exact()
        return bound

    def encode(self, x: Tensor, at: Region) -> Quantized:
        """``[L, H, T, D]`` finite floats to codes.

        Raises:
            NonFiniteError: NaN or Inf, on a CPU.
        """
        bits, wide, shape = self.config.bits, x.to(torch.float32), shape_of(x)
        norm = root_mean_square(wide)
        unit = wide / norm.clamp_min(SMALLEST)
        codes = quantize(sums(unit.mul_(self._signs), gemm=self._gemm), bits)
        if self.config.norm_correction:
            norm = norm / dequantize(codes, bits).square_().mean(-1, keepdim=True).sqrt_()
        stored = norm.clamp_max(BF16_MAX).to(torch.bfloat16)
        return Quantized((Part(codes.reshape(-1), 1 << bits, shape[0] * shape[1]),), {"norm": stored}, shape)

    def decode(self, q: Quantized, at: Region) -> Tensor:
        """``[L, H, T, D]`` in f32.

        Raises:
            FrameError: ``norm`` of another shape.
        """
        require_shape(q.params, ("norm",), reduced(q.shape, (3,)), at)
        norm = q.params["norm"]
        points = dequantize(q.parts[0].codes.view(q.shape), self.config.bits)
        unit = sums(points, gemm=self._gemm).mul_(self._signs)
        return unit.mul_(norm.to(torch.float32)).clamp_(-BF16_MAX, BF16_MAX)
