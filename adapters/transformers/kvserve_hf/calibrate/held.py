"""How much of a cache a basis misses on texts that it was not calibrated on: what a drift guard compares with.

Energy outside the kept components, on the texts that made them, is too small: of n components from a few thousand
correlated tokens the last ones fit noise. So the texts are split into folds, each fold is projected on the bases of all
others, and the energies of its cells are kept. The sensitivity metric and the unit are those of all texts, so that the
energies are in the units of the file's basis; what is held out is the mean and the covariance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from kvserve_core.spec import SEGMENT_TOKENS
from kvserve_hf.calibrate.basis import Components

FOLDS = 5
QUANTILE = 0.95
"""Of the cells of held-out texts."""


def fold_of(text: int) -> int:
    """Texts by turns, so that every fold has some of each kind."""
    return text % FOLDS


def cells(start: int, stop: int) -> list[tuple[int, int]]:
    """The token cells between two positions, as the planner cuts them."""
    edges = [start, *range((start // SEGMENT_TOKENS + 1) * SEGMENT_TOKENS, stop, SEGMENT_TOKENS), stop]
    return list(pairwise(edges))


def outside(rows: Tensor, mean: Tensor, scale: Tensor, columns: Tensor) -> Tensor:
    """``[n + 1]``: mean energy a token of ``rows [T, n]`` outside the first k of n orthonormal columns, at index k."""
    energies = (((rows.double() - mean) * scale) @ columns).square().mean(0)
    tail = energies.flip(0).cumsum(0).flip(0)
    return torch.cat((tail, tail.new_zeros(1))).float()


def curves(
    rows: Sequence[Callable[[int, int], Tensor]], bases: Sequence[Components], start: int, stop: int
) -> list[Tensor]:
    """Of one text and each block, :func:`outside` of its cells: ``[cells, n + 1]``.

    rows: of each block, what reads its values between two positions. bases: all n components, made without the text.
    start: the tokens before it are not looked at, as in the sums that bases are made of.
    """
    spans = cells(start, stop)
    return [
        torch.stack([outside(read(*span), c.mean, c.scale, c.columns) for span in spans])
        for read, c in zip(rows, bases, strict=True)
    ]


def quantile(found: Sequence[Tensor]) -> Tensor:
    """``[n + 1]`` of the curves ``[cells, n + 1]`` of all texts."""
    return torch.cat(list(found)).quantile(QUANTILE, 0)
