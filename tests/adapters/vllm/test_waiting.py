"""Loads that a forward pass waits for, from a peer and from a store, where their session fails or says nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvserve_core.errors import TransferCancelled
from kvserve_core.policy import Outcome
from kvserve_core.session import LoadFailed
from kvserve_core.spec import Region, whole
from kvserve_core.transport import Endpoint, Locator
from kvserve_vllm.metadata import Load, WorkerReport
from kvserve_vllm.prefix import loader
from kvserve_vllm.prefix.loader import PrefixLoader
from kvserve_vllm.prefix.meta import PrefixLoad
from kvserve_vllm.worker import loads, waiting
from kvserve_vllm.worker.loads import Loads
from vllm_blocks import DIM, HEADS, KV, caches, placed, tables

ENDPOINT = Endpoint("tcp://a:1", whole(KV))
STOP = 300
DEADLINE_S = 60.0
AT = Region(0, "k", (0, 2), tuple(range(HEADS)), 0, 16)
Kind = Callable[["Session"], tuple[Any, Any]]


class Session:
    """A consumer that loads nothing. failing: how many polls raise. hears: whether what is cancelled ends."""

    def __init__(self, failing: int = 0, hears: bool = True) -> None:
        self._failing, self._hears = failing, hears
        self.fetched: dict[str, range] = {}
        self.cancelled: list[str] = []

    def fetch(self, locator: Locator, tokens: range, deadline: float, *, name: str) -> None:
        self.fetched[name] = tokens

    def cancel(self, name: str) -> None:
        self.cancelled.append(name)

    def poll(self) -> list[LoadFailed]:
        if self._failing:
            self._failing -= 1
            raise RuntimeError("injected")
        ended = [name for name in self.cancelled if self._hears and name in self.fetched]
        return [self._failed(name, self.fetched.pop(name)) for name in ended]

    def _failed(self, name: str, tokens: range) -> LoadFailed:
        outcome = Outcome(name, "raw", 0, 0, ok=False)
        return LoadFailed(name, tokens, range(tokens.start, tokens.start), TransferCancelled("cancelled"), outcome)


def from_peer(session: Session, wait: bool = True) -> tuple[Loads, Load]:
    made = Loads(placed(caches()), DEADLINE_S)
    made.attach(session)  # type: ignore[arg-type]  # as much of a consumer as loads drive
    return made, Load("r", Locator("t", STOP, (ENDPOINT,), "raw"), 0, STOP, tables(), wait)


def from_store(session: Session, wait: bool = True) -> tuple[PrefixLoader, PrefixLoad]:
    made = PrefixLoader(placed(caches()), ENDPOINT, 0, DEADLINE_S)
    made.attach(session)  # type: ignore[arg-type]  # as above
    return made, PrefixLoad("r", 0, STOP, {0: ("first",), 1: ("second",)}, tables(), "raw", wait)


def reasons(report: WorkerReport) -> list[str]:
    return [end.reason for end in (*report.loads, *report.prefix_loaded)]


def check_failed(made: Any, report: WorkerReport, reason: str) -> None:
    """It ended, once, with nothing in place; the engine is told, and nothing is written any more."""
    assert made.active == 0
    (told,) = reasons(report)
    assert told.startswith(reason)
    assert [end.valid for end in (*report.loads, *report.prefix_loaded)] == [0]
    assert made.ended.failed == {"r"}
    assert made.ended.blocks == set(tables()[0])
    for name in ("r", "r/0", "r/1"):
        with pytest.raises(TransferCancelled):
            made.scatter(name, AT, torch.zeros(2, HEADS, 16, DIM))


@pytest.mark.parametrize("kind", [from_peer, from_store])
def test_after_an_error_of_a_poll_the_load_ends_as_failed(kind: Kind) -> None:
    session, report = Session(failing=1), WorkerReport()
    made, order = kind(session)
    with pytest.raises(RuntimeError, match="injected"):
        made.start([order], report)
    assert session.fetched == {}
    check_failed(made, report, "TransferCancelled: cancelled")


@pytest.mark.parametrize("kind", [from_peer, from_store])
def test_where_every_poll_fails_the_load_is_ended_for_the_session(kind: Kind) -> None:
    session, report = Session(failing=1000), WorkerReport()
    made, order = kind(session)
    with pytest.raises(RuntimeError, match="injected"):
        made.start([order], report)
    assert set(session.cancelled) == set(session.fetched)
    check_failed(made, report, "RuntimeError: injected")


@pytest.mark.parametrize("kind", [from_peer, from_store])
def test_a_session_that_says_nothing_after_an_error_is_not_waited_for(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "LET_GO_S", 0.02)
    report = WorkerReport()
    made, order = kind(Session(failing=1, hears=False))
    with pytest.raises(RuntimeError, match="injected"):
        made.start([order], report)
    check_failed(made, report, "RuntimeError: injected")


@pytest.mark.parametrize("wait", [True, False], ids=["sync", "async"])
@pytest.mark.parametrize("kind", [from_peer, from_store])
def test_a_fetch_that_hangs_past_its_deadline_is_ended_for_the_session(
    kind: Callable[[Session, bool], tuple[Any, Any]], wait: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a thread that reads a file of a mount that is gone: it cannot look at the clock."""
    for module in (loads, loader):
        monkeypatch.setattr(module, "LET_GO_S", 0.02 - DEADLINE_S)
    report = WorkerReport()
    made, order = kind(Session(hears=False), wait)
    made.start([order], report)
    while made.active:
        made.poll(report)
    check_failed(made, report, "TransferTimeout")
    assert made.ended.done == (set() if wait else {"r"})
