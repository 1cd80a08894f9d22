"""From codes to blobs of codec ``rans``: choices, sections of symbols, lanes. See ``docs/rans-format.md``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from kvserve_plugins.kernels.rans_header import MAX_LANE_BITS, MAX_STEPS, Header
from kvserve_plugins.kernels.rans_lanes import encode
from kvserve_plugins.kernels.rans_model import I32, Model, fit, low_bits, rounded_shift
from kvserve_plugins.kernels.rans_set import PUBLISHED, TableSet
from kvserve_plugins.kernels.rans_tables import CENTRE, ESCAPE, PLAIN, PLAIN_BITS, ZERO

U8 = NDArray[np.uint8]
LANE_BYTES = 600
"""A lane costs 3 bytes (its state holds 8 bits of the data on average), so 600 keep that below 0.5 %."""


@dataclass
class Sections:
    """Symbols and tables of one part, section by section, on their way to the lanes."""

    symbols: list[U8] = field(default_factory=list)
    tables: list[U8] = field(default_factory=list)

    def add(self, symbols: NDArray[np.integer], tables: U8) -> None:
        """One section."""
        if symbols.size:
            self.symbols.append(symbols.astype(np.uint8))
            self.tables.append(tables)

    def plain(self, values: I32, bits: I32) -> None:
        """``bits[i]`` low bits of each value, five at a time, the lowest first."""
        while (some := bits > 0).any():
            values, bits = values[some], bits[some]
            take = np.minimum(bits, PLAIN_BITS)
            self.add(values & ((1 << take) - 1), (PLAIN + take).astype(np.uint8))
            values, bits = values >> take, bits - take

    def bits(self, of: TableSet) -> float:
        """About what the symbols take."""
        plain = np.arange(1, PLAIN_BITS + 1)
        cost = np.concatenate((of.bits, np.broadcast_to(plain[:, None], (PLAIN_BITS, of.bits.shape[1]))))
        return float(sum(cost[t, s].sum() for s, t in zip(self.symbols, self.tables, strict=True)))

    def laid_out(self, lanes: int) -> tuple[U8, U8]:
        """Symbols and tables ``[steps, lanes]``, each section filled up with zeros that cost nothing."""
        return _steps(self.symbols, lanes, CENTRE), _steps(self.tables, lanes, ZERO)


def _steps(sections: Sequence[U8], lanes: int, fill: int) -> U8:
    steps = [padded(s, lanes, fill) for s in sections]
    return np.concatenate(steps) if steps else np.empty((0, lanes), np.uint8)


def padded(section: U8, lanes: int, fill: int) -> U8:
    """``[steps, lanes]``, the last step filled up."""
    short = -section.size % lanes
    whole = np.concatenate((section, np.full(short, fill, np.uint8))) if short else section
    return whole.reshape(-1, lanes)


@dataclass(frozen=True)
class Escaped:
    """Signed values as symbols of given tables, and what escapes from them: class and mantissa of each."""

    symbols: U8
    classes: I32
    mantissas: I32
    exponents: I32


def escaped(values: I32, tables: U8, of: TableSet) -> Escaped:
    """Values beyond their table's radius r become the escape; ``|v| - r = 2^g + mantissa``, class ``+-(g + 1)``."""
    radius = of.radius.take(tables).astype(np.int32)
    over = np.abs(values) - radius
    out = over > 0
    symbols = np.where(out, ESCAPE, values + CENTRE).astype(np.uint8)
    if not out.any():
        empty = np.empty(0, np.int32)
        return Escaped(symbols, empty, empty, empty)
    beyond = over[out].astype(np.int32)
    exponents = np.frexp(beyond.astype(np.float64))[1].astype(np.int32) - 1
    classes = np.where(values[out] < 0, -1, 1).astype(np.int32) * (exponents + 1)
    return Escaped(symbols, classes, beyond - (1 << exponents).astype(np.int32), exponents)


def _table_for(values: I32, may_escape: bool, of: TableSet) -> int:
    """The cheapest of the 64 tables for these values as one section; ZERO if they are all 0 (or none)."""
    if not values.any():
        return ZERO
    magnitude = np.abs(values)
    seen = np.bincount(np.where(magnitude > CENTRE, ESCAPE, np.minimum(values, CENTRE) + CENTRE), minlength=ESCAPE + 1)
    cost = of.bits[:ZERO]
    if may_escape:
        beyond = np.abs(np.arange(ESCAPE + 1) - CENTRE) - of.radius[:ZERO, None].astype(np.int64)
        cost = np.where(beyond > 0, cost[:, ESCAPE:] + 4 + np.log2(np.maximum(beyond, 1)), cost)
    return int((cost @ seen).argmin())


def pack(parts: Sequence[I32], of: TableSet = PUBLISHED) -> list[bytes]:
    """Blobs of centred codes ``[rows, columns]``, none of them empty."""
    made = [_sections(q, fit(q, of), of) for q in parts]
    heads = [replace(head, lane_bits=_lane_bits(s, of)) for head, s in made]
    laid = [s.laid_out(head.lanes) for head, (_, s) in zip(heads, made, strict=True)]
    coded = encode([s for s, _ in laid], [t for _, t in laid], of)
    return [
        head.packed + states.astype("<u4").tobytes() + words.astype("<u2").tobytes()
        for head, (states, words) in zip(heads, coded, strict=True)
    ]


def _lane_bits(sections: Sections, of: TableSet = PUBLISHED) -> int:
    """Lanes (a power of two) such that their states weigh little and no lane has too much to do."""
    wanted = max(1, int(sections.bits(of) / 8 / LANE_BYTES))
    least = -(-max((s.size for s in sections.symbols), default=1) // MAX_STEPS)
    return max(min(MAX_LANE_BITS, wanted.bit_length() - 1), (least - 1).bit_length())


def _sections(q: I32, model: Model, of: TableSet = PUBLISHED) -> tuple[Header, Sections]:
    """The header but for its lanes, and the sections of a part."""
    deltas, shifts = np.diff(model.rows).astype(np.int32), model.shifts
    tables, live = model.tables().reshape(-1), q[model.live]
    values = escaped(rounded_shift(live, shifts).reshape(-1), tables, of)
    row_table, column_table = _table_for(deltas, True, of), _table_for(model.columns, False, of)
    rows = escaped(deltas, np.full(deltas.size, row_table, np.uint8), of)
    class_table = _table_for(np.concatenate((rows.classes, values.classes)), False, of)
    out = Sections()
    if row_table != ZERO:
        _add(out, rows, np.full(deltas.size, row_table, np.uint8), class_table)
    if column_table != ZERO:
        out.add(model.columns + CENTRE, np.full(model.columns.size, column_table, np.uint8))
    moved = shifts > 0
    low = low_bits(live[moved], shifts[moved])
    out.plain(low.reshape(-1), np.repeat(shifts[moved], q.shape[1]))
    _add(out, values, tables, class_table)
    return Header(0, row_table, column_table, class_table, int(model.rows[0]), model.shapes), out


def _add(out: Sections, values: Escaped, tables: U8, class_table: int) -> None:
    out.add(values.symbols, tables)
    out.add(values.classes + CENTRE, np.full(values.classes.size, class_table, np.uint8))
    out.plain(values.mantissas, values.exponents)
