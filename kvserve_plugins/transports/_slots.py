"""Places in one piece of memory: first fit, neighbours joined when they are given back."""

from __future__ import annotations

ALIGN = 256


class Slots:
    """Of ``nbytes`` bytes, less what is beyond the last multiple of ``ALIGN``. Not thread-safe."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes // ALIGN * ALIGN
        self._free = {0: self.nbytes}
        self._taken: dict[int, int] = {}

    @property
    def taken_bytes(self) -> int:
        """What is in use, alignment included."""
        return sum(self._taken.values())

    def take(self, nbytes: int) -> int | None:
        """A place for so many bytes, None when there is none now."""
        size = max(-(-nbytes // ALIGN) * ALIGN, ALIGN)
        for at in sorted(self._free):
            room = self._free[at]
            if room >= size:
                del self._free[at]
                if room > size:
                    self._free[at + size] = room - size
                self._taken[at] = size
                return at
        return None

    def give(self, at: int) -> None:
        """Take a place back; one that is free already changes nothing."""
        size = self._taken.pop(at, 0)
        if not size:
            return
        if following := self._free.pop(at + size, 0):
            size += following
        before = next((a for a, n in self._free.items() if a + n == at), None)
        if before is None:
            self._free[at] = size
        else:
            self._free[before] += size
