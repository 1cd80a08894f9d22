"""What a coder needs of a set of tables: :data:`PUBLISHED`, or a model's own (:mod:`~.rans_file`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvserve_plugins.kernels.rans_tables import CENTRE, ESCAPE, FREQUENCIES, PRECISION, RUNGS, SHAPES, SYMBOLS, TOTAL

OWN = 64
"""Tables of a set; the plain bits behind them are the same in all."""
LOGISTIC, BEYOND = 1, 8


@dataclass(frozen=True, eq=False)
class TableSet:
    """frequencies: ``[69, 32]`` u32, rows sum to 4096; 0..62 are ``21 shape + rung``, then as in :mod:`~.rans_tables`.

    The values -v and v have equal counts.
    """

    frequencies: NDArray[np.uint32]

    @cached_property
    def starts(self) -> NDArray[np.uint32]:
        """``[69, 32]``: where a symbol's slots begin."""
        return np.cumsum(self.frequencies, axis=1, dtype=np.uint32) - self.frequencies

    @cached_property
    def radius(self) -> NDArray[np.uint8]:
        """Of tables 0..63: the largest magnitude that is not an escape."""
        return (np.count_nonzero(self.frequencies[:OWN, CENTRE:ESCAPE], axis=1) - 1).astype(np.uint8)

    @cached_property
    def slots(self) -> NDArray[np.uint32]:
        """``[69 * 4096]``: for each slot of each table, ``count - 1 << 17 | slot - start << 5 | symbol``."""
        which = np.arange(len(self.frequencies))[:, None]
        symbol = np.stack([np.repeat(np.arange(SYMBOLS), row) for row in self.frequencies])
        inside = np.arange(TOTAL) - self.starts[which, symbol]
        return ((self.frequencies[which, symbol] - 1) << 17 | inside << 5 | symbol).astype(np.uint32).reshape(-1)

    @cached_property
    def pairs(self) -> NDArray[np.uint32]:
        """``count << 12 | start`` by ``table * 32 + symbol``; the start of a count of 0 means nothing."""
        return (self.frequencies << PRECISION | np.minimum(self.starts, TOTAL - 1)).reshape(-1)

    @cached_property
    def bits(self) -> NDArray[np.float64]:
        """``[64, 32]``: cost of a symbol in bits, for the encoder's choices; 1e6 where a table lacks it."""
        own = self.frequencies[:OWN]
        return np.asarray(np.log2(TOTAL / np.maximum(own, 1)) + np.where(own > 0, 0.0, 1e6))

    @cached_property
    def costs(self) -> NDArray[np.float32]:
        """``[3, 21, 17]``: bits of the magnitudes 0..15 and of anything larger, sign included."""
        bits = self.bits[: SHAPES * RUNGS, CENTRE:ESCAPE]
        over = np.arange(17) - self.radius[: SHAPES * RUNGS, None].astype(np.float64)
        escaped = self.bits[: SHAPES * RUNGS, ESCAPE, None] + 3 + np.log2(np.maximum(over, 1))
        out = np.where(over <= 0, np.pad(bits, ((0, 0), (0, 17 - bits.shape[1]))), escaped)
        return out.reshape(SHAPES, RUNGS, 17).astype(np.float32)

    @cached_property
    def ladder(self) -> NDArray[np.float32]:
        """``[37, 17]``: costs under shape 1 of rungs -8 .. 28, clipped."""
        return np.pad(self.costs[LOGISTIC], ((BEYOND, BEYOND), (0, 0)), mode="edge")


PUBLISHED = TableSet(FREQUENCIES)
"""The tables of the format; see ``docs/rans-format.md``."""
