"""Uniform quantization between the minimum and maximum of a group, in f32.

The grid of a group is ``lo + code * scale`` for codes ``0 .. levels - 1``. ``lo`` is the minimum rounded down and
``scale`` is rounded up to what is stored (bf16, or f32 as it is), so that the grid covers the group. Both sides use
the stored values, and count from the middle of the grid, ``base = lo + c0 * scale`` with ``c0 = (levels - 1) / 2``: a
range of twice the largest float then does not overflow. With bf16 parameters ``(code - c0) * scale`` is exact in f32
(16 by 8 significant bits), so decoded values have the same bits on every device.

Error bound for finite x, with x' the decoded value and m the largest magnitude in the group::

    |x - x'| <= scale * (1/2 + levels * 2^-22) + 2^-22 * m

Half a step is rounding; the rest is f32 arithmetic. ``scale`` is at most ``1 + 2^-6`` of what it is without rounding,
plus a bf16 step of ``lo`` over ``levels - 1`` (zero for a bf16 plane that was not transformed); it is never less than
2^-126, so that quotients are finite. With two or three levels and a range beyond the largest float, scale saturates
and the bound is one step. With bf16 parameters values beyond the largest bf16 decode to it.

A constant of a bf16 or f16 plane decodes to itself in the plane's dtype. A constant in f32 decodes within 2^-14 of its
magnitude, or exactly to f32 rounding with f32 parameters.
"""

from __future__ import annotations

from functools import lru_cache
from math import isfinite
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvserve_core.errors import NonFiniteError
from kvserve_plugins.kernels.norms import BF16_MAX

ParamDType = Literal["bf16", "f32"]
F32_MAX = torch.finfo(torch.float32).max
SCALE_MIN = 2.0**-126
_TOP = torch.tensor(-0x10000, dtype=torch.int32)  # 0-d tensors: torch takes longer to wrap a Python number than to add
_LOW = torch.tensor(0xFFFF, dtype=torch.int32)
_SIGN = torch.tensor(31, dtype=torch.int32)
_FOUR = torch.tensor(4.0)


class Grid(NamedTuple):
    """``lo`` and ``scale`` as stored, with the group's axes of the input reduced to 1."""

    lo: Tensor
    scale: Tensor


class _Numbers(NamedTuple):
    outward: Tensor  # from a range to a quarter of a scale that rounding leaves large enough
    middle: Tensor  # (levels - 1) / 2
    half_up: Tensor  # middle + 1/2: truncation then rounds


@lru_cache(maxsize=64)
def _numbers(levels: int) -> _Numbers:
    middle = (levels - 1) / 2
    values = (0.125 * (1 + 2**-8 + 2**-16) / middle, middle, middle + 0.5)
    return _Numbers(*(torch.tensor(value, dtype=torch.float32) for value in values))


def grid(x: Tensor, axes: tuple[int, ...], levels: int, params: ParamDType) -> Grid:
    """The grids of ``x`` in f32 for groups along ``axes``, in bf16 or f32.

    Raises:
        NonFiniteError: NaN or Inf in ``x`` on a CPU. Elsewhere the check would wait for the device; codes stay within
            the alphabet.
    """
    stored = torch.bfloat16 if params == "bf16" else torch.float32
    if x.numel() == 0:
        shape = [1 if i in axes else n for i, n in enumerate(x.shape)]
        return Grid(x.new_zeros(shape, dtype=stored), x.new_zeros(shape, dtype=stored))
    lo, hi = x.amin(axes, keepdim=True), x.amax(axes, keepdim=True)
    if x.device.type == "cpu" and not (isfinite(lo.min().item()) and isfinite(hi.max().item())):
        raise NonFiniteError("NaN or Inf reached the quantizer; send this segment raw")
    if params == "bf16":
        lo = _bf16_down(lo)
    outward = _numbers(levels).outward
    quarter = (hi * outward).sub_(lo * outward)  # the range itself may be twice the largest float
    return Grid(lo.to(stored), quarter.mul_(_FOUR).to(stored).clamp_(SCALE_MIN, _largest(stored)))


def quantize(x: Tensor, grid: Grid, levels: int) -> Tensor:
    """Codes of ``x`` in f32, of its shape: u8 for up to 256 levels, else i16."""
    scale, base = _base(grid, levels)
    steps = (x - base).div_(scale).add_(_numbers(levels).half_up)
    codes = steps.clamp_(0, levels - 1).to(torch.int16)
    return codes.to(torch.uint8) if levels <= 256 else codes


def dequantize(codes: Tensor, grid: Grid, levels: int) -> Tensor:
    """Values in f32 for codes of any shape that ``grid`` broadcasts to."""
    scale, base = _base(grid, levels)
    largest = _largest(grid.scale.dtype)  # the last step may end beyond it, as the grid covers the group
    steps = codes.to(torch.float32).sub_(_numbers(levels).middle)
    return steps.mul_(scale).add_(base).clamp_(-largest, largest)


def _largest(stored: torch.dtype) -> float:
    return BF16_MAX if stored == torch.bfloat16 else F32_MAX


def _base(grid: Grid, levels: int) -> tuple[Tensor, Tensor]:
    scale = grid.scale.to(torch.float32)
    return scale, torch.add(grid.lo.to(torch.float32), scale, alpha=(levels - 1) / 2)


def _bf16_down(x: Tensor) -> Tensor:
    """The largest bf16 not above ``x``, in f32; the lowest finite one where there is none."""
    bits = x.view(torch.int32)
    away = (bits >> _SIGN) & _LOW  # cutting bits off moves towards zero, which is up for negative numbers
    return ((bits + away) & _TOP).view(torch.float32).clamp_min_(-BF16_MAX)
