"""Rooms of a prefill rank where one half of a request came, and the other may come late or never.

A request's halves meet in a room: SGLang's sender here, and the decode ranks that ask for it. Either may give up before
the other is there, and the other must hear of it when it comes.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

KEPT, KEPT_S = 4096, 120.0
"""How many rooms that are over are remembered, and for how long: a later request may have the number."""
WAITED_S = 900.0
"""For longer no decode rank waits for a sender: SGLang's own limits are below."""


@dataclass(frozen=True)
class Over:
    """One half is gone. reason: why the other cannot go on, empty where the request was served."""

    sender: bool
    reason: str
    at_s: float


class Lobby:
    """One per prefill rank; for SGLang's scheduler and the control thread. drop: forgets what is kept of a room."""

    def __init__(self, drop: Callable[[int], None]) -> None:
        self._drop = drop
        self._senders: set[int] = set()
        self._asked: OrderedDict[int, float] = OrderedDict()
        self._over: OrderedDict[int, Over] = OrderedDict()
        self._lock = threading.Lock()

    def entered(self, room: int) -> str:
        """A sender is there: why it cannot go on, empty where it can."""
        with self._lock:
            self._senders.add(room)
            self._asked.pop(room, None)
            return self._reason(room, of_sender=False, used=True)

    def left(self, room: int, reason: str) -> None:
        """A sender is gone. reason: why it failed, empty where it did not."""
        with self._lock:
            self._senders.discard(room)
            self._remember(room, Over(True, reason, time.monotonic()))

    def asked(self, room: int) -> str:
        """A decode rank asks: why it is too late, empty where it is not."""
        with self._lock:
            reason = self._reason(room, of_sender=True)
            if room not in self._senders and not reason:
                self._asked.setdefault(room, time.monotonic())
            self._sweep()
            return reason

    def gave_up(self, room: int, reason: str) -> bool:
        """The decode side ends a request. False where no sender is there: nothing is kept but that it is over."""
        with self._lock:
            if room in self._senders:
                return True
            self._asked.pop(room, None)
            if room not in self._over:
                self._remember(room, Over(False, reason, time.monotonic()))
            self._drop(room)
            return False

    def _reason(self, room: int, *, of_sender: bool, used: bool = False) -> str:
        over = self._over.get(room)
        if over is None:
            return ""
        if used:
            del self._over[room]
        fresh = time.monotonic() - over.at_s < KEPT_S
        return over.reason if over.sender is of_sender and fresh else ""

    def _remember(self, room: int, over: Over) -> None:
        self._over.pop(room, None)
        self._over[room] = over
        while len(self._over) > KEPT:
            self._over.popitem(last=False)

    def _sweep(self) -> None:
        oldest_s = time.monotonic() - WAITED_S
        while self._asked and next(iter(self._asked.values())) < oldest_s:
            self._drop(self._asked.popitem(last=False)[0])
