"""Shapes as the contract writes them."""

from __future__ import annotations

from torch import Tensor

from kvserve_core.tensor import Shape


def shape_of(x: Tensor) -> Shape:
    """``(L, H, T, D)``."""
    layers, heads, tokens, dim = x.shape
    return layers, heads, tokens, dim


def split_last(x: Tensor, size: int) -> Tensor:
    """``[..., n]`` to ``[..., n / size, size]``; a view where ``x`` is contiguous."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)
