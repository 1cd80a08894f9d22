"""What a prefill side does with its session's events, which come once: one that goes wrong costs itself alone."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import zmq
from fake_sessions import Stand, outcome

from kvserve_core.errors import PeerLost
from kvserve_core.session import Failed


class Unreachable:
    """In place of the other ranks: every word to them fails. counts: what was counted."""

    def __init__(self, error: Exception) -> None:
        self.error, self.counts = error, list[tuple[str, dict[str, str]]]()

    def tell(self, rank: tuple[int, int], message: Any) -> None:
        raise self.error

    def count(self, name: str, value: float = 1, **labels: str) -> None:
        self.counts.append((name, labels))

    def failures(self, hook: str) -> int:
        return self.counts.count(("hook_failures", {"hook": hook}))


@pytest.mark.parametrize(("error", "hook"), [(PeerLost("silent"), "report"), (zmq.ZMQError(), "event")])
def test_reports_that_are_lost_do_not_keep_the_events_after_them(
    error: Exception, hook: str, caplog: pytest.LogCaptureFixture
) -> None:
    others = Unreachable(error)
    stand = Stand(tell=others.tell, count=others.count)
    for room in (1, 2, 3):
        stand.begin(room, f"t{room}")
    with caplog.at_level(logging.WARNING):
        stand.poll(outcome(transfer_id="t1"), outcome(transfer_id="t2"), Failed("t3", "a test's"))
    assert stand.rooms.told == [("Success", 1), ("Success", 2), ("Failed", 3, "a test's")]
    assert others.failures(hook) == 2
    assert "t1" in caplog.text
    assert "t2" in caplog.text


def test_a_room_that_cannot_be_ended_does_not_keep_the_next_ones() -> None:
    others = Unreachable(PeerLost("silent"))
    stand = Stand(count=others.count)
    for room in (1, 2):
        stand.begin(room, f"t{room}")
    stand.rooms.broken = 1
    stand.poll(outcome(transfer_id="t1"), outcome(transfer_id="t2"))
    assert stand.rooms.told == [("Success", 2)]
    assert others.failures("event") == 1
