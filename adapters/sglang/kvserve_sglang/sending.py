"""One request on a prefill rank, from its first chunk to the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvserve_core.errors import KVServeError
from kvserve_core.peer import PeerInfo
from kvserve_core.requests import RequestOptions
from kvserve_core.session import Event
from kvserve_core.spec import SEGMENT_TOKENS
from kvserve_sglang.fence import Fence
from kvserve_sglang.messages import Register, Wanted
from kvserve_sglang.slots import Pages, Slots


@dataclass(frozen=True)
class Target:
    """A decode rank that asked: where its control socket is, and what it can read."""

    wanted: Wanted
    register: Register

    @property
    def peer(self) -> PeerInfo:
        """What it can read."""
        return self.register.peer


@dataclass
class Sending:
    """State of a request; the pump's, but for ``ended``: why the engine ended it. failed: both engines were told so.

    targets: the decode ranks that will fetch; none on a dummy rank. total: prompt tokens, None until the last chunk
    where SGLang did not say earlier. text: gives the prompt's. born: when it arrived
    (``time.monotonic()``). grid: tokens of a cell.
    """

    room: int
    slots: Slots
    targets: tuple[Target, ...]
    options: RequestOptions = field(default_factory=RequestOptions)
    total: int | None = None
    text: Callable[[], str] = str
    born: float = field(default_factory=time.monotonic)
    tokens: int = 0
    ready: int = -1
    last: bool = False
    event: Event | None = None
    transfer_id: str = ""
    grid: int = SEGMENT_TOKENS
    ended: str = ""
    freed: bool = False
    failed: bool = False
    waiting_since: float | None = None
    reading: threading.Lock = field(default_factory=threading.Lock)
    fence: Fence = field(default_factory=Fence)

    @property
    def alive(self) -> bool:
        """Whether the engine still wants it."""
        return not self.ended

    @property
    def over(self) -> bool:
        """Whether there is nothing left to do for it."""
        return self.failed or not self.alive

    def end(self, reason: str) -> None:
        """The engine gives its pages away next: once this returns, no read of them is under way or will begin."""
        with self.reading:
            self.ended = self.ended or reason
        self.fence.wait()

    def opened(self, transfer_id: str) -> bool:
        """Its transfer is on offer; False where the engine ended the request meanwhile and could not know of it."""
        with self.reading:
            self.transfer_id = transfer_id
            return self.alive

    @property
    def prefix(self) -> int:
        """Tokens that the decode side holds already."""
        return self.slots.prefix

    @property
    def sent(self) -> int:
        """Tokens whose pages are known, counted from the start of the prompt."""
        return self.prefix + self.tokens

    @property
    def first(self) -> int:
        """The first token of the first cell of which the decode side lacks something."""
        return min(self.prefix, (self.total or 1) - 1) // self.grid * self.grid

    def add(self, chunk: Chunk) -> None:
        """Take in a chunk.

        Raises:
            KVServeError: it ends the request at another length than was announced.
        """
        self.slots.add(chunk.pages)
        self.tokens += chunk.tokens
        self.event = chunk.event or self.event
        if not chunk.last:
            return
        self.last = True
        self.slots.cells.update(chunk.cells)
        self.slots.windows = chunk.windows
        self.total = self.sent if self.total is None else self.total
        if self.total != self.sent:
            raise KVServeError(f"SGLang announced {self.total} prompt tokens and sent {self.sent}")

    def newly_ready(self, window: int | None) -> range:
        """Tokens that became final since the last call, once the request's length is known.

        The last token waits for the last chunk, as state and auxiliary row go with its cell; so do cells that hold a
        part of a sliding window, whose pages SGLang names with the last chunk only. Tokens before the prefix that
        share its cell count as final.
        """
        total = self.total or 0
        stop = self.sent
        if not self.last:
            stop = min(stop, total - 1)
            if window is not None:
                stop = min(stop, max(0, total - window) // self.grid * self.grid)
        start = self.first if self.ready < 0 else self.ready
        self.ready = max(start, stop)
        return range(start, self.ready)


@dataclass(frozen=True)
class Chunk:
    """What one ``send`` of SGLang's adds. With the last one only: cells, windows: see :class:`Slots`; prefilled: the
    tokens that the engine computed, and in how many seconds, where it says so.
    """

    to: Sending
    pages: Pages
    tokens: int
    last: bool
    event: Event | None = None
    cells: dict[int, int] = field(default_factory=dict)
    windows: Pages | None = None
    prefilled: tuple[int, float] | None = None
