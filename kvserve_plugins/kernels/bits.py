"""Bit patterns as byte streams, without a change of any bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

INTEGERS = {2: torch.int16, 4: torch.int32}


def bytes_of(x: Tensor) -> Tensor:
    """The bytes of ``x`` in row-major order, little-endian, as 1-D u8; a view if ``x`` is contiguous."""
    return x.contiguous().reshape(-1).view(torch.uint8)


def from_bytes(data: Tensor, dtype: torch.dtype) -> Tensor:
    """1-D u8 as 1-D ``dtype``; a view where the memory is aligned for it."""
    size = dtype.itemsize
    aligned = data.storage_offset() % size == 0 and data.data_ptr() % size == 0
    return (data if aligned else data.clone()).view(dtype)


def byte_planes(x: Tensor) -> list[Tensor]:
    """Floats ``[..., n]`` to 1-D u8 streams, most significant first, after a rotation left by one bit.

    The rotation moves the sign from the top to the bottom: the first stream of bf16 and f32 is the exponent alone (of
    f16: the exponent and three mantissa bits), the last one ends with the sign. Mantissa and sign are noise, the
    exponents of a head are not.
    """
    size = x.element_size()
    bits = x.contiguous().reshape(-1).view(INTEGERS[size])
    turned = (bits << 1) - (bits >> (8 * size - 1))  # the arithmetic shift gives -1 for a set sign bit
    return [(turned >> 8 * k).to(torch.uint8) for k in reversed(range(size))]


def join_planes(planes: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The inverse of :func:`byte_planes`: 1-D ``dtype``."""
    whole = INTEGERS[dtype.itemsize]
    turned = planes[0].to(whole)
    for plane in planes[1:]:
        turned = (turned << 8) | plane
    sign = turned << (8 * dtype.itemsize - 1)
    mask = torch.iinfo(whole).max
    return (((turned >> 1) & mask) | sign).view(dtype)
