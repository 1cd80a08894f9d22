"""How the I/O thread of ``tcp`` waits: to the microsecond, as a piece of a fast link is due then."""

from __future__ import annotations

import pytest

from kvserve_plugins.transports import _tcp_server


class Polls:
    """Stands in for a poller; says what it was asked, and has events from poll ``after`` on."""

    def __init__(self, after: int) -> None:
        self.asked: list[int] = []
        self._after = after

    def poll(self, timeout: int) -> list[tuple[str, int]]:
        self.asked.append(timeout)
        return [("socket", 1)] if len(self.asked) >= self._after else []


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(_tcp_server.time, "sleep", found.append)
    return found


@pytest.mark.parametrize(
    ("wait_s", "asked", "rest"),
    [(0.0, [0], []), (0.0004, [0, 0], [0.0004]), (0.0047, [4, 0], [0.0007]), (5.0, [5000], [])],
)
def test_whole_milliseconds_are_polled_and_the_rest_is_slept(
    slept: list[float], wait_s: float, asked: list[int], rest: list[float]
) -> None:
    polls = Polls(after=9)
    assert _tcp_server._polled(polls, wait_s) == {}  # type: ignore[arg-type]  # it has the one method that is used
    assert (polls.asked, slept) == (asked, pytest.approx(rest))


def test_what_happens_meanwhile_is_told_at_once_or_after_the_rest(slept: list[float]) -> None:
    assert _tcp_server._polled(Polls(after=1), 0.0047) == {"socket": 1}  # type: ignore[arg-type]  # as above
    assert slept == []
    assert _tcp_server._polled(Polls(after=2), 0.0047) == {"socket": 1}  # type: ignore[arg-type]  # as above
    assert len(slept) == 1
