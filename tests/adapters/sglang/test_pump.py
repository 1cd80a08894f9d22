"""The thread of a rank: order, failures, and its end."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

import pytest

from kvserve_sglang.pump import Pump

WAIT_S = 10.0


def nothing(*message: object) -> None:
    """Of a message, and of a poll."""


def pump(
    handle: Callable[[object], None] = nothing,
    poll: Callable[[], None] = nothing,
    failed: Callable[[], None] = nothing,
    busy: bool = False,
) -> Pump:
    return Pump("test-pump", handle, poll, lambda: busy, failed)


def test_messages_are_handled_in_their_order_and_by_its_thread() -> None:
    seen: queue.Queue[tuple[object, str]] = queue.Queue()
    made = pump(lambda message: seen.put((message, threading.current_thread().name)))
    made.put("before the start")
    made.start()
    for i in range(20):
        made.put(i)
    found = [seen.get(timeout=WAIT_S) for _ in range(21)]
    made.stop()
    assert found == [(message, "test-pump") for message in ("before the start", *range(20))]


def test_the_session_is_polled_without_messages_and_after_each() -> None:
    polled, order = threading.Semaphore(0), []

    def poll() -> None:
        order.append("poll")
        polled.release()

    made = pump(order.append, poll, busy=True)
    made.start()
    assert polled.acquire(timeout=WAIT_S)
    assert polled.acquire(timeout=WAIT_S)
    made.put("message")
    while "message" not in order:
        assert polled.acquire(timeout=WAIT_S)
    made.stop()
    assert "poll" in order[order.index("message") :]


def test_what_fails_costs_its_message_only(caplog: pytest.LogCaptureFixture) -> None:
    seen: queue.Queue[object] = queue.Queue()

    def handle(message: object) -> None:
        seen.put(message)
        if message == "bad":
            raise ValueError("a test's")

    polls = iter([ZeroDivisionError("a poll's")])

    def poll() -> None:
        if (error := next(polls, None)) is not None:
            raise error

    failures: list[str] = []
    made = pump(handle, poll, lambda: failures.append("one"))
    with caplog.at_level(logging.ERROR):
        made.start()
        for message in ("good", "bad", "good"):
            made.put(message)
        assert [seen.get(timeout=WAIT_S) for _ in range(3)] == ["good", "bad", "good"]
        made.stop()
    assert "a test's" in caplog.text
    assert "a poll's" in caplog.text
    assert len(failures) == 2


def test_it_ends_when_it_is_told_to() -> None:
    made = pump(busy=True)
    made.start()
    made.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "test-pump"]
