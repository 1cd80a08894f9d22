"""Sizes of vectors as bf16 side tensors: never infinite, never so small that a quotient overflows."""

from __future__ import annotations

from math import isfinite

import torch
from torch import Tensor

from kvserve_core.errors import NonFiniteError

BF16_MAX = torch.finfo(torch.bfloat16).max
SMALLEST = 2.0**-126
"""The smallest normal bf16: what sizes are divided by at least."""


def largest_magnitude(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """``max |x|`` over ``axes``, kept as 1, in f32; 0 where there is nothing.

    Raises:
        NonFiniteError: NaN or Inf in ``x`` on a CPU. Elsewhere the check would wait for the device.
    """
    if x.numel() == 0:
        return x.new_zeros([1 if i in axes else n for i, n in enumerate(x.shape)])
    top = torch.maximum(x.amax(axes, keepdim=True), -x.amin(axes, keepdim=True))
    if x.device.type == "cpu" and not isfinite(top.max().item()):
        raise NonFiniteError("NaN or Inf reached the quantizer; send this segment raw")
    return top


def bf16_up(x: Tensor) -> Tensor:
    """The smallest bf16 not below ``x >= 0`` (f32), within ``2^-126`` and the largest bf16."""
    bits = (x.view(torch.int32) + 0xFFFF) & -0x10000
    return bits.view(torch.float32).clamp(SMALLEST, BF16_MAX).to(torch.bfloat16)


def root_mean_square(x: Tensor) -> Tensor:
    """``[..., n]`` in f32 to ``[..., 1]``. It is at most the largest magnitude, where a norm could overflow.

    Raises:
        NonFiniteError: as :func:`largest_magnitude`.
    """
    top = largest_magnitude(x, (x.dim() - 1,)).clamp_min(SMALLEST)
    return (x / top).square_().mean(-1, keepdim=True).sqrt_() * top
