"""The loops of rans in machine code against those in NumPy: the same bytes, the same codes, whatever they are given."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from kvserve_plugins.kernels import rans_lanes
from kvserve_plugins.kernels.rans_native import native
from kvserve_plugins.kernels.rans_set import PUBLISHED
from kvserve_plugins.kernels.rans_tables import SYMBOLS

pytest.importorskip("numba", reason="numba is an extra: pip install 'kvserve[fast]'")
draw = np.random.default_rng(7)
SHAPES = [[(1, 1)], [(40, 8), (7, 16), (40, 1)], [(300, 64)] * 3]


def streams(shapes: list[tuple[int, int]]) -> tuple[list[Any], list[Any]]:
    """Symbols and tables that have them."""
    tables = [draw.integers(0, 63, shape).astype(np.uint8) for shape in shapes]
    symbols = []
    for table in tables:
        weights = PUBLISHED.frequencies[table] > 0
        scores = draw.random((*table.shape, SYMBOLS)) * weights[..., :SYMBOLS]
        symbols.append(scores.argmax(-1).astype(np.uint8))
    return symbols, tables


def both(monkeypatch: pytest.MonkeyPatch, call: Any) -> tuple[Any, Any]:
    """What the loops in machine code give, and those in NumPy."""
    assert native() is not None
    fast = call()
    with monkeypatch.context() as patch:
        patch.setattr(rans_lanes, "native", lambda: None)
        return fast, call()


def same(left: Any, right: Any) -> bool:
    return all(np.array_equal(a, b) for pair in zip(left, right, strict=True) for a, b in zip(*pair, strict=True))


@pytest.mark.parametrize("shapes", SHAPES)
def test_states_and_words_are_the_same_and_come_back(
    monkeypatch: pytest.MonkeyPatch, shapes: list[tuple[int, int]]
) -> None:
    symbols, tables = streams(shapes)
    fast, plain = both(monkeypatch, lambda: rans_lanes.encode(symbols, tables))
    assert same(fast, plain)
    decoder = rans_lanes.Decoder([states for states, _ in fast], [words for _, words in fast])
    read = decoder.read(tables)
    assert all(np.array_equal(*pair) for pair in zip(read, symbols, strict=True))
    assert decoder.finished().all()


@pytest.mark.parametrize("words", [0, 3, 500])
def test_damaged_states_and_words_lead_to_the_same(monkeypatch: pytest.MonkeyPatch, words: int) -> None:
    tables = [draw.integers(0, 255, (60, 32)).astype(np.uint8) for _ in range(3)]  # tables that do not exist as well
    states = [draw.integers(0, 2**32, 32, dtype=np.uint32) for _ in tables]
    given = [draw.integers(0, 2**16, words).astype(np.uint16) for _ in tables]

    def run() -> list[Any]:
        decoder = rans_lanes.Decoder(states, given)
        read = decoder.read(copy.deepcopy(tables))
        return [read, decoder._states, [decoder._at], [decoder.finished()]]

    fast, plain = both(monkeypatch, run)
    assert same(fast, plain)
