"""A model's own tables for codec ``rans``, as a file and from codes.

The file is safetensors with one tensor, ``counts`` i16 ``[64, 32]``, in place of the published tables 0 to 63: rows sum
to 4096, v and -v count alike, the values with a count are -r .. r, the escape has at least 1, row 63 is all zero's, and
one row knows every value. Its metadata key ``kvserve.rans`` is JSON: ``version`` 1 and ``provenance``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvserve_core.errors import ArtefactError
from kvserve_plugins.kernels.rans_model import I32, fit, rounded_shift
from kvserve_plugins.kernels.rans_pack import pack
from kvserve_plugins.kernels.rans_set import OWN, PUBLISHED, TableSet
from kvserve_plugins.kernels.rans_tables import CENTRE, ESCAPE, SYMBOLS, TOTAL, ZERO

KEY = "kvserve.rans"
VERSION = 1
ROUNDS = 4
SAMPLE = 7
"""Every seventh part is coded to tell which round's tables are best."""
PRIOR = 1000.0
"""Values that each published table counts for, so that one which is hardly used stays what it was."""
Histograms = NDArray[np.float64]
"""``[63, 17]``: how often each table was used for the magnitudes 0..15, and for larger ones."""


def parse(data: bytes) -> TableSet:
    """The tables of a file.

    Raises:
        ArtefactError: it is not such a file, or tables that no coder can use.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        size = int.from_bytes(data[:8], "little")
        version = json.loads(json.loads(data[8 : 8 + size])["__metadata__"][KEY])["version"]
        if version != VERSION:
            raise ArtefactError(f"the tables are of version {version}, this kvserve reads {VERSION}; upgrade it")
        own = load(data)["counts"]
        _check(own)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ArtefactError(
            f"not tables of 'kvserve calibrate tables': {type(error).__name__}: {error}; name a file that it wrote"
        ) from error
    return TableSet(np.concatenate((own.astype(np.uint32), PUBLISHED.frequencies[OWN:])))


def write(tables: TableSet, provenance: Mapping[str, Any]) -> bytes:
    """A file of them."""
    from safetensors.numpy import save

    about = json.dumps({"version": VERSION, "provenance": provenance})
    return save({"counts": tables.frequencies[:OWN].astype(np.int16)}, {KEY: about})


def _check(own: NDArray[Any]) -> None:
    if own.shape != (OWN, SYMBOLS) or own.dtype != np.int16:
        raise ValueError(f"'counts' is {own.dtype} {list(own.shape)}, not int16 [{OWN}, {SYMBOLS}]")
    if own.min() < 0 or (own.sum(1, dtype=np.int64) != TOTAL).any() or own[ZERO, CENTRE] != TOTAL:
        raise ValueError(f"rows of 'counts' must sum to {TOTAL}, the last one at value 0")
    up, down = own[:, CENTRE:ESCAPE], own[:, CENTRE::-1]
    radius = np.count_nonzero(up, axis=1)
    if (
        (up != down).any()
        or (radius == 0).any()
        or (np.arange(CENTRE + 1) < radius[:, None]).tolist() != (up > 0).tolist()
    ):
        raise ValueError("a row of 'counts' is not even, or has a gap")
    if (own[:ZERO, ESCAPE] == 0).any() or radius.max() <= CENTRE:
        raise ValueError("a row of 'counts' lacks the escape, or no row knows all values")


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
    for row, p in zip(out, share, strict=False):
        row[:] = _counts(p)
    return TableSet(out)


def _counts(p: NDArray[np.float64]) -> NDArray[np.int64]:
    """``[32]`` counts from the probabilities ``[17]`` of the magnitudes 0..15 and of more."""
    each = p[1:16] / 2 * TOTAL
    radius = int(np.flatnonzero(each >= 0.5)[-1]) + 1 if (each >= 0.5).any() else 0
    out = np.zeros(SYMBOLS, np.int64)
    counts = np.maximum(np.rint(each[:radius]).astype(np.int64), 1)
    out[CENTRE + 1 : CENTRE + 1 + radius], out[CENTRE - radius : CENTRE] = counts, counts[::-1]
    out[ESCAPE] = max(1, round(TOTAL * float(p[radius + 1 :].sum())))
    out[CENTRE] = TOTAL - out.sum()
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
