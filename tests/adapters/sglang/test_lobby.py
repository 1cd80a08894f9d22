"""Rooms where one half of a request gave up before the other came."""

from __future__ import annotations

import pytest

from kvserve_sglang import lobby
from kvserve_sglang.lobby import KEPT, KEPT_S, WAITED_S, Lobby


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(lobby, "time", made)
    return made


@pytest.fixture
def dropped() -> list[int]:
    return []


@pytest.fixture
def made(clock: Clock, dropped: list[int]) -> Lobby:
    assert clock.now
    return Lobby(dropped.append)


def test_halves_that_meet_are_left_alone(made: Lobby, dropped: list[int]) -> None:
    assert made.entered(1) == made.asked(1) == ""
    assert made.asked(2) == made.entered(2) == ""
    assert made.gave_up(1, "aborted"), "its sender hears of it"
    made.left(2, "")
    assert made.asked(2) == "", "one that was served is no failure"
    assert not dropped


def test_who_asks_after_the_sender_failed_hears_why(made: Lobby) -> None:
    made.entered(1)
    made.left(1, "aborted here")
    assert made.asked(1) == made.asked(1) == "aborted here", "every decode rank does"
    assert made.entered(1) == "", "a new request of that number is a new one"
    assert made.asked(1) == ""


def test_a_sender_that_comes_after_the_decode_side_gave_up_hears_why_once(made: Lobby, dropped: list[int]) -> None:
    made.asked(1)
    assert not made.gave_up(1, "aborted there")
    assert dropped == [1]
    assert made.entered(1) == "aborted there"
    made.left(1, "aborted there")
    assert made.entered(1) == ""


def test_an_abort_of_a_request_that_was_served_says_nothing_to_the_next_one(made: Lobby) -> None:
    made.entered(1)
    made.left(1, "")
    assert not made.gave_up(1, "the client left")
    assert made.entered(1) == ""


def test_what_is_over_is_forgotten_in_time_and_number(made: Lobby, clock: Clock) -> None:
    made.left(1, "aborted here")
    made.gave_up(2, "aborted there")
    clock.now += KEPT_S
    assert made.asked(1) == made.entered(2) == ""
    for room in range(KEPT + 1):
        made.left(room, "aborted here")
    assert (made.asked(0), made.asked(1)) == ("", "aborted here")


def test_rooms_that_nobody_enters_are_dropped_in_the_end(made: Lobby, clock: Clock, dropped: list[int]) -> None:
    made.asked(1)
    made.asked(2)
    made.entered(2)
    clock.now += WAITED_S + 1
    made.asked(3)
    assert dropped == [1]
