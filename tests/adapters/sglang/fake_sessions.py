"""Stand-ins for the sessions and SGLang's status table, to play out orders of events that real ones give by chance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kvserve_core.errors import StoreFull
from kvserve_core.policy import Outcome
from kvserve_core.session import Failed, Freed
from kvserve_core.spec import Shard
from kvserve_core.transport import Endpoint
from kvserve_sglang.messages import Decided, Wanted
from kvserve_sglang.prefill import PrefillSide
from kvserve_sglang.prefill_rank import Rank
from kvserve_sglang.sending import Chunk, Sending, Target
from kvserve_sglang.slots import Slots

TOTAL = 10


def outcome(ok: bool = True, reason: str = "", transfer_id: str = "t") -> Outcome:
    return Outcome(transfer_id, "raw", 1, 1, ok=ok, reason=reason)


def nothing() -> None:
    """What happens while a transfer is opened, by default."""


def ignore(*args: Any, **labels: Any) -> None:
    """Of metrics and messages to other ranks."""


@dataclass
class Rooms:
    """Keeps what SGLang would be told. broken: a room that cannot succeed."""

    told: list[tuple[Any, ...]] = field(default_factory=list)
    located: list[str] = field(default_factory=list)
    broken: int | None = None

    def succeed(self, room: int) -> None:
        if room == self.broken:
            raise KeyError(room)
        self.told.append(("Success", room))

    def fail(self, room: int, reason: str) -> None:
        self.told.append(("Failed", room, reason))

    def tell(self, to: Wanted, message: Any) -> None:
        del to
        self.located.append(message.transfer_id)


class Producer:
    """Gives the events that a test puts in; an abort gives what the real one gives."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.during_open: Callable[[], None] = nothing
        self.aborted: list[str] = []
        self.opened: list[str] = []
        self.budget, self.counters = SimpleNamespace(held_bytes=0), SimpleNamespace(snapshot=dict)

    def poll(self) -> list[Any]:
        events, self.events = self.events, []
        return events

    def open(self, transfer_id: str, *args: Any, **kwargs: Any) -> Endpoint:
        del args, kwargs
        self.during_open()
        self.opened.append(transfer_id)
        return Endpoint("nowhere", Shard((0,)))

    def ready(self, *args: Any) -> None:
        """Nothing is encoded."""

    def abort(self, transfer_id: str, reason: str) -> None:
        self.aborted.append(transfer_id)
        if transfer_id in self.opened:
            self.opened.remove(transfer_id)
            self.events += [Failed(transfer_id, reason), Freed(transfer_id)]


def full() -> None:
    """A store without room."""
    raise StoreFull("the budget is spent")


@dataclass
class Stand:
    """The real prefill side of a rank that waits for the first rank's decision, between a fake session and rooms."""

    rooms: Rooms = field(default_factory=Rooms)
    producer: Producer = field(default_factory=Producer)
    layout: Any = None
    tell: Callable[..., None] = ignore
    count: Callable[..., None] = ignore

    def __post_init__(self) -> None:
        deployment: Any = SimpleNamespace(producer=lambda *args: self.producer)
        exporter: Any = SimpleNamespace(count=self.count, set=ignore, transfer=ignore, settled=ignore)
        ranks: Any = SimpleNamespace(first=False, others=[], tell=self.tell)
        rank = Rank(self.rooms, ranks, deployment, {}, self.layout, exporter, 1, None)
        self.side = PrefillSide(rank)

    def begin(self, room: int, transfer_id: str = "t") -> Sending:
        """A request whose first chunk came and whose decision is there."""
        sending = self.waiting(room)
        self.side._handle(Decided(room, transfer_id, "raw", "why", "link"))
        return sending

    def waiting(self, room: int) -> Sending:
        """A request that waits for its decision."""
        wanted = Wanted(room, "127.0.0.1", 1, "session", 1, 0, False)
        sending = Sending(room, Slots(16), (Target(wanted, SimpleNamespace()),), total=TOTAL)
        self.side.begin(sending)
        self.side._handle(chunk(sending, 5))
        return sending

    def poll(self, *events: Any) -> None:
        """Let the side see events."""
        self.producer.events += events
        self.side._poll()


def chunk(sending: Sending, tokens: int, last: bool = False) -> Chunk:
    return Chunk(sending, np.array([1]), tokens, last)


class Events:
    """In place of ``torch.cuda``: what is recorded and waited for."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.stream = 1

    def current_stream(self, device: torch.device) -> Any:
        assert device.type == "cuda"
        return SimpleNamespace(cuda_stream=self.stream)

    def event(self) -> Any:
        name = f"event {self.stream}"
        return SimpleNamespace(
            record=lambda stream: self.log.append(f"{name} on {stream.cuda_stream}"),
            synchronize=lambda: self.log.append(f"wait for {name}"),
        )
