"""Shapes as the contract writes them, and parameters of other shapes refused."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvserve_core.errors import FrameError
from kvserve_core.spec import Region
from kvserve_core.tensor import Params, Shape


def shape_of(x: Tensor) -> Shape:
    """``(L, H, T, D)``."""
    layers, heads, tokens, dim = x.shape
    return layers, heads, tokens, dim


def split_last(x: Tensor, size: int) -> Tensor:
    """``[..., n]`` to ``[..., n / size, size]``; a view where ``x`` is contiguous."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def reduced(shape: Sequence[int], axes: Sequence[int]) -> tuple[int, ...]:
    """``shape`` with these axes 1: of the parameters of groups along them."""
    return tuple(1 if i in axes else n for i, n in enumerate(shape))


def require_shape(params: Params, names: Sequence[str], shape: Sequence[int], at: Region) -> None:
    """Refuse parameters of another shape, which may be a peer's: they could broadcast to any size.

    Raises:
        FrameError: one of ``names`` is missing, or has not exactly this shape.
    """
    for name in names:
        found = params.get(name)
        if found is None or found.shape != tuple(shape):
            got = "missing" if found is None else list(found.shape)
            raise FrameError(f"parameter {name!r} is {got}, due is {list(shape)}", at)
