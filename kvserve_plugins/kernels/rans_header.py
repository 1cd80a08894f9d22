"""The first 12 bytes of a blob of codec ``rans``. See ``docs/rans-format.md``."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvserve_core.errors import FrameError
from kvserve_plugins.kernels.rans_model import MAX_ROW
from kvserve_plugins.kernels.rans_tables import RUNGS, SHAPES, ZERO

U8 = NDArray[np.uint8]
LAYOUT = struct.Struct("<5B7s")
MAX_LANE_BITS = 16
MAX_STEPS = 1 << 13
"""Symbols a lane at most in one section: it bounds how long a decoder can be kept busy."""


@dataclass(frozen=True)
class Header:
    """The first 12 bytes of a blob. ``first_row``: the rung of row 0, -1 if it is all zero."""

    lane_bits: int
    row_table: int
    column_table: int
    class_table: int
    first_row: int
    shapes: U8

    @property
    def lanes(self) -> int:
        """Interleaved coders of the blob."""
        return 1 << self.lane_bits

    @property
    def packed(self) -> bytes:
        """The 12 bytes."""
        shapes = sum(int(s) << 2 * i for i, s in enumerate(self.shapes)).to_bytes(7, "little")
        first = self.first_row + 1
        return LAYOUT.pack(self.lane_bits, self.row_table, self.column_table, self.class_table, first, shapes)


def parse(data: U8) -> Header:
    """The header of a blob.

    Raises:
        FrameError: one that no encoder writes, or a blob too short for its lanes.
    """
    if data.size < LAYOUT.size:
        raise FrameError(f"codec 'rans' got {data.size} bytes, the header alone has {LAYOUT.size}")
    lane_bits, row_table, column_table, class_table, first, packed = LAYOUT.unpack(data[: LAYOUT.size].tobytes())
    word = int.from_bytes(packed, "little")
    shapes = np.array([word >> 2 * i & 3 for i in range(RUNGS)], np.uint8)
    if max(row_table, column_table, class_table) > ZERO or first > MAX_ROW + 1:
        raise FrameError("codec 'rans' got a header that names tables or rungs which do not exist")
    if word >> 2 * RUNGS or shapes.max() >= SHAPES or lane_bits > MAX_LANE_BITS:
        raise FrameError("codec 'rans' got a header with bits set that mean nothing")
    if data.size < LAYOUT.size + (4 << lane_bits) or data.size % 2:
        raise FrameError(f"codec 'rans' got {data.size} bytes, which {1 << lane_bits} lanes cannot fill")
    return Header(lane_bits, row_table, column_table, class_table, first - 1, shapes)
