"""Loads of a rank without an engine: how they end, and that no peer takes the turn of the others."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import pytest

from kvserve_core.policy import Outcome
from kvserve_core.session import Loaded
from kvserve_core.spec import whole
from kvserve_core.transport import Endpoint, Locator
from kvserve_vllm.metadata import Load, WorkerReport
from kvserve_vllm.worker import loads as module
from kvserve_vllm.worker.loads import MAX_FROM_ONE, Loads
from vllm_blocks import KV, caches, placed, tables


class Session:
    """A consumer that keeps what it is asked to fetch, and ends it when told."""

    def __init__(self) -> None:
        self.fetched: list[str] = []
        self.cancelled: list[str] = []
        self._events: list[Loaded] = []

    def fetch(self, locator: Locator, tokens: range, deadline: float, *, name: str) -> None:
        self.fetched.append(name)

    def cancel(self, name: str) -> None:
        self.cancelled.append(name)

    def end(self, name: str) -> None:
        self._events.append(Loaded(name, range(40), Outcome(name, "raw", 1, 1)))

    def poll(self) -> list[Loaded]:
        events, self._events = self._events, []
        return events


@pytest.fixture
def session() -> Session:
    return Session()


@pytest.fixture
def loads(session: Session) -> Loads:
    made, attached = Loads(placed(caches()), 60.0), session
    made.attach(attached)  # type: ignore[arg-type]  # as much of a consumer as loads drive
    return made


def order(name: str, host: str = "a", wait: bool = False) -> Load:
    locator = Locator(name, 40, (Endpoint(f"tcp://{host}:1", whole(KV)),), "raw")
    return Load(name, locator, 0, 40, tables(), wait)


def orders(names: Iterable[Any], host: str = "a") -> list[Load]:
    return [order(f"{host}{name}", host) for name in names]


def test_a_host_that_is_silent_leaves_room_for_the_others(loads: Loads, session: Session) -> None:
    report = WorkerReport()
    loads.start(orders(range(50)), report)
    assert session.fetched == [f"a{i}" for i in range(MAX_FROM_ONE)]
    loads.start(orders(range(2), "b"), report)
    assert session.fetched[MAX_FROM_ONE:] == ["b0", "b1"]
    assert loads.active == 52


def test_the_next_one_has_its_turn_when_one_ends(loads: Loads, session: Session) -> None:
    report = WorkerReport()
    loads.start(orders(range(MAX_FROM_ONE + 2)), report)
    session.end("a3")
    loads.poll(report)
    assert session.fetched[-1] == f"a{MAX_FROM_ONE}"
    assert [end.req_id for end in report.loads] == ["a3"]
    for name in session.fetched[:]:
        session.end(name)
    loads.poll(report)
    session.end(session.fetched[-1])
    loads.poll(report)
    assert loads.active == 0
    assert len(report.loads) == MAX_FROM_ONE + 2


def test_a_load_that_is_given_up_before_its_turn_ends_with_one_report(loads: Loads, session: Session) -> None:
    report = WorkerReport()
    loads.start(orders(range(MAX_FROM_ONE + 2)), report)
    last = f"a{MAX_FROM_ONE + 1}"
    loads.cancel(["a0", last, "stranger"])
    assert session.cancelled == ["a0"]
    loads.poll(report)
    assert [end.req_id for end in report.loads] == [last]
    assert last not in session.fetched


def test_a_load_whose_turn_does_not_come_in_time_is_computed(
    loads: Loads, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = WorkerReport()
    loads.start(orders(range(MAX_FROM_ONE + 1)), report)
    later = time.monotonic() + 60.5  # those that were begun may still say how they ended
    monkeypatch.setattr(module.time, "monotonic", lambda: later)
    loads.poll(report)
    (end,) = report.loads
    assert (end.req_id, end.valid) == (f"a{MAX_FROM_ONE}", 0)
    assert end.reason.startswith("TransferTimeout")
    assert len(session.fetched) == MAX_FROM_ONE


def test_who_computes_on_a_load_waits_through_its_turn(session: Session) -> None:
    class Prompt(Session):
        def fetch(self, locator: Locator, tokens: range, deadline: float, *, name: str) -> None:
            super().fetch(locator, tokens, deadline, name=name)
            self.end(name)

    made, report = Loads(placed(caches()), 60.0), WorkerReport()
    made.attach(Prompt())  # type: ignore[arg-type]  # as above
    made.start([order(f"r{i}", wait=True) for i in range(3 * MAX_FROM_ONE)], report)
    assert made.active == 0
    assert len(report.loads) == 3 * MAX_FROM_ONE
    assert made.ended.done == set()


def test_a_load_that_cannot_start_ends_with_one_report() -> None:
    loads, report = Loads(placed(caches()), 1.0), WorkerReport()
    loads.start([Load("r", Locator("t", 40, (), "raw"), 16, 40, tables(), False)], report)  # no session is attached
    assert (loads.ended.done, loads.ended.failed) == ({"r"}, {"r"})
    assert loads.ended.blocks == {2, 3}  # tokens 16 to 40 of blocks of 16
    assert report.loads[0].reason.startswith("TransferCancelled")
    assert loads.active == 0


def test_the_null_block_is_nobodys_and_never_named_invalid() -> None:
    loads, report = Loads(placed(caches()), 1.0), WorkerReport()
    blocks = ([0, 0, 5], [0, 0, 6])
    loads.start([Load("r", Locator("t", 40, (), "raw"), 0, 40, blocks, False)], report)  # no session is attached
    assert loads.ended.blocks == {5}
