"""Asymmetric min-max quantization at every usual granularity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from kvserve_core.component import ANY, Capabilities, ComponentConfig, Tunable
from kvserve_core.spec import KVSpec, Region
from kvserve_core.stages import Codec, Fusion, Quantizer, Transform
from kvserve_core.tensor import Part, Quantized, Shape
from kvserve_plugins.kernels.fused_launch import Stream
from kvserve_plugins.kernels.fused_rotation import fusion
from kvserve_plugins.kernels.minmax import Grid, ParamDType, dequantize, grid, quantize
from kvserve_plugins.kernels.shapes import reduced, require_shape, shape_of, split_last

Axis = Literal["token", "channel", "token_head", "tensor", "group"]
AXES: dict[Axis, tuple[int, ...]] = {
    "token": (1, 3),
    "channel": (2,),
    "token_head": (3,),
    "tensor": (1, 2, 3),
    "group": (4,),
}
"""Axes of ``[L, H, T, D]`` (group: of ``[L, H, T, G, group_size]``) that share a minimum and a scale."""


class Uniform(Quantizer):
    """Rounds to equal steps between the minimum and maximum of each group of values.

    One stream of codes in the order L, H, T, D, and two parameters, ``lo`` and ``scale``, with the group's axes reduced
    to 1. Groups, always within one layer and one segment:

    token: a token, over heads and channels. token_head: a head and token. channel: a head and channel, over tokens.
    tensor: everything. group: ``group_size`` adjacent channels of a head and token; the last group of a head whose size
    does not divide head_dim is shorter. Formulas and the error bound: :mod:`kvserve_plugins.kernels.minmax`; the scheme
    is KIVI's (arXiv 2402.02750) with rounded parameters on both sides.
    """

    class Config(ComponentConfig):
        """levels: codes per value (16 is 4 bits, 12 is 3.58). param_dtype: how ``lo`` and ``scale`` are stored."""

        levels: int = Tunable(16, choices=(3, 4, 6, 8, 10, 12, 16, 24, 32, 64, 256), ge=2, le=2**15)
        axis: Axis = Tunable("channel", choices=tuple(AXES))
        group_size: int = Tunable(32, choices=(16, 32, 64, 128), when={"axis": ("group",)}, ge=1)
        param_dtype: ParamDType = "bf16"

    config: Config
    caps = Capabilities(
        encode_on=frozenset({"cpu", "cuda"}),
        decode_on=frozenset({"cpu", "cuda"}),
        planes=ANY,
        head_local=True,
        layer_local=True,
        max_alphabet=2**15,
    )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        mixes_heads = 1 in AXES[config.axis]
        self.caps = replace(type(self).caps, head_local=not mixes_heads, max_alphabet=config.levels)

    def fuse(self, transforms: Sequence[Transform], codec: Codec, spec: KVSpec, device: torch.device) -> Fusion | None:
        """One kernel behind ``hadamard``, on a GPU with Triton."""
        return fusion(transforms, codec, self, True, spec, device)

    def streams(self, at: Region) -> tuple[Stream, ...]:
        """The one stream of a place."""
        return (Stream("", tuple(range(len(at.layers))), tuple(range(len(at.heads))), self.config.levels),)

    def encode(self, x: Tensor, at: Region) -> Quantized:
        """``[L, H, T, D]`` finite floats to codes.

        Raises:
            NonFiniteError: NaN or Inf, on a CPU.
        """
        cfg, shape = self.config, shape_of(x)
        values = self._fold(x.to(torch.float32))
        cells = grid(values, AXES[cfg.axis], cfg.levels, cfg.param_dtype)
        codes = self._unfold(quantize(values, cells, cfg.levels), shape)
        part = Part(codes.reshape(-1), cfg.levels, shape[0] * shape[1])
        return Quantized((part,), {"lo": cells.lo, "scale": cells.scale}, shape)

    def decode(self, q: Quantized, at: Region) -> Tensor:
        """``[L, H, T, D]`` in f32.

        Raises:
            FrameError: ``lo`` or ``scale`` of another shape; together they could broadcast to any size.
        """
        codes = self._fold(q.parts[0].codes.view(q.shape))
        require_shape(q.params, ("lo", "scale"), reduced(codes.shape, AXES[self.config.axis]), at)
        cells = Grid(q.params["lo"], q.params["scale"])
        return self._unfold(dequantize(codes, cells, self.config.levels), q.shape)

    def _fold(self, x: Tensor) -> Tensor:
        """``[L, H, T, D]`` to ``[L, H, T, G, group_size]``; the last channel fills up the last group."""
        if self.config.axis != "group":
            return x
        size = min(self.config.group_size, x.shape[-1])
        if short := -x.shape[-1] % size:
            x = torch.cat((x, x[..., -1:].expand(*x.shape[:-1], short)), -1)
        return split_last(x, size)

    def _unfold(self, x: Tensor, shape: Shape) -> Tensor:
        return x if self.config.axis != "group" else x.flatten(-2)[..., : shape[-1]]
