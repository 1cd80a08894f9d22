"""From blobs of codec ``rans`` to codes, without trust in the blobs. See ``docs/rans-format.md``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvserve_core.errors import FrameError
from kvserve_plugins.kernels.rans_header import LAYOUT, MAX_STEPS, Header, parse
from kvserve_plugins.kernels.rans_lanes import LOW, Decoder
from kvserve_plugins.kernels.rans_model import I32, MAX_ROW, Model, unshifted
from kvserve_plugins.kernels.rans_pack import padded
from kvserve_plugins.kernels.rans_set import PUBLISHED, TableSet
from kvserve_plugins.kernels.rans_tables import CENTRE, ESCAPE, PLAIN, PLAIN_BITS, ZERO

U8 = NDArray[np.uint8]


class Reader:
    """Blobs of several parts, read section by section in step. Every read is within the blobs.

    shapes: ``(rows, columns)`` of each part. of: the tables that the encoder used.

    Raises:
        FrameError: a header that no encoder writes, or sizes that do not fit.
    """

    def __init__(
        self, blobs: Sequence[NDArray[np.uint8]], shapes: Sequence[tuple[int, int]], of: TableSet = PUBLISHED
    ) -> None:
        self._shapes, self._radius = shapes, of.radius
        self._heads = [parse(b) for b in blobs]
        states, words = [], []
        for blob, head in zip(blobs, self._heads, strict=True):
            middle = LAYOUT.size + 4 * head.lanes
            states.append(np.frombuffer(blob[LAYOUT.size : middle].tobytes(), "<u4").astype(np.uint32))
            words.append(np.frombuffer(blob[middle:].tobytes(), "<u2").astype(np.uint16))
            if states[-1].min() < LOW:
                raise FrameError("codec 'rans' got a state below 65536")
        self._lanes = Decoder(states, words, of)

    def parts(self) -> list[I32]:
        """The centred codes ``[rows, columns]`` of each part.

        Raises:
            FrameError: the blobs do not decode, or hold more or less than the parts.
        """
        models = self._models()
        tables = [m.tables() for m in models]
        shifts = [m.shifts for m in models]
        low = self._plain([np.repeat(s[s > 0], t.shape[1]) for s, t in zip(shifts, tables, strict=True)])
        values = self._values([t.reshape(-1) for t in tables])
        if not self._lanes.finished().all():
            raise FrameError("codec 'rans' got bytes that end elsewhere than they should")
        return [_assembled(*each) for each in zip(models, tables, values, low, strict=True)]

    def _models(self) -> list[Model]:
        sized = list(zip(self._heads, self._shapes, strict=True))
        deltas = self._values([_same(head.row_table, r - 1) for head, (r, _) in sized])
        columns = self._symbols([_same(head.column_table, t) for head, (_, t) in sized], escape=False)
        return [
            _model(head, shape, delta, column)
            for (head, shape), delta, column in zip(sized, deltas, columns, strict=True)
        ]

    def _symbols(self, tables: Sequence[U8], escape: bool) -> list[U8]:
        """One section of each part."""
        for table, head in zip(tables, self._heads, strict=True):
            if table.size > MAX_STEPS * head.lanes:
                raise FrameError(
                    f"codec 'rans' got {head.lanes} lanes for {table.size} symbols, {MAX_STEPS} a lane fit"
                )
        laid = [padded(t, h.lanes, ZERO) for t, h in zip(tables, self._heads, strict=True)]
        read = [s.reshape(-1)[: t.size] for s, t in zip(self._lanes.read(laid), tables, strict=True)]
        if not escape and any((s == ESCAPE).any() for s in read):
            raise FrameError("codec 'rans' got an escape where there can be none")
        return read

    def _plain(self, bits: Sequence[I32]) -> list[I32]:
        """Values of so many bits each, five bits a section, the lowest first."""
        values = [np.zeros(b.size, np.int32) for b in bits]
        done = 0
        while any((b > done).any() for b in bits):
            left = [np.clip(b - done, 0, PLAIN_BITS) for b in bits]
            read = self._symbols([(PLAIN + each[each > 0]).astype(np.uint8) for each in left], escape=True)
            for value, each, some in zip(values, left, read, strict=True):
                value[each > 0] |= some.astype(np.int32) << done
            done += PLAIN_BITS
        return values

    def _values(self, tables: Sequence[U8]) -> list[I32]:
        """Signed values and, in sections of their own, what escaped."""
        symbols = self._symbols(tables, escape=True)
        out = [s == ESCAPE for s in symbols]
        counts = [int(np.count_nonzero(o)) for o in out]
        values = [s.astype(np.int32) - CENTRE for s in symbols]
        if not any(counts):
            return values
        classes = self._symbols(
            [np.full(n, h.class_table, np.uint8) for n, h in zip(counts, self._heads, strict=True)], escape=False
        )
        signed = [c.astype(np.int32) - CENTRE for c in classes]
        if not all(c.all() for c in signed):
            raise FrameError("codec 'rans' got an escape of class 0")
        exponents = [np.abs(c) - 1 for c in signed]
        mantissas = self._plain(exponents)
        for value, o, table, c, g, m in zip(values, out, tables, signed, exponents, mantissas, strict=True):
            value[o] = np.sign(c) * (self._radius.take(table[o]) + (1 << g) + m)
        return values


def _same(table: int, count: int) -> U8:
    """The tables of a section that is left out where all its values are 0."""
    return np.full(0 if table == ZERO else count, table, np.uint8)


def _model(head: Header, shape: tuple[int, int], deltas: I32, columns: U8) -> Model:
    rows = np.full(shape[0], head.first_row, np.int64)
    if deltas.size:
        rows[1:] += np.cumsum(deltas, dtype=np.int64)
    if rows.min() < -1 or rows.max() > MAX_ROW:
        raise FrameError("codec 'rans' got a row on a rung that does not exist")
    offsets = columns.astype(np.int32) - CENTRE if columns.size else np.zeros(shape[1], np.int32)
    return Model(rows.astype(np.int32), offsets, head.shapes)


def _assembled(model: Model, tables: U8, values: I32, low: I32) -> I32:
    out = np.zeros((model.rows.size, model.columns.size), np.int32)
    high, shifts = values.reshape(tables.shape), model.shifts
    moved = shifts > 0
    if moved.any():
        high[moved] = unshifted(high[moved], low.reshape(-1, tables.shape[1]), shifts[moved])
    out[model.live] = high
    return out
