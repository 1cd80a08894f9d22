"""One request in flight on the consuming side: its legs, its end, and what it cost."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvserve_core.errors import IntegrityError, TransferCancelled, TransferTimeout
from kvserve_core.policy import Outcome
from kvserve_core.session.coverage import Coverage
from kvserve_core.session.events import Event
from kvserve_core.spec import Region
from kvserve_core.transport import Delivery, Locator
from kvserve_core.wire import FrameHeader


@dataclass
class Leg:
    """What one endpoint delivers."""

    regions: tuple[Region, ...]
    delivery: Delivery | None = None
    wire_bytes: int = 0
    raw_bytes: int = 0
    transfer_s: float = 0.0
    decode_s: float = 0.0


@dataclass
class Fetch:
    """One request in flight; legs by endpoint index. name: what the engine calls it. mark: the engine's work so far."""

    name: str
    loc: Locator
    tokens: range
    deadline: float
    coverage: Coverage
    mark: Event | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)
    legs: dict[int, Leg] = field(default_factory=dict)
    _owner: threading.Lock = field(default_factory=threading.Lock)

    def claim(self) -> bool:
        """True for the one that ends this request: its thread, or ``poll`` when its deadline came first."""
        return self._owner.acquire(blocking=False)

    def cancel(self) -> None:
        """Give up; a leg that waits for bytes ends at once."""
        self.cancelled.set()
        for leg in list(self.legs.values()):
            if leg.delivery is not None:
                leg.delivery.close()

    def check_header(self, header: FrameHeader) -> None:
        """The frame is the one that the locator names; IntegrityError otherwise: a store holds what is wrong."""
        loc = self.loc
        if (header.transfer_id, header.num_tokens) != (loc.transfer_id, loc.num_tokens):
            raise IntegrityError(
                f"the frame is of transfer {header.transfer_id!r} with {header.num_tokens} tokens,"
                f" expected {loc.transfer_id!r} with {loc.num_tokens}",
                "header",
            )
        if loc.profile and header.profile != loc.profile:  # who fetches relies on what the name says, loss above all
            raise IntegrityError(f"the frame is of {header.profile!r}, the locator says {loc.profile!r}", "header")

    def check(self) -> None:
        """It may go on: raises TransferCancelled or TransferTimeout otherwise."""
        if self.cancelled.is_set():
            raise TransferCancelled(f"the fetch of {self.loc.transfer_id!r} was cancelled here")
        if time.monotonic() > self.deadline:
            raise self.late()

    def late(self) -> TransferTimeout:
        """What a passed deadline raises."""
        return TransferTimeout(
            f"the fetch of {self.loc.transfer_id!r} did not end by its deadline; recompute, or allow more"
        )

    def outcome(self, legs: Sequence[Leg], total_s: float, error: Exception | None) -> Outcome:
        """What ``legs`` of it cost, and whether it came through."""
        return Outcome(
            transfer_id=self.loc.transfer_id,
            profile=self.loc.profile,
            raw_bytes=sum(leg.raw_bytes for leg in legs),
            wire_bytes=sum(leg.wire_bytes for leg in legs),
            transfer_s=sum(leg.transfer_s for leg in legs),
            decode_s=sum(leg.decode_s for leg in legs),
            total_s=total_s,
            ok=error is None,
            reason="" if error is None else f"{type(error).__name__}: {error}",
        )
