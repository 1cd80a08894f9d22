"""How prefill ranks find each other: once, and not again and again where the registry is silent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import requests
from fake_sessions import outcome

from kvserve_core.errors import PeerLost
from kvserve_sglang import ranks
from kvserve_sglang.messages import Message, Reported
from kvserve_sglang.ranks import Ranks

MESSAGE = Reported(1, outcome())


class Registry:
    """In place of HTTP: what it answers, and how often it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
        self.asked: list[dict[str, int]] = []
        self.answer = answer
        monkeypatch.setattr(requests, "get", self.get)

    def get(self, url: str, params: dict[str, int], timeout: float) -> Any:
        assert (url, timeout) == ("http://registry/route", ranks.TIMEOUT_S)
        self.asked.append(params)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def known(port: int) -> Any:
    return SimpleNamespace(status_code=200, json=lambda: {"rank_ip": "10.0.0.1", "rank_port": port})


@pytest.fixture
def sent() -> list[tuple[str, int, Message]]:
    return []


@pytest.fixture
def made(sent: list[tuple[str, int, Message]]) -> Ranks:
    places = {"attn_tp_rank": 0, "attn_tp_size": 2, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_dp_rank": 0}

    def send(ip: str, port: int, message: Message) -> None:
        sent.append((ip, port, message))

    manager = SimpleNamespace(**places, system_dp_size=1, system_dp_rank=0, is_mla_backend=False, send_message=send)
    return Ranks(manager, "http://registry")


def test_a_rank_is_looked_up_once(made: Ranks, sent: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry(monkeypatch, known(7))
    for _ in range(2):
        made.tell((1, 0), MESSAGE)
    assert sent == [("10.0.0.1", 7, MESSAGE)] * 2
    assert registry.asked == [{"prefill_dp_rank": 0, "prefill_cp_rank": 0, "target_tp_rank": 1, "target_pp_rank": 0}]


def test_a_registry_that_is_silent_is_not_asked_for_every_request(
    made: Ranks, sent: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry(monkeypatch, requests.Timeout("a test's"))
    for _ in range(3):
        with pytest.raises(PeerLost, match="does not answer"):
            made.tell((1, 0), MESSAGE)
    assert len(registry.asked) == 1
    monkeypatch.setattr(made, "_silent_until_s", 0.0)
    registry.answer = known(7)
    made.tell((1, 0), MESSAGE)
    assert len(sent) == 1


def test_a_rank_that_the_registry_does_not_know_is_asked_for_again(
    made: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry(monkeypatch, SimpleNamespace(status_code=404, text="not yet"))
    for _ in range(2):
        with pytest.raises(PeerLost, match="not yet"):
            made.tell((1, 0), MESSAGE)
    assert len(registry.asked) == 2


def test_who_decides_who_is_told_and_who_reports(made: Ranks) -> None:
    assert made.first
    assert made.others == [(1, 0)]
    assert made.reporting(1) == made.reporting(4) == 2
    made._manager.is_mla_backend = True
    assert (made.reporting(1), made.reporting(4)) == (1, 2)
