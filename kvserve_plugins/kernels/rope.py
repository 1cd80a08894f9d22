"""Rotary position embedding, undone and applied: RoFormer, https://arxiv.org/abs/2104.09864, section 3.2.2.

Channels ``(a, b)`` of a pair at position p become ``f (a cos t - b sin t, b cos t + a sin t)`` with ``t = p inv_freq``
and f the attention factor; ``neox`` pairs channel i with i + rotary_dim / 2, ``gptj`` with its neighbour. Angles are
computed in float64, because at position 10^6 a float32 angle is off by 0.03, and their cosines are rounded to float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from kvserve_core.spec import PlanePart, RopeSpec


def has_rope(parts: Sequence[PlanePart]) -> bool:
    """Whether any of the parts carries a rotary embedding that is known."""
    return any(part.rope is not None for part in parts)


def undo(x: Tensor, parts: Sequence[PlanePart], start: int) -> Tensor:
    """``[..., T, D]`` at positions from ``start`` to float32 values without their embedding."""
    return _parts(x, parts, start, back=True)


def apply(x: Tensor, parts: Sequence[PlanePart], start: int) -> Tensor:
    """The inverse of :func:`undo`, in float32."""
    return _parts(x, parts, start, back=False)


def turn(x: Tensor, rope: RopeSpec, start: int, *, back: bool) -> Tensor:
    """One part ``[..., T, dim]`` in float32, turned by its positions or back; channels past rotary_dim stay."""
    cos, sin = angles(rope, start, start + x.shape[-2], x.device)
    scale = 1 / rope.attn_factor if back else rope.attn_factor
    if scale != 1:
        cos, sin = cos * scale, sin * scale
    if back:
        sin = -sin
    turning, rest = x[..., : rope.rotary_dim], x[..., rope.rotary_dim :]
    if rope.style == "neox":
        a, b = turning.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)
    a, b = turning[..., 0::2], turning[..., 1::2]
    return torch.cat((torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2), rest), -1)


@lru_cache(maxsize=32)
def angles(rope: RopeSpec, start: int, stop: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine ``[stop - start, rotary_dim / 2]`` in float32."""
    positions = torch.arange(start, stop, dtype=torch.float64, device=device)
    t = positions[:, None] * _frequencies(rope, device)
    return t.cos().float(), t.sin().float()


@lru_cache(maxsize=32)
def _frequencies(rope: RopeSpec, device: torch.device) -> Tensor:
    return torch.tensor(rope.inv_freq, dtype=torch.float64, device=device)


def _parts(x: Tensor, parts: Sequence[PlanePart], start: int, *, back: bool) -> Tensor:
    pieces = torch.split(x.float(), [part.dim for part in parts], -1)
    turned = [
        piece if part.rope is None else turn(piece, part.rope, start, back=back)
        for piece, part in zip(pieces, parts, strict=True)
    ]
    return turned[0] if len(turned) == 1 else torch.cat(turned, -1)
