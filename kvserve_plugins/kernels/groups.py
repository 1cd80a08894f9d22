"""Runs of adjacent elements along one axis as an axis of their own."""

from __future__ import annotations

import torch
from torch import Tensor


def fold(x: Tensor, axis: int, size: int) -> Tensor:
    """``[.., n, ..]`` to ``[.., ceil(n / size), size, ..]``: ``axis`` (0 or more) is cut into runs of ``size``.

    The last element fills up the last run, which changes neither its minimum nor its maximum. A view where nothing is
    to be filled up.
    """
    if short := -x.shape[axis] % size:
        last = x.narrow(axis, x.shape[axis] - 1, 1)
        x = torch.cat((x, last.expand(*x.shape[:axis], short, *x.shape[axis + 1 :])), axis)
    return x.unflatten(axis, (x.shape[axis] // size, size))


def unfold(x: Tensor, axis: int, length: int) -> Tensor:
    """The inverse of :func:`fold` for ``length`` elements."""
    return x.flatten(axis, axis + 1).narrow(axis, 0, length)
