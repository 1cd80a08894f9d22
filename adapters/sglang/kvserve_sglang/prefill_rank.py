"""What the prefill side of one rank is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvserve_core.deployment import Deployment
from kvserve_core.pipeline import Pipeline
from kvserve_sglang.layout import Layout
from kvserve_sglang.messages import Located, Wanted
from kvserve_sglang.metrics import Exporter
from kvserve_sglang.ranks import Ranks


class Rooms(Protocol):
    """What of SGLang's manager this side needs."""

    def succeed(self, room: int) -> None:
        """The pages may be overwritten."""

    def fail(self, room: int, reason: str) -> None:
        """Tell both engines."""

    def tell(self, to: Wanted, message: Located) -> None:
        """Send to a decode rank."""


@dataclass(frozen=True)
class Rank:
    """Handed to a ``PrefillSide``. number: as SGLang counts senders; window: see transfer_spec."""

    rooms: Rooms
    ranks: Ranks
    deployment: Deployment
    pipelines: dict[str, Pipeline]
    layout: Layout
    exporter: Exporter
    number: int
    window: int | None
