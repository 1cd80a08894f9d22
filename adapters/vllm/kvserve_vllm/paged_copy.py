"""A region between an engine's blocks on a GPU and one tensor, for all its layers in one launch.

Layer by layer the host takes longer to launch the copies than a GPU to encode what they bring.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

ROWS = 32
"""Tokens a tile."""


class Stack(NamedTuple):
    """Views ``[B, H, N, D]`` of several layers that differ in their address only."""

    like: Tensor
    addresses: Tensor


@lru_cache(maxsize=1)
def available() -> bool:
    """Whether Triton is there; a CUDA build of torch brings it."""
    try:
        import triton  # noqa: F401  # the question is whether it can be
    except ImportError:
        return False
    return True


def stacked(views: Sequence[Tensor], heads: Sequence[int]) -> Stack | None:
    """Where one launch can serve these layers and heads (of this rank); None where it cannot."""
    first = views[0]
    run = list(heads) == list(range(heads[0], heads[0] + len(heads))) if heads else False
    same = all((v.shape[1:], v.stride(), v.dtype) == (first.shape[1:], first.stride(), first.dtype) for v in views)
    if not (run and same and first.is_cuda and first.stride(3) == 1 and available()):
        return None
    skip = heads[0] * first.stride(1) * first.element_size()
    return Stack(first, torch.tensor([v.data_ptr() + skip for v in views], device=first.device))


def gather(stack: Stack, blocks: Tensor, heads: int, start: int, tokens: int) -> Tensor:
    """``[L, H, T, D]``. blocks: from the one that holds the first token, which is its token ``start``."""
    out = stack.like.new_empty((len(stack.addresses), heads, tokens, stack.like.shape[3]))
    _copy(stack, blocks, out, start, True, -1)
    return out


def scatter(stack: Stack, blocks: Tensor, start: int, x: Tensor, null: int) -> None:
    """The inverse; tokens of block ``null`` are dropped."""
    _copy(stack, blocks, x.contiguous(), start, False, null)


def _copy(stack: Stack, blocks: Tensor, x: Tensor, start: int, out: bool, null: int) -> None:
    from kvserve_vllm.triton_pages import copy_kernel

    layers, heads, tokens, dim = x.shape
    size = stack.like.shape[2]
    step_block, step_head, step_token, _ = stack.like.stride()
    grid = (-(-tokens // ROWS), heads, layers)
    copy_kernel[grid](
        stack.addresses, blocks, x, tokens, start % size, null, step_block, step_head, step_token, heads,
        size=size, dim=dim, padded=1 << (dim - 1).bit_length(), rows=ROWS, out=out, num_warps=4,
    )  # fmt: skip
