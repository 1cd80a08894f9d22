"""Statistics of each channel of a head over the tokens of a segment, as parameters that both sides read alike."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kvserve_plugins.kernels.norms import BF16_MAX

Scale = Literal["std", "max"]


def means(x: Tensor) -> Tensor:
    """``[L, H, T, D]`` f32 to ``[L, H, 1, D]``; 0 without tokens. A sum of finite values cannot overflow here."""
    return (x * (1 / max(x.shape[2], 1))).sum(2, keepdim=True)


def scales(x: Tensor, kind: Scale) -> Tensor:
    """Largest magnitude, or root of the mean square, of each channel: ``[L, H, 1, D]``; 0 without tokens."""
    if x.shape[2] == 0:
        return x.new_zeros(*x.shape[:2], 1, x.shape[3])
    top = x.abs().amax(2, keepdim=True)
    if kind == "max":
        return top
    # Squares of values divided by the largest stay within f32.
    return top * means((x / top.clamp_min(torch.finfo(x.dtype).tiny)).square()).sqrt()


def stored(x: Tensor) -> Tensor:
    """A parameter as it is sent: bf16, finite where ``x`` is."""
    return x.clamp(-BF16_MAX, BF16_MAX).to(torch.bfloat16)


def divisors(scale: Tensor) -> Tensor:
    """Stored scales as f32 numbers to divide by: 1 for a channel that is 0 throughout."""
    wide = scale.float()
    return torch.where(wide > 0, wide, 1.0)
