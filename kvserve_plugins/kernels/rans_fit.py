"""A model's own tables for codec ``rans`` from codes: as k-means, each table becomes what it was chosen for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from kvserve_plugins.kernels.rans_model import I32, fit, rounded_shift
from kvserve_plugins.kernels.rans_pack import pack
from kvserve_plugins.kernels.rans_set import PUBLISHED, TableSet
from kvserve_plugins.kernels.rans_tables import CENTRE, ESCAPE, SYMBOLS, TOTAL, ZERO

ROUNDS = 4
SAMPLE = 7
"""Every seventh part is coded to tell which round's tables are best."""
PRIOR = 1000.0
"""Values that each published table counts for, so that one which is hardly used stays what it was."""
Histograms = NDArray[np.float64]
"""``[63, 17]``: how often each table was used for the magnitudes 0..15, and for larger ones."""


def used(parts: Iterable[I32], tables: TableSet) -> Histograms:
    """What an encoder of ``parts`` (centred codes ``[rows, columns]``) would code under each table."""
    found = np.zeros(ZERO * 17)
    for q in parts:
        model = fit(q, tables)
        magnitude = np.minimum(np.abs(rounded_shift(q[model.live], model.shifts)), 16)
        found += np.bincount((model.tables().astype(np.int64) * 17 + magnitude).reshape(-1), minlength=found.size)
    return found.reshape(ZERO, 17)


def tables_of(seen: Histograms) -> TableSet:
    """Tables for codes of these frequencies, by the rule of the published ones (``docs/rans-format.md``)."""
    published = PUBLISHED.frequencies[:ZERO].astype(np.float64) / TOTAL
    prior = np.concatenate((published[:, CENTRE:ESCAPE], published[:, ESCAPE:]), 1)
    prior[:, 1:-1] *= 2
    share = seen + PRIOR * prior
    share /= share.sum(1, keepdims=True)
    out = PUBLISHED.frequencies.copy()
    widest = int(share[:, CENTRE].argmax())
    for i, p in enumerate(share):
        out[i] = _counts(p, CENTRE if i == widest else 0)
    return TableSet(out)


def _counts(p: NDArray[np.float64], least: int) -> NDArray[np.int64]:
    """``[32]`` counts from the probabilities ``[17]`` of the magnitudes 0..15 and of more; at least 1 up to ``least``.

    The value 0 gets what is left of 4096, and at least 1: codes that lack it would otherwise leave less than nothing.
    """
    each = p[1:16] / 2 * TOTAL
    radius = max(least, int(np.flatnonzero(each >= 0.5)[-1]) + 1 if (each >= 0.5).any() else 0)
    counts = np.maximum(np.rint(each[:radius]).astype(np.int64), 1)
    escape = max(1, round(TOTAL * float(p[radius + 1 :].sum())))
    while 2 * counts.sum() + escape >= TOTAL:
        if escape > 2 * counts.max(initial=0):
            escape -= 1
        else:
            counts[counts.argmax()] -= 1
    out = np.zeros(SYMBOLS, np.int64)
    out[CENTRE + 1 : CENTRE + 1 + radius], out[CENTRE - radius : CENTRE] = counts, counts[::-1]
    out[ESCAPE], out[CENTRE] = escape, TOTAL - 2 * counts.sum() - escape
    return out


def coded_bytes(parts: Iterable[I32], tables: TableSet) -> int:
    """What a sample of ``parts`` takes under these tables."""
    return sum(map(len, pack(list(islice(parts, 0, None, SAMPLE)), tables)))


def fitted(parts: Callable[[], Iterable[I32]], progress: Callable[[int, int], None]) -> TableSet:
    """The tables under which the codes of ``parts()`` are smallest. ``progress(rounds done, of)``.

    As k-means: in each round the encoder chooses tables for all codes, and each table becomes the distribution of what
    it was chosen for. An encoder's search is not exact, so a round can lose; the best one counts, the published tables
    included.
    """
    tables = best = PUBLISHED
    least = coded_bytes(parts(), best)
    for i in range(ROUNDS):
        tables = tables_of(used(parts(), tables))
        size = coded_bytes(parts(), tables)
        if size < least:
            best, least = tables, size
        progress(i + 1, ROUNDS)
    return best
