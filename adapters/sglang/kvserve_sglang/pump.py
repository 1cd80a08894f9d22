"""One thread a rank that does what must not be done in SGLang's scheduler: it takes messages and polls a session."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

from kvserve_core.policy import Outcome
from kvserve_core.session import Failed, Freed, Loaded, LoadFailed
from kvserve_sglang.metrics import Exporter

BUSY_S, IDLE_S = 0.003, 0.25
"""How long to wait for a message before the session is polled again."""
Event = TypeVar("Event", bound=Freed | Failed | Outcome | Loaded | LoadFailed)
log = logging.getLogger(__name__)


class Pump:
    """Calls ``handle`` for each message and ``poll`` in between, more often while ``busy``.

    What they raise ends neither the thread nor anything else: it is logged, and ``failed`` is called.
    """

    def __init__(
        self,
        name: str,
        handle: Callable[[object], None],
        poll: Callable[[], None],
        busy: Callable[[], bool],
        failed: Callable[[], None],
    ) -> None:
        self._handle, self._poll, self._busy, self._failed = handle, poll, busy, failed
        self._inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin; messages that were put before are handled first."""
        self._thread.start()

    def put(self, message: object) -> None:
        """From any thread; never waits."""
        self._inbox.put(message)

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._step()
            except Exception:
                log.exception("a kvserve message was dropped")
                self._failed()

    def _step(self) -> None:
        try:
            message = self._inbox.get(timeout=BUSY_S if self._busy() else IDLE_S)
        except queue.Empty:
            message = None
        if message is not None:
            self._handle(message)
        self._poll()


def one_by_one(events: Iterable[Event], handle: Callable[[Event], None], exporter: Exporter) -> None:
    """Handle what a session gives once: what goes wrong with one event must not cost the others."""
    for event in events:
        try:
            handle(event)
        except Exception:
            log.exception("the event of transfer %r was dropped: %s", event.transfer_id, event)
            exporter.count("hook_failures", hook="event")
