"""Orders of events at the two sides of a rank that no real pair gives on demand."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import fake_sessions
import msgspec
import pytest
import torch
from fake_sessions import TOTAL, Events, Stand, chunk, full, outcome

from kvserve_core.errors import TransferCancelled, UnsupportedSpecError
from kvserve_core.session import Failed, Freed, Loaded
from kvserve_core.spec import Region
from kvserve_core.transport import Endpoint, Locator
from kvserve_sglang.checks import check_metadata
from kvserve_sglang.deciding import Judge
from kvserve_sglang.decode import DecodeSide
from kvserve_sglang.fence import Fence
from kvserve_sglang.messages import Decided, Located
from kvserve_sglang.slots import Slots

CUDA = torch.device("cuda")


@pytest.mark.parametrize("freed_first", [True, False])
@pytest.mark.parametrize("ok", [True, False])
def test_a_room_ends_whichever_of_freed_and_outcome_comes_first(freed_first: bool, ok: bool) -> None:
    stand = Stand()
    stand.begin(1)
    events = [Freed("t"), outcome(ok, "" if ok else "no room")]
    stand.poll(*(events if freed_first else events[::-1]))
    good = ok or freed_first  # pages that are free are SGLang's success; the decode side reports its own end
    assert stand.rooms.told == ([("Success", 1)] if good else [("Failed", 1, "no room")])
    stand.side.forget(1)
    assert stand.side.active == 0


def test_a_transfer_that_cannot_be_opened_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand()
    stand.producer.during_open = full
    judge = Judge(SimpleNamespace(), {})
    judge._open["t"] = (SimpleNamespace(), 1, {})
    opening = stand.side._opening
    monkeypatch.setattr(opening, "judge", judge)
    monkeypatch.setattr(opening, "_ask", lambda *asked: Decided(1, "t", "raw", "why", "link"))
    stand.waiting(1)
    assert stand.rooms.told == [("Failed", 1, "StoreFull: the budget is spent")]
    stand.side.forget(1)
    assert stand.side.active == 0
    assert not judge._open


def test_a_request_that_ends_while_its_transfer_is_opened_is_withdrawn() -> None:
    stand = Stand()
    stand.producer.during_open = lambda: stand.side.forget(1)
    stand.begin(1)
    assert stand.producer.aborted == ["t"]
    assert not stand.rooms.located
    stand.poll()
    assert stand.side.active == 0
    assert not stand.rooms.told


def test_a_room_that_failed_is_not_decided_again() -> None:
    stand = Stand()
    sending = stand.begin(1)
    stand.poll(Failed("t", "lease ran out"), Freed("t"))
    stand.side._handle(chunk(sending, TOTAL - 5, last=True))
    stand.side._handle(Decided(1, "again", "raw", "why", "link"))
    assert stand.producer.opened == ["t"]
    assert stand.rooms.told == [("Failed", 1, "lease ran out")]


def test_a_room_that_failed_while_it_waited_ignores_the_decision() -> None:
    stand = Stand()
    sending = stand.waiting(1)
    stand.side._handle(chunk(sending, TOTAL, last=True))  # more than was announced
    stand.side._handle(Decided(1, "t", "raw", "why", "link"))
    assert not stand.producer.opened
    assert [told[:2] for told in stand.rooms.told] == [("Failed", 1)]


def test_a_decision_that_came_early_goes_with_its_room() -> None:
    stand = Stand()
    for room in (1, 2):
        stand.side._handle(Decided(room, f"t{room}", "raw", "why", "link"))
    stand.side.forget(1)
    assert list(stand.side._opening._early) == [2]


def test_whoever_forgets_a_room_waits_for_its_reads() -> None:
    stand = Stand()
    sending = stand.begin(1)
    forgetting = [threading.Thread(target=stand.side.forget, args=(1,)) for _ in range(2)]
    with sending.reading:
        for thread in forgetting:
            thread.start()
        for thread in forgetting:
            thread.join(0.05)
        assert all(thread.is_alive() for thread in forgetting)
    for thread in forgetting:
        thread.join()
    assert stand.side.active == 1  # the transfer, until its end was polled


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    made = Events()
    monkeypatch.setattr(torch.cuda, "current_stream", made.current_stream)
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return made


def test_a_fence_waits_for_the_last_work_of_every_stream(events: Events) -> None:
    fence = Fence()
    fence.mark(CUDA)
    fence.mark(CUDA)
    events.stream = 2
    fence.mark(CUDA)
    fence.wait()
    assert events.log == ["event 1 on 1"] * 2 + ["event 2 on 2", "wait for event 1", "wait for event 2"]


def test_a_fence_of_cpu_work_does_nothing(events: Events) -> None:
    fence = Fence()
    fence.mark(torch.device("cpu"))
    fence.wait()
    assert not events.log


class Layout:
    """A pool on a GPU, of which a test sees the order of calls."""

    device = CUDA

    def __init__(self, log: list[str]) -> None:
        self._log = log
        self.kv: Any = SimpleNamespace(group=lambda i: SimpleNamespace(unit="token", window=None))

    def gather(self, at: Region, slots: torch.Tensor) -> torch.Tensor:
        self._log.append("gather")
        return torch.zeros(1, 1, len(slots), 4)

    def scatter(self, at: Region, slots: torch.Tensor, x: torch.Tensor) -> None:
        self._log.append("scatter")


AT = Region(0, "k", (0,), (0,), 0, 5)


def test_forgetting_waits_for_reads_that_a_gpu_has_yet_to_do(events: Events) -> None:
    stand = Stand(layout=Layout(events.log))
    stand.begin(1)
    stand.side.gather("t", AT)
    stand.side.forget(1)
    assert events.log == ["gather", "event 1 on 1", "wait for event 1"]
    with pytest.raises(TransferCancelled):
        stand.side.gather("t", AT)


class Consumer:
    """Fetches nothing."""

    def __init__(self) -> None:
        self.during_fetch = fake_sessions.nothing
        self.cancelled: list[str] = []
        self.events: list[Loaded] = []

    def poll(self) -> list[Loaded]:
        return self.events

    def fetch(self, locator: Locator, *args: Any) -> None:
        self.during_fetch()

    def cancel(self, transfer_id: str) -> None:
        self.cancelled.append(transfer_id)


def decoding(events: Events, consumer: Consumer) -> DecodeSide:
    ignore = fake_sessions.ignore
    exporter: Any = SimpleNamespace(count=ignore, set=ignore, transfer=ignore)
    side = DecodeSide(fake_sessions.Rooms(), Layout(events.log), lambda size: consumer, exporter, 30.0)
    slots = Slots(16)
    slots.add([1])
    side.begin(1, slots, 1, 1)
    return side


LOCATED = Located(1, 0, "t", TOTAL, Endpoint("nowhere", SimpleNamespace()), "raw")


def test_forgetting_waits_for_writes_that_a_gpu_has_yet_to_do(events: Events) -> None:
    consumer = Consumer()
    side = decoding(events, consumer)
    side._handle(LOCATED)
    side.scatter("t", AT, torch.zeros(1, 1, 5, 4))
    side.forget(1)
    assert events.log == ["scatter", "event 1 on 1", "wait for event 1"]
    assert consumer.cancelled == ["t"]
    with pytest.raises(TransferCancelled):
        side.scatter("t", AT, torch.zeros(1, 1, 5, 4))


def test_two_rooms_with_one_transfer_do_not_harm_each_other(events: Events) -> None:
    side = decoding(events, Consumer())
    side._handle(LOCATED)
    slots = Slots(16)
    slots.add([2])
    side.begin(2, slots, 1, 1)
    side._handle(msgspec.structs.replace(LOCATED, room=2))
    (told,) = side._rooms.told
    assert told[:2] == ("Failed", 2)
    assert "another room's" in told[2]
    side.scatter("t", AT, torch.zeros(1, 1, 5, 4))
    side._ended(Loaded("t", range(TOTAL), outcome()))
    assert side._rooms.told[1:] == [("Success", 1)]


def test_a_room_that_cannot_be_ended_does_not_keep_the_next_ones(
    events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer, counts = Consumer(), list[dict[str, str]]()
    side = decoding(events, consumer)
    slots = Slots(16)
    slots.add([2])
    side.begin(2, slots, 1, 1)
    side._handle(LOCATED)
    side._handle(msgspec.structs.replace(LOCATED, room=2, transfer_id="u"))
    side._rooms.broken = 1
    monkeypatch.setattr(side.exporter, "count", lambda name, value=1, **labels: counts.append({"name": name} | labels))
    consumer.events = [Loaded(key, range(TOTAL), outcome(transfer_id=key)) for key in ("t", "u")]
    side._poll()
    assert side._rooms.told == [("Success", 2)]
    assert {"name": "hook_failures", "hook": "event"} in counts


def test_a_request_that_ends_while_its_fetch_begins_is_cancelled(events: Events) -> None:
    consumer = Consumer()
    side = decoding(events, consumer)
    consumer.during_fetch = lambda: side._open[1].end()
    side._handle(LOCATED)
    assert consumer.cancelled == ["t"]


def test_metadata_buffers_on_a_device_are_refused_by_name() -> None:
    check_metadata(SimpleNamespace(size=3, output_ids=torch.zeros(1)))
    with pytest.raises(UnsupportedSpecError, match=r"'output_ids' on device 'meta'"):
        check_metadata(SimpleNamespace(output_ids=torch.zeros(1, device="meta")))
