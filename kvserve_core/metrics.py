"""Counters of one process: plain numbers that an adapter exports. No exporter and no lock wait on the data path."""

from __future__ import annotations

import threading
from collections import Counter


class Counters:
    """Named sums. ``add`` is thread-safe; ``snapshot`` is a copy.

    Names in use: ``raw_bytes``, ``wire_bytes``, ``transfers``, ``failures``, and for the rungs of the ladder
    ``fallback_codec`` (fetches of what this side cannot decode), ``fallback_raw`` (segments) and
    ``fallback_recompute`` (fetches).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: Counter[str] = Counter()

    def add(self, name: str, value: int = 1) -> None:
        """Add ``value`` to the sum called ``name``."""
        with self._lock:
            self._values[name] += value

    def snapshot(self) -> dict[str, int]:
        """All sums as they stand."""
        with self._lock:
            return dict(self._values)
