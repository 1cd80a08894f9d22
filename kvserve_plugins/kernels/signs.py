"""Reproducible random signs from integers alone: equal on every machine, library version and device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MUL_1, _MUL_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31 = np.uint64(27), np.uint64(30), np.uint64(31)

U64 = NDArray[np.uint64]


def splitmix64(state: U64) -> U64:
    """The next output of splitmix64 for each state (Steele, Lea, Flood 2014), modulo 2^64.

    ``z = state + 0x9E3779B97F4A7C15``; ``z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9``;
    ``z = (z ^ (z >> 27)) * 0x94D049BB133111EB``; the output is ``z ^ (z >> 31)``.
    """
    z = state + _GOLDEN
    z = (z ^ (z >> _S30)) * _MUL_1
    z = (z ^ (z >> _S27)) * _MUL_2
    return z ^ (z >> _S31)


def signs(seed: int, layers: Sequence[int], heads: Sequence[int], dim: int) -> NDArray[np.float32]:
    """``[L, H, dim]`` of +1 and -1 for global layer and head indices.

    With ``next`` the function above: ``key = next(next(next(seed) ^ layer) ^ head)``. Word w, for w = 0, 1, ..., is
    ``next(key + w * 0x9E3779B97F4A7C15)``: the w-th output of splitmix64 seeded with ``key``. The sign of channel d is
    -1 where bit ``d % 64`` (0 is the least significant) of word ``d // 64`` is set.
    """
    layer = np.asarray(layers, np.uint64)[:, None]
    head = np.asarray(heads, np.uint64)[None, :]
    key = splitmix64(splitmix64(splitmix64(np.asarray([[seed]], np.uint64)) ^ layer) ^ head)
    channel = np.arange(dim, dtype=np.uint64)
    words = splitmix64(key[..., None] + channel // np.uint64(64) * _GOLDEN)
    bits = words >> (channel % np.uint64(64)) & np.uint64(1)
    return np.where(bits == 1, np.float32(-1), np.float32(1))
