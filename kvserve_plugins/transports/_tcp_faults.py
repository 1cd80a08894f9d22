"""Faults on demand, for tests only: ``"corrupt:2,delay:3:0.5,drop:4,kill:5"`` strikes the nth segment sent.

From the configuration field ``faults`` or, where that is empty, the environment variable ``KVSERVE_FAULT_TCP``.
"""

from __future__ import annotations

import os
import signal
from typing import Literal, NamedTuple, cast, get_args

from kvserve_core.bodies import host_bytes
from kvserve_core.errors import ConfigError
from kvserve_core.wire import Sealed

ENV = "KVSERVE_FAULT_TCP"
Action = Literal["drop", "delay", "corrupt", "kill"]


class Fault(NamedTuple):
    """What happens to one segment. ``seconds`` is for delay."""

    action: Action
    seconds: float = 0.0


def parse_faults(text: str) -> dict[int, Fault]:
    """Faults by number of the segment, counted from 1 over everything the process serves.

    Raises:
        ConfigError: not in the form above.
    """
    found = {}
    for item in filter(None, text.split(",")):
        action, *numbers = item.strip().split(":")
        try:
            if action not in get_args(Action) or not 1 <= len(numbers) <= 2:
                raise ValueError
            fault = Fault(cast(Action, action), float(numbers[1]) if len(numbers) == 2 else 0.0)
            found[int(numbers[0])] = fault
        except ValueError:
            raise ConfigError(f"fault {item!r} is not understood; write for example 'delay:3:0.5'", "faults") from None
    return found


class Faults:
    """Counts segments and says what to do with the next."""

    def __init__(self, text: str) -> None:
        self._faults = parse_faults(text or os.environ.get(ENV, ""))
        self._count = 0

    def next(self) -> Fault | None:
        """The fault of the next segment; ``kill`` does not return."""
        if not self._faults:
            return None
        self._count += 1
        fault = self._faults.get(self._count)
        if fault is not None and fault.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return fault


def corrupted(sealed: Sealed) -> Sealed:
    """A copy with one bit of the body turned over, if it has any."""
    if not len(sealed.body):
        return sealed
    body = bytearray(host_bytes(sealed.body))
    body[len(body) // 2] ^= 1
    return Sealed(sealed.index, sealed.head, body)
