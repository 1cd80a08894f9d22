"""The integer tables of codec ``rans``: published data, never computed from floats. See ``docs/rans-format.md``.

A table gives 32 symbols counts that sum to 4096. Symbols 0..30 are the values -15..15, symbol 31 is the escape.
Tables 0..62 are Laplace, logistic and Gaussian on 21 rungs (``21 shape + rung``), 63 knows only the value 0 and costs
nothing, 64..68 are 1..5 plain bits (symbol = the bits).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

PRECISION = 12
TOTAL = 1 << PRECISION
SYMBOLS = 32
ESCAPE = 31
CENTRE = 15
RUNGS = 21
SHAPES = 3
ZERO = 63
PLAIN = 63
"""Table ``PLAIN + b`` holds b plain bits."""
PLAIN_BITS = 5

# fmt: off
COUNTS: tuple[tuple[int, ...], ...] = (
    (4091, 2),
    (4081, 7),
    (4047, 24),
    (3975, 60),
    (3849, 123),
    (3653, 218, 3),
    (3397, 339, 10),
    (3087, 473, 29, 2),
    (2749, 600, 65, 7, 1),
    (2403, 702, 120, 20, 3, 1),
    (2065, 766, 188, 46, 11, 3, 1),
    (1749, 788, 259, 85, 28, 9, 3, 1),
    (1461, 773, 319, 132, 54, 23, 9, 4, 2, 1),
    (1211, 727, 360, 179, 89, 44, 22, 11, 5, 3, 1, 1),
    (998, 662, 379, 217, 125, 71, 41, 23, 13, 8, 4, 3, 1, 1),
    (812, 587, 377, 242, 156, 100, 64, 41, 27, 17, 11, 7, 5, 3, 2, 1),
    (656, 508, 358, 252, 178, 125, 88, 62, 44, 31, 22, 15, 11, 8, 5, 4),
    (531, 433, 328, 248, 188, 142, 108, 81, 62, 47, 35, 27, 20, 15, 12, 9),
    (429, 364, 291, 234, 187, 150, 120, 97, 77, 62, 50, 40, 32, 26, 21, 16),
    (344, 302, 253, 213, 178, 150, 126, 105, 88, 74, 62, 52, 44, 37, 31, 26),
    (273, 248, 216, 188, 163, 142, 124, 108, 94, 82, 71, 62, 54, 47, 41, 35),
    (4095,),
    (4089, 3),
    (4069, 13),
    (4009, 43),
    (3877, 109),
    (3649, 222, 1),
    (3325, 380, 5),
    (2933, 563, 18),
    (2513, 736, 52, 3),
    (2101, 865, 118, 13, 1),
    (1727, 926, 213, 38, 6, 1),
    (1403, 916, 318, 85, 21, 5, 1),
    (1131, 850, 405, 151, 51, 17, 5, 2, 1),
    (908, 751, 453, 222, 98, 41, 17, 7, 3, 1),
    (721, 641, 457, 278, 153, 79, 40, 20, 10, 5, 2, 1, 1),
    (576, 533, 427, 304, 199, 123, 73, 43, 25, 14, 8, 5, 3, 1, 1),
    (462, 437, 378, 301, 225, 160, 109, 73, 48, 31, 20, 13, 8, 5, 3, 2),
    (364, 353, 322, 278, 228, 180, 138, 103, 75, 55, 39, 28, 20, 14, 10, 7),
    (290, 284, 268, 243, 214, 182, 152, 124, 99, 78, 61, 47, 36, 28, 21, 16),
    (231, 227, 219, 206, 189, 170, 151, 131, 112, 95, 80, 66, 54, 45, 36, 30),
    (182, 181, 177, 170, 161, 151, 139, 127, 114, 102, 90, 79, 69, 60, 51, 44),
    (4095,),
    (4095,),
    (4089, 3),
    (4045, 25),
    (3901, 97),
    (3623, 236),
    (3231, 432),
    (2779, 652, 6),
    (2329, 846, 37),
    (1915, 965, 121, 4),
    (1557, 989, 253, 26, 1),
    (1255, 934, 386, 88, 11, 1),
    (1003, 832, 472, 183, 49, 9, 1),
    (805, 711, 495, 271, 117, 39, 10, 2),
    (639, 592, 471, 321, 188, 94, 41, 15, 5, 1),
    (509, 485, 419, 329, 234, 152, 89, 47, 23, 10, 4, 1),
    (405, 392, 358, 307, 248, 188, 134, 90, 57, 34, 19, 10, 5, 2, 1),
    (323, 315, 297, 270, 236, 198, 160, 125, 93, 67, 47, 31, 20, 12, 7, 4),
    (257, 252, 243, 229, 210, 188, 165, 140, 117, 95, 75, 58, 44, 33, 23, 16),
    (202, 201, 196, 189, 179, 167, 154, 139, 124, 109, 94, 80, 67, 55, 45, 36),
    (159, 160, 158, 154, 149, 142, 135, 127, 118, 109, 99, 90, 80, 71, 62, 54),
)
"""Counts of the values 0, 1, ... r; -v has the count of v, what is left of 4096 is the escape's."""
# fmt: on


def _frequencies() -> NDArray[np.uint32]:
    """``[69, 32]`` counts of every table."""
    out = np.zeros((PLAIN + PLAIN_BITS + 1, SYMBOLS), np.uint32)
    for row, counts in zip(out, COUNTS, strict=False):
        r = len(counts) - 1
        row[CENTRE : CENTRE + r + 1] = counts
        row[CENTRE - r : CENTRE + 1] = counts[::-1]
        row[ESCAPE] = TOTAL - row.sum()
    out[ZERO, CENTRE] = TOTAL
    for bits in range(1, PLAIN_BITS + 1):
        out[PLAIN + bits, : 1 << bits] = TOTAL >> bits
    return out


FREQUENCIES = _frequencies()
"""``[69, 32]``, rows sum to 4096."""
STARTS = np.cumsum(FREQUENCIES, axis=1, dtype=np.uint32) - FREQUENCIES
"""``[69, 32]``: where a symbol's slots begin."""
RADIUS = np.array([len(c) - 1 for c in COUNTS] + [0], np.uint8)
"""Of tables 0..63: the largest magnitude that is not an escape."""


def _slots() -> NDArray[np.uint32]:
    """``[69 * 4096]``: for each slot of each table, ``count - 1 << 17 | slot - start << 5 | symbol``."""
    which = np.arange(len(FREQUENCIES))[:, None]
    symbol = np.stack([np.repeat(np.arange(SYMBOLS), row) for row in FREQUENCIES])
    inside = np.arange(TOTAL) - STARTS[which, symbol]
    return ((FREQUENCIES[which, symbol] - 1) << 17 | inside << 5 | symbol).astype(np.uint32).reshape(-1)


SLOTS = _slots()
BITS = np.log2(TOTAL / np.maximum(FREQUENCIES[:64], 1)) + np.where(FREQUENCIES[:64] > 0, 0.0, 1e6)
"""``[64, 32]``: cost of a symbol in bits, for the encoder's choices; 1e6 where a table lacks it."""
