"""Interleaved rANS over many lanes and many streams at once: one loop over steps, NumPy over everything else.

Each lane is a 32-bit state in ``[2^16, 2^32)``, renormalised by 16-bit words; precision is 12 bits. A stream has N
lanes; its symbols are laid out in steps of N, lane j takes symbol j of each step. All lanes of a stream share one
sequence of words, in the order in which a decoder needs them: by step, within a step by lane. Duda, arXiv 1311.2540;
interleaving as in Giesen, arXiv 1402.3392.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvserve_plugins.kernels.rans_native import native
from kvserve_plugins.kernels.rans_set import PUBLISHED, TableSet
from kvserve_plugins.kernels.rans_tables import ESCAPE, PRECISION, TOTAL

LOW = 1 << 16
"""The smallest state, and each lane's first (for a decoder: last) one."""
U8, U16, U32 = NDArray[np.uint8], NDArray[np.uint16], NDArray[np.uint32]


def _phases(steps: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """``(first step, end, streams at work)`` for streams in order of falling length."""
    first = 0
    for active in range(len(steps), 0, -1):
        if steps[active - 1] > first:
            yield first, steps[active - 1], active
            first = steps[active - 1]


def _by_length(items: Sequence[NDArray[np.uint8]]) -> list[int]:
    return sorted(range(len(items)), key=lambda i: -len(items[i]))


def encode(symbols: Sequence[U8], tables: Sequence[U8], of: TableSet = PUBLISHED) -> list[tuple[U32, U16]]:
    """Final states ``[N]`` and words of each stream, from its symbols and tables ``[steps, N]``."""
    order = _by_length(symbols)
    widths = [symbols[i].shape[1] for i in order]
    ends = np.cumsum(widths)
    owner = np.repeat(np.arange(len(order)), widths)
    x = np.full(int(ends[-1]) if order else 0, LOW, np.uint32)
    lanes: list[NDArray[np.intp]] = []
    words: list[U16] = []
    for first, end, active in reversed(list(_phases([len(symbols[i]) for i in order]))):
        keys = [tables[i][first:end].astype(np.uint16) * 32 + symbols[i][first:end] for i in order[:active]]
        _push(x[: ends[active - 1]], of.pairs.take(np.concatenate(keys, axis=1)), lanes, words)
    streams = _sorted_words(lanes, words, owner, len(order))
    coded = {i: (x[e - w : e], s) for i, e, w, s in zip(order, ends, widths, streams, strict=True)}
    return [coded[i] for i in range(len(order))]


def _push(x: U32, pairs: U32, lanes: list[NDArray[np.intp]], words: list[U16]) -> None:
    """Put steps into the states, last first. A state that would overflow gives its low word away before."""
    if (loops := native()) is not None:
        given, away = np.empty(pairs.size, np.intp), np.empty(pairs.size, np.uint16)
        first = loops.push(x, pairs, given, away)
        lanes.append(given[first:])
        words.append(away[first:])
        return
    scratch = np.empty_like(x)
    for pair in pairs[::-1]:
        count, start = pair >> PRECISION, pair & (TOTAL - 1)
        np.right_shift(x, 32 - PRECISION, out=scratch)
        full = (scratch >= count).nonzero()[0]
        if full.size:
            value = x.take(full)
            lanes.append(full)
            words.append(value.astype(np.uint16))
            x[full] = value >> 16
        np.floor_divide(x, count, out=scratch)
        np.subtract(TOTAL, count, out=count)
        scratch *= count
        x += scratch
        x += start


def _sorted_words(lanes: list[NDArray[np.intp]], words: list[U16], owner: NDArray[np.intp], count: int) -> list[U16]:
    """What all steps gave away, per stream and in a decoder's order."""
    if not words:
        return [np.empty(0, np.uint16)] * count
    lane, word = np.concatenate(lanes[::-1]), np.concatenate(words[::-1])
    of = owner.astype(np.uint16).take(lane)
    edges = np.cumsum(np.bincount(of, minlength=count))[:-1]
    return np.split(word[np.argsort(of, kind="stable")], edges)


class Decoder:
    """Streams being decoded: states and the place in each one's words. Reads never leave the words it was given."""

    def __init__(self, states: Sequence[U32], words: Sequence[U16], of: TableSet = PUBLISHED) -> None:
        self._slots = of.slots
        self._states = [s.copy() for s in states]
        self._words = np.concatenate([*words, np.zeros(1, np.uint16)]).astype(np.uint32)
        sizes = np.array([w.size for w in words], np.intp)
        self._ends = np.cumsum(sizes)
        self._at = self._ends - sizes

    def read(self, tables: Sequence[U8]) -> list[U8]:
        """The next symbols ``[steps, N]`` of each stream, coded under ``tables [steps, N]``."""
        order = _by_length(tables)
        widths = [tables[i].shape[1] for i in order]
        ends = np.cumsum(widths)
        x = np.concatenate([self._states[i] for i in order]) if order else np.empty(0, np.uint32)
        at, pieces = self._at[order], []
        for first, end, active in _phases([len(tables[i]) for i in order]):
            base = np.concatenate([tables[i][first:end] for i in order[:active]], axis=1).astype(np.uint32) << PRECISION
            owner = np.repeat(np.arange(active), widths[:active])
            self._pop(x[: ends[active - 1]], base, at[:active], owner)
            pieces.append((base & ESCAPE).astype(np.uint8))
        self._at[order] = at
        out: dict[int, U8] = {}
        for i, e, w in zip(order, ends, widths, strict=True):
            self._states[i] = x[e - w : e]
            mine = [p[:, e - w : e] for p in pieces if p.shape[1] >= e]
            out[i] = np.concatenate(mine) if len(mine) > 1 else mine[0] if mine else np.empty((0, w), np.uint8)
        return [out[i] for i in range(len(order))]

    def _pop(self, x: U32, base: U32, at: NDArray[np.intp], owner: NDArray[np.intp]) -> None:
        """Take steps out of the states; ``base`` (first slot of each symbol's table) becomes entries of ``SLOTS``."""
        if (loops := native()) is not None:
            loops.pop(x, base, at, owner, self._words, self._slots)
            return
        ranks, count = np.arange(x.size), len(at)
        slot, low = np.empty(x.size, np.uint32), np.empty(x.size, np.uint32)
        for entry in base:
            np.bitwise_and(x, TOTAL - 1, out=slot)
            slot += entry
            self._slots.take(slot, out=entry, mode="clip")
            x >>= PRECISION
            np.right_shift(entry, 17, out=low)
            low *= x
            x += low
            np.right_shift(entry, 5, out=low)
            low &= TOTAL - 1
            x += low
            empty = (x < LOW).nonzero()[0]
            if empty.size:
                self._refill(x, empty, at, owner, ranks, count)

    def _refill(
        self,
        x: U32,
        empty: NDArray[np.intp],
        at: NDArray[np.intp],
        owner: NDArray[np.intp],
        ranks: NDArray[np.intp],
        count: int,
    ) -> None:
        if count == 1:
            where = ranks[: empty.size] + at[0]
            at[0] += empty.size
        else:
            of = owner.take(empty)
            taken = np.bincount(of, minlength=count)
            where = (at - taken.cumsum() + taken).take(of)
            where += ranks[: empty.size]
            at += taken
        x[empty] = (x.take(empty) << 16) | self._words.take(where, mode="clip")

    def finished(self) -> NDArray[np.bool_]:
        """Of each stream, whether every word was used and every lane is back where the encoder began."""
        home = np.array([bool((s == LOW).all()) for s in self._states], bool)
        return (self._at == self._ends) & home
