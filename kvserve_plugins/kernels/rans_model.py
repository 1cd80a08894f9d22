"""The model of codec ``rans``: a rung for each row, an offset for each column, a shape for each rung.

A part is a matrix ``[rows, columns]`` of centred codes (a row is a component, a column a token of a cell). Value (r, t)
is coded under rung ``rows[r] + columns[t]``: some tokens are larger than others in all components at once, and that is
worth 3 % on a KLT. Only an encoder calls :func:`fit`, whose choices any encoder may make in its own way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvserve_plugins.kernels.rans_set import BEYOND, LOGISTIC, PUBLISHED, TableSet
from kvserve_plugins.kernels.rans_tables import RUNGS

TOP = 17
"""Rows above this rung are shifted right until they are at or below it; three rungs are a factor of 2."""
OCTAVE = 3
MAX_ROW = TOP + 12 * OCTAVE
FIRST_SIGMA = 0.1
MIN_ROWS, MIN_COLUMNS, MAX_OFFSET, COLUMN_BITS = 16, 2, 6, 2.5
DELTA_BITS = 1.3
"""What one rung more between neighbouring rows costs, about."""
I32 = NDArray[np.int32]
F32 = NDArray[np.float32]


@dataclass(frozen=True)
class Model:
    """rows: ``[R]`` rung of a row, -1 for a row of zeros. columns: ``[T]`` offsets. shapes: ``[21]`` of each rung."""

    rows: I32
    columns: I32
    shapes: NDArray[np.uint8]

    @property
    def live(self) -> NDArray[np.bool_]:
        """``[R]``: rows that are not all zero."""
        return self.rows >= 0

    @property
    def shifts(self) -> I32:
        """``[live rows]``: low bits that are sent as they are."""
        return shift_of(self.rows[self.live])

    def tables(self) -> NDArray[np.uint8]:
        """``[live rows, T]``: the table of each value."""
        rows = self.rows[self.live]
        rungs = np.clip((rows - OCTAVE * shift_of(rows)).astype(np.int8)[:, None] + self.columns.astype(np.int8), 0, 20)
        return (self.shapes * np.uint8(RUNGS) + np.arange(RUNGS, dtype=np.uint8)).take(rungs)


def shift_of(rows: I32) -> I32:
    """Low bits of rows on these rungs."""
    return np.maximum(0, -((TOP - rows) // OCTAVE))


def rounded_shift(q: I32, shifts: I32) -> I32:
    """``(q + half) >> k`` row by row, so that what remains is centred."""
    if not shifts.any():
        return q
    return (q + ((1 << shifts) >> 1)[:, None]) >> shifts[:, None]


def low_bits(q: I32, shifts: I32) -> I32:
    """What :func:`rounded_shift` drops, at least 0."""
    return (q + ((1 << shifts) >> 1)[:, None]) & ((1 << shifts) - 1)[:, None]


def unshifted(high: I32, low: I32, shifts: I32) -> I32:
    """The inverse of the two."""
    return (high << shifts[:, None]) + low - ((1 << shifts) >> 1)[:, None]


def fit(q: I32, of: TableSet = PUBLISHED) -> Model:
    """A good model of centred codes ``[R, T]`` under a set of tables."""
    live = q.any(1)
    rows = np.full(len(q), -1, np.int32)
    columns = np.zeros(q.shape[1], np.int32)
    shapes = np.full(RUNGS, LOGISTIC, np.uint8)
    if live.any():
        values = q[live]
        shifts = _shifts(values)
        magnitude = np.minimum(np.abs(rounded_shift(values, shifts)), 16).astype(np.intp)
        cost = _row_histograms(magnitude) @ of.costs[LOGISTIC].T
        rungs = _near(cost, shifts, live)
        columns = _columns(magnitude, rungs, of)
        if columns.any():
            rungs = _near(_refined(magnitude, rungs, columns, of), shifts, live)
        shapes = _shapes(magnitude, rungs, columns, of)
        rows[live] = rungs + OCTAVE * shifts
    return Model(rows, columns, shapes)


def _shifts(values: I32) -> I32:
    """Low bits to drop for a row of that mean magnitude (a sigma of 1.25 times it)."""
    sigma = 1.25 * np.abs(values).mean(1) / FIRST_SIGMA
    rung = np.rint(OCTAVE * np.log2(np.maximum(sigma, 1.0))).astype(np.int32)
    return shift_of(np.minimum(rung, MAX_ROW))


def _row_histograms(magnitude: NDArray[np.intp]) -> F32:
    """``[R, 17]`` counts."""
    n = len(magnitude)
    keys = magnitude + (np.arange(n) * 17)[:, None]
    return np.bincount(keys.reshape(-1), minlength=n * 17).reshape(n, 17).astype(np.float32)


def _near(cost: F32, shifts: I32, live: NDArray[np.bool_]) -> I32:
    """The best rung of each row; one sweep over even, then odd rows lets neighbours agree where it is cheap to.

    A shifted row must keep a rung that gives its shift back: 15, 16 or 17; one that is not, at most 17.
    """
    allowed = np.arange(RUNGS) <= TOP
    allowed = np.where((shifts > 0)[:, None], allowed & (np.arange(RUNGS) > TOP - OCTAVE), allowed)
    cost = np.where(allowed, cost, np.float32(1e9))
    rungs = cost.argmin(1).astype(np.int32)
    if len(rungs) > 2:
        for parity in (1, 2):
            middle = np.arange(parity, len(rungs) - 1, 2)
            place = OCTAVE * shifts + rungs
            here = OCTAVE * shifts[middle, None] + np.arange(RUNGS)
            apart = np.abs(here - place[middle - 1, None]) + np.abs(here - place[middle + 1, None])
            rungs[middle] = (cost[middle] + np.float32(DELTA_BITS) * apart).argmin(1)
    return rungs


def _column_costs(magnitude: NDArray[np.intp], rungs: I32, offset: int, of: TableSet) -> F32:
    """``[T]``: bits of each column with its rungs moved by ``offset``."""
    keys = magnitude + ((rungs + BEYOND + offset) * 17)[:, None]
    return of.ladder.reshape(-1).take(keys).sum(0)


def _columns(magnitude: NDArray[np.intp], rungs: I32, of: TableSet) -> I32:
    """Offsets ``[T]`` at the bottom of a parabola through three costs; all 0 where they do not pay."""
    if magnitude.shape[0] < MIN_ROWS or magnitude.shape[1] < MIN_COLUMNS:
        return np.zeros(magnitude.shape[1], np.int32)
    below, here, above = (_column_costs(magnitude, rungs, d, of) for d in (-2, 0, 2))
    bend = np.maximum(below + above - 2 * here, 1e-3)
    least = np.clip(np.rint((below - above) / bend), -MAX_OFFSET, MAX_OFFSET).astype(np.int32)
    gain = float(((below - above) ** 2 / (8 * bend))[least != 0].sum())
    return least if gain > COLUMN_BITS * least.size else np.zeros_like(least)


def _refined(magnitude: NDArray[np.intp], rungs: I32, columns: I32, of: TableSet) -> F32:
    """``[R, 21]``: bits of each row one rung lower, as it is and one higher, given the offsets; 1e9 elsewhere."""
    cost = np.full((len(rungs), RUNGS), 1e9, np.float32)
    each = np.arange(len(rungs))
    for step in (-1, 0, 1):
        at = np.clip(rungs + step, 0, RUNGS - 1)
        lines = np.clip(at[:, None] + columns, 0, RUNGS - 1) * 17
        cost[each, at] = of.costs[LOGISTIC].reshape(-1).take(lines + magnitude).sum(1)
    return cost


def _shapes(magnitude: NDArray[np.intp], rungs: I32, columns: I32, of: TableSet) -> NDArray[np.uint8]:
    """``[21]``: the cheapest shape of each rung."""
    lines = np.clip(rungs[:, None] + columns, 0, RUNGS - 1) * 17
    seen = np.bincount((lines + magnitude).reshape(-1), minlength=RUNGS * 17).reshape(RUNGS, 17)
    cost = np.einsum("sim,im->si", of.costs, seen)
    used = seen.sum(1) > 0
    return np.where(used, cost.argmin(0), LOGISTIC).astype(np.uint8)
