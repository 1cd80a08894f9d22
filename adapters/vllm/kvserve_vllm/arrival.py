"""How long a request has waited, on a clock that does not jump."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

MAX_FRONT_S = 60.0
"""Longest wait in the front end that is believed: its wall clock, or ours, may have been set meanwhile."""


@dataclass(frozen=True)
class Arrival:
    """at_s: when the scheduler took it, on the monotonic clock. front_s: how long it had been with the front end."""

    at_s: float
    front_s: float

    @classmethod
    def of(cls, request: Any) -> Arrival:
        """Of a request that arrives now; only its front end knows, by the wall clock, since when it is under way."""
        return cls(time.monotonic(), min(max(0.0, time.time() - request.arrival_time), MAX_FRONT_S))

    def waited_s(self) -> float:
        """Seconds since the front end took it."""
        return self.front_s + time.monotonic() - self.at_s
