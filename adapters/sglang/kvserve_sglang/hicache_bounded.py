"""Calls into a store that may not answer, such as a network file system whose server is gone."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

Result = TypeVar("Result")
log = logging.getLogger(__name__)


class Bounded:
    """Waits so long for an answer, then goes without one, and does not ask again for as long.

    A call that hangs keeps a thread of its own, which dies with the process.
    """

    def __init__(self, within_s: float) -> None:
        self._within_s = within_s
        self._silent_until_s = 0.0

    def call(self, otherwise: Result, work: Callable[[], Result]) -> Result:
        """What ``work`` returns or raises, ``otherwise`` where it takes too long."""
        if time.monotonic() < self._silent_until_s:
            return otherwise
        answer: Future[Result] = Future()
        threading.Thread(target=_give, args=(answer, work), name="kvserve-lookup", daemon=True).start()
        if wait([answer], self._within_s).done:
            return answer.result()
        log.warning("the store did not answer within %g s; it is not asked for as long", self._within_s)
        self._silent_until_s = time.monotonic() + self._within_s
        return otherwise

    def close(self) -> None:
        """Ask nothing any more."""
        self._silent_until_s = float("inf")


def _give(answer: Future[Result], work: Callable[[], Result]) -> None:
    try:
        answer.set_result(work())
    except Exception as error:  # noqa: BLE001  # it is raised where the answer is waited for
        answer.set_exception(error)
