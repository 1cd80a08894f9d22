"""Randomised Hadamard rotation over the channels of a head."""

from __future__ import annotations

from typing import Self

import torch
from pydantic import Field
from torch import Tensor

from kvserve_core.artefacts import Artefacts
from kvserve_core.component import ANY, Capabilities, ComponentConfig
from kvserve_core.spec import KVSpec, Region
from kvserve_core.stages import Transform
from kvserve_core.tensor import Params
from kvserve_plugins.kernels.hadamard import gemm_is_exact, norms, sums
from kvserve_plugins.kernels.signs import signs


class Hadamard(Transform):
    """Spreads outliers over a head's channels with a randomised Hadamard rotation.

    ``y = fwht(s * x)`` and ``x = s * fwht(y)`` in f32 for every token, with s = +1 or -1 by global layer, global head
    and channel (:func:`kvserve_plugins.kernels.signs.signs`) and fwht orthonormal over head_dim; other lengths than
    powers of two split greedily (96 = 64 + 32) and do not mix across pieces. Values up to 3.4e38 / head_dim stay
    finite on both sides. Nothing is sent beside the values. See QuaRot, arXiv 2404.00456.
    """

    class Config(ComponentConfig):
        """seed: both sides must agree on it; it travels in the frame with the chain."""

        seed: int = Field(0x3333, ge=0, lt=2**63)

    config: Config
    caps = Capabilities(
        encode_on=frozenset({"cpu", "cuda"}),
        decode_on=frozenset({"cpu", "cuda"}),
        planes=ANY,
        head_local=True,
        layer_local=True,
    )

    _signs: Tensor  # [L, H, 1, D] of +-1/sqrt(piece): applied before the sums, so that these do not overflow early
    _gemm: bool

    def bind(self, at: Region, spec: KVSpec, device: torch.device, artefacts: Artefacts) -> Self:
        """Compute the signs of this place."""
        bound = super().bind(at, spec, device, artefacts)
        dim = spec.group(at.group).plane(at.plane).dim
        unit = torch.from_numpy(signs(self.config.seed, at.layers, at.heads, dim))
        bound._signs = (unit * norms(dim)).unsqueeze(2).to(device)
        bound._gemm = device.type == "cpu" and gemm_is_exact()
        return bound

    def encode(self, x: Tensor, at: Region) -> tuple[Tensor, Params]:
        """``[L, H, T, D]`` to the rotated values in f32."""
        wide = x.to(torch.float32)
        signed = wide * self._signs if wide is x else wide.mul_(self._signs)
        return sums(signed, gemm=self._gemm), {}

    def decode(self, y: Tensor, params: Params, at: Region) -> Tensor:
        """Rotated values back to ``[L, H, T, D]`` in f32."""
        x = sums(y, gemm=self._gemm)
        return x * self._signs if x is y else x.mul_(self._signs)
