"""Marks on tokens: the largest of each row, marks as bits, and the order that puts unmarked tokens first."""

from __future__ import annotations

import torch
from torch import Tensor


def largest(scores: Tensor, count: int) -> Tensor:
    """``[..., T]`` bool: the ``count`` largest of each row; of equal scores the later ones."""
    ranked = scores.argsort(dim=-1, stable=True)
    marks = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    return marks.scatter_(-1, ranked[..., scores.shape[-1] - count :], True)


def order(marks: Tensor) -> Tensor:
    """``[..., T]`` i64: positions of the unmarked, then of the marked, each ascending. Always a permutation."""
    return marks.to(torch.uint8).argsort(dim=-1, stable=True)


def as_bits(marks: Tensor) -> Tensor:
    """``[..., T]`` bool to ``[..., ceil(T / 8)]`` u8; token ``8 i + k`` is bit k of byte i."""
    filled = torch.nn.functional.pad(marks, (0, -marks.shape[-1] % 8)).unflatten(-1, (-1, 8))
    return (filled.to(torch.uint8) << _places(marks.device)).sum(-1, dtype=torch.uint8)


def from_bits(bits: Tensor, tokens: int) -> Tensor:
    """The inverse of :func:`as_bits`."""
    return ((bits.unsqueeze(-1) >> _places(bits.device)) & 1).flatten(-2)[..., :tokens].to(torch.bool)


def _places(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
