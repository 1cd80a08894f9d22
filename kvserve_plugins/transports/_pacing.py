"""A token bucket in the form of a clock: when does a link of a given rate have the next bytes through?"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

BURST_BYTES = 64 * 1024
BURST_S = 0.010
MIN_PIECE = 4096


class Pacer:
    """``due(n)`` is the time at which n more bytes have left a link of ``rate`` bytes/s (None: at once).

    A caller that comes late catches up at most one burst, 64 KiB or 10 ms whichever is more. One that had nothing to
    send calls :meth:`rest`, and saves nothing up by it: short transfers take as long as the rate says. Thread-safe.
    """

    def __init__(self, rate: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._clock = rate, clock
        self._slack = max(BURST_BYTES / rate, BURST_S) if rate else 0.0
        self._free = clock()
        self._resting = True
        self._lock = threading.Lock()

    def due(self, nbytes: int) -> float:
        """Book ``nbytes``; hold them back until the returned time."""
        now = self._clock()
        if not self._rate:
            return now
        with self._lock:
            start = max(self._free, now if self._resting else now - self._slack)
            self._resting = False
            self._free = start + nbytes / self._rate
            return self._free

    def refund(self, nbytes: int) -> None:
        """Of what was booked last ``nbytes`` will not be sent."""
        if self._rate:
            with self._lock:
                self._free -= nbytes / self._rate

    def rest(self) -> None:
        """There is nothing to send just now."""
        self._resting = True

    def piece(self, largest: int) -> int:
        """How many bytes to book at a time: 5 ms worth, from ``MIN_PIECE`` up to ``largest``."""
        if not self._rate:
            return largest
        return int(min(largest, max(MIN_PIECE, self._rate * 0.005)))
