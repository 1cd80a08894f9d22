"""The loops over steps of :mod:`~.rans_lanes` in machine code, where Numba is installed: vLLM and SGLang bring it.

The same integers, many times as fast as NumPy call by call, and without the interpreter's lock, so that an engine in
the same process computes on. Compiled once in a process, in about a second.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kvserve_plugins.kernels.rans_tables import PRECISION, TOTAL

_REST = np.uint32(TOTAL - 1)
_PRECISION, _WORD, _TOP = np.uint32(PRECISION), np.uint32(16), np.uint32(32 - PRECISION)
_TOTAL, _LOW, _ONE = np.uint32(TOTAL), np.uint32(1 << 16), np.uint32(1)
_COUNT, _INSIDE = np.uint32(17), np.uint32(5)
_POP = "void(uint32[::1], uint32[:,::1], int64[::1], int64[::1], uint32[::1], uint32[::1])"
_PUSH = "int64(uint32[::1], uint32[:,::1], int64[::1], uint16[::1])"
_compiling = threading.Lock()


class Native(NamedTuple):
    """pop(x, base, at, owner, words, slots), and push(x, pairs, lanes, words) -> where in both the words begin."""

    pop: Callable[..., None]
    push: Callable[..., int]


def native() -> Native | None:
    """The loops, or None without Numba."""
    with _compiling:
        return _compiled()


@functools.cache
def _compiled() -> Native | None:
    try:
        from numba import njit
    except ImportError:  # not installed, or not for this NumPy
        return None
    compiled: Any = functools.partial(njit, nogil=True)
    return Native(compiled(_POP)(_pop), compiled(_PUSH)(_push))


def _pop(x: Any, base: Any, at: Any, owner: Any, words: Any, slots: Any) -> None:
    """As :meth:`rans_lanes.Decoder._pop`. Damaged bytes may lead anywhere, so no place is beyond its array."""
    last_slot, last_word = slots.size - 1, words.size - 1
    for step in range(base.shape[0]):
        for lane in range(x.size):
            state = x[lane]
            entry = slots[min(np.int64((state & _REST) + base[step, lane]), last_slot)]
            base[step, lane] = entry
            state >>= _PRECISION
            state = np.uint32(state * ((entry >> _COUNT) + _ONE) + ((entry >> _INSIDE) & _REST))
            if state < _LOW:
                stream = owner[lane]
                state = np.uint32((state << _WORD) | words[min(at[stream], last_word)])
                at[stream] += 1
            x[lane] = state


def _push(x: Any, pairs: Any, lanes: Any, words: Any) -> int:
    """As :func:`rans_lanes._push`; words and their lanes end up at the arrays' ends, in a decoder's order."""
    place = words.size
    for step in range(pairs.shape[0] - 1, -1, -1):
        for lane in range(x.size - 1, -1, -1):
            state, pair = x[lane], pairs[step, lane]
            count, start = pair >> _PRECISION, pair & _REST
            if (state >> _TOP) >= count:
                place -= 1
                lanes[place] = lane
                words[place] = np.uint16(state)
                state >>= _WORD
            x[lane] = np.uint32(state + (state // count) * (_TOTAL - count) + start)
    return place
