"""A model's own tables for codec ``rans``, as a file; :mod:`~.rans_fit` makes them from codes.

The file is safetensors with one tensor, ``counts`` i16 ``[64, 32]``, in place of the published tables 0 to 63: rows sum
to 4096, v and -v count alike, the values with a count are -r .. r, the escape has at least 1, row 63 is all zero's, and
one row knows every value. Its metadata key ``kvserve.rans`` is JSON: ``version`` 1 and ``provenance``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvserve_core.errors import ArtefactError, UnavailableComponentError
from kvserve_core.json_text import parsed
from kvserve_plugins.kernels.rans_set import OWN, PUBLISHED, TableSet
from kvserve_plugins.kernels.rans_tables import CENTRE, ESCAPE, SYMBOLS, TOTAL, ZERO

KEY = "kvserve.rans"
VERSION = 1


def parse(data: bytes) -> TableSet:
    """The tables of a file.

    Raises:
        ArtefactError: it is not such a file, or tables that no coder can use.
        UnavailableComponentError: safetensors is not installed.
    """
    format_ = _safetensors()
    try:
        size = int.from_bytes(data[:8], "little")
        version = parsed(parsed(data[8 : 8 + size])["__metadata__"][KEY])["version"]
        if version != VERSION:
            raise ArtefactError(f"the tables are of version {version}, this kvserve reads {VERSION}; upgrade it")
        own = format_.numpy.load(data)["counts"]
        _check(own)
    except (format_.SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ArtefactError(
            f"not tables of 'kvserve calibrate tables': {type(error).__name__}: {error}; name a file that it wrote"
        ) from error
    return TableSet(np.concatenate((own.astype(np.uint32), PUBLISHED.frequencies[OWN:])))


def write(tables: TableSet, provenance: Mapping[str, Any]) -> bytes:
    """A file of them.

    Raises:
        ValueError: :func:`parse` would refuse them. UnavailableComponentError: safetensors is not installed.
    """
    format_ = _safetensors()
    own = tables.frequencies[:OWN].astype(np.int16)
    _check(own)
    about = json.dumps({"version": VERSION, "provenance": provenance})
    data: bytes = format_.numpy.save({"counts": own}, {KEY: about})
    return data


def _safetensors() -> ModuleType:
    """Imported here: the published tables do without it."""
    try:
        import safetensors.numpy
    except ImportError as error:
        hint = "a model's own tables of codec 'rans' need 'safetensors'; pip install 'kvserve[hf]'"
        raise UnavailableComponentError(hint) from error
    return safetensors


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
