"""Fixed-rate packing: groups of codes as digits of one number.

A group of ``digits`` codes of an alphabet A is the number ``sum(code[k] * A**k)``, stored in ``nbytes`` little-endian
bytes; :func:`layout` picks the pair with the fewest bytes a code. For A = 16 that is 2 codes in a byte, for 6 three
codes in a byte, for 12 eleven codes in 5 bytes (3.64 bits against log2(12) = 3.58). n codes make ``groups = ceil(n /
digits)`` numbers, one after the other. Digit k of group g is code ``k * groups + g`` (so that every step runs over
adjacent memory); places past the last code hold 0.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

MAX_BYTES = 6
"""Numbers stay below 2^48: f64 then computes them, and their quotients' whole parts, exactly.

Seven bytes would only serve alphabets of 116 to 128, which take a byte a code.
"""


class Layout(NamedTuple):
    """Codes a group, and bytes a group."""

    digits: int
    nbytes: int

    def groups(self, count: int) -> int:
        """Groups for ``count`` codes."""
        return -(-count // self.digits)

    def size(self, count: int) -> int:
        """Bytes for ``count`` codes."""
        return self.groups(count) * self.nbytes


@lru_cache(maxsize=256)
def layout(alphabet: int) -> Layout:
    """The group with the fewest bytes a code; the smallest of equals. A single code value takes no bytes."""
    if alphabet == 1:
        return Layout(1, 0)
    options = [Layout(_digits(alphabet, nbytes), nbytes) for nbytes in range(1, MAX_BYTES + 1)]
    return min((o for o in options if o.digits), key=lambda o: (o.nbytes / o.digits, o.nbytes))


def _digits(alphabet: int, nbytes: int) -> int:
    digits = 0
    while alphabet ** (digits + 1) <= 256**nbytes:
        digits += 1
    return digits


def pack(codes: Tensor, alphabet: int) -> Tensor:
    """1-D u8 or i16 codes to 1-D u8 of ``layout(alphabet).size(n)`` bytes."""
    plan = layout(alphabet)
    groups = plan.groups(codes.numel())
    planes = torch.zeros((plan.digits, groups), dtype=codes.dtype, device=codes.device)
    planes.view(-1)[: codes.numel()] = codes
    number = planes[-1].to(torch.float64)
    for plane in reversed(planes[:-1].unbind()):
        number.mul_(alphabet).add_(plane)
    return number.to(torch.int64).view(torch.uint8).view(groups, 8)[:, : plan.nbytes].reshape(-1)


def unpack(data: Tensor, count: int, alphabet: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``count`` codes from :func:`pack`'s bytes, and whether these are canonical (a 0-d bool on the device).

    Canonical: every number is below ``alphabet ** digits`` and the places past the last code are 0.
    """
    plan = layout(alphabet)
    groups = plan.groups(count)
    wide = torch.zeros((groups, 8), dtype=torch.uint8, device=data.device)
    wide[:, : plan.nbytes] = data.view(groups, plan.nbytes)
    number = wide.view(torch.int64).view(-1).to(torch.float64)
    codes = torch.empty((plan.digits, groups), dtype=dtype, device=data.device)
    for plane in codes.unbind():
        rest = torch.div(number, alphabet).floor_()
        plane.copy_(number.sub_(rest, alpha=alphabet))
        number = rest
    flat = codes.view(-1)
    canonical = number.sum() == 0
    return flat[:count], canonical if count == flat.numel() else canonical & (flat[count:] == 0).all()
