"""Host bytes that a producer may hold for its consumers."""

from __future__ import annotations

import threading

from kvserve_core.errors import StoreFull


class Budget:
    """Reservations by transfer: its original bytes while it is encoded, its wire bytes afterwards. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._held: dict[str, int] = {}

    @property
    def held_bytes(self) -> int:
        """Reserved now."""
        with self._lock:
            return sum(self._held.values())

    def take(self, transfer_id: str, nbytes: int) -> None:
        """Reserve.

        Raises:
            StoreFull: there is no room now.
        """
        with self._lock:
            held = sum(self._held.values())
            if held + nbytes > self.limit_bytes:
                raise StoreFull(
                    f"transfer {transfer_id!r} may need {nbytes} bytes, {held} of 'published_bytes_max'"
                    f" {self.limit_bytes} wait for consumers; serve it another way, or raise the limit"
                )
            self._held[transfer_id] = nbytes

    def settle(self, transfer_id: str, nbytes: int) -> None:
        """The final size is known."""
        with self._lock:
            if transfer_id in self._held:
                self._held[transfer_id] = nbytes

    def free(self, transfer_id: str) -> None:
        """Give it back."""
        with self._lock:
            self._held.pop(transfer_id, None)
