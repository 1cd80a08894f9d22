"""A second decoder of ``rans``, one symbol at a time in plain integers, written from ``docs/rans-format.md`` alone."""

from __future__ import annotations

from collections.abc import Sequence

from kvserve_plugins.kernels.rans_tables import COUNTS

ESCAPE = 31


def counts(table: int) -> list[int]:
    if table > 63:
        bits = table - 63
        return [4096 >> bits if s < 1 << bits else 0 for s in range(32)]
    half = COUNTS[table] if table < 63 else (4096,)
    out = [half[abs(s - 15)] if abs(s - 15) < len(half) else 0 for s in range(31)]
    return [*out, 4096 - sum(out)]


ALL = [counts(t) for t in range(69)]
"""The published tables and the plain bits."""


class Lanes:
    """The states and words of one blob."""

    def __init__(self, data: bytes, tables: Sequence[Sequence[int]]) -> None:
        self.tables = tables
        self.n = 1 << data[0]
        states, words = data[12 : 12 + 4 * self.n], data[12 + 4 * self.n :]
        self.x = [int.from_bytes(states[4 * j : 4 * j + 4], "little") for j in range(self.n)]
        self.words = [int.from_bytes(words[i : i + 2], "little") for i in range(0, len(words), 2)]

    def section(self, tables: Sequence[int]) -> list[int]:
        out = []
        padded = [*tables, *[63] * (-len(tables) % self.n)]
        for step in range(0, len(padded), self.n):
            out += [self._symbol(lane, padded[step + lane]) for lane in range(self.n)]
            for lane in range(self.n):
                if self.x[lane] < 65536:
                    self.x[lane] = 65536 * self.x[lane] + self.words.pop(0)
        return out[: len(tables)]

    def _symbol(self, lane: int, table: int) -> int:
        slot, start = self.x[lane] % 4096, 0
        for symbol, count in enumerate(self.tables[table]):
            if slot < start + count:
                self.x[lane] = count * (self.x[lane] // 4096) + slot - start
                return symbol
            start += count
        raise AssertionError(table)

    def plain(self, bits: Sequence[int]) -> list[int]:
        values, done = [0] * len(bits), 0
        while max(bits, default=0) > done:
            which = [i for i, b in enumerate(bits) if b > done]
            read = self.section([63 + min(5, bits[i] - done) for i in which])
            for i, value in zip(which, read, strict=True):
                values[i] += value << done
            done += 5
        return values

    def values(self, tables: Sequence[int], class_table: int) -> list[int]:
        symbols = self.section(tables)
        escapes = [i for i, s in enumerate(symbols) if s == ESCAPE]
        classes = [s - 15 for s in self.section([class_table] * len(escapes))]
        mantissas = self.plain([abs(c) - 1 for c in classes])
        values = [s - 15 for s in symbols]
        for i, c, m in zip(escapes, classes, mantissas, strict=True):
            radius = sum(count > 0 for count in self.tables[tables[i]][16:31])
            values[i] = (1 if c > 0 else -1) * (radius + 2 ** (abs(c) - 1) + m)
        return values


def decode(data: bytes, rows: int, columns: int, alphabet: int, own: Sequence[Sequence[int]] = ALL) -> list[int]:
    """The codes of a part that has some."""
    _, row_table, column_table, class_table, first = data[:5]
    packed = int.from_bytes(data[5:12], "little")
    lanes = Lanes(data, own)
    deltas = lanes.values([row_table] * (rows - 1), class_table) if row_table != 63 else [0] * (rows - 1)
    offsets = [s - 15 for s in lanes.section([column_table] * columns)] if column_table != 63 else [0] * columns
    rungs = [first - 1]
    for delta in deltas:
        rungs.append(rungs[-1] + delta)
    low_bits = [max(0, -((17 - p) // 3)) for p in rungs]
    tables = []
    for p, k in zip(rungs, low_bits, strict=True):
        if p >= 0:
            at = [min(20, max(0, p - 3 * k + o)) for o in offsets]
            tables += [21 * (packed >> 2 * i & 3) + i for i in at]
    low = lanes.plain([k for p, k in zip(rungs, low_bits, strict=True) if p >= 0 and k for _ in offsets])
    high = lanes.values(tables, class_table)
    assert not lanes.words
    assert set(lanes.x) == {65536}
    out = []
    for p, k in zip(rungs, low_bits, strict=True):
        for _ in offsets:
            q = 0 if p < 0 else (high.pop(0) << k) + (low.pop(0) if k else 0) - (1 << k) // 2
            out.append(q + (alphabet - 1) // 2)
    return out
