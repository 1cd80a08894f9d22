"""What the offering half waits for, learns and refuses, without an engine."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from kvserve_core.deployment import Deployment
from kvserve_core.errors import ConfigError
from kvserve_core.policy import Outcome
from kvserve_core.settings import Settings
from kvserve_vllm.arrival import MAX_FRONT_S, Arrival
from kvserve_vllm.metadata import WorkerReport
from kvserve_vllm.scheduler.side import SchedulerSide
from kvserve_vllm.spec import ServedModel
from vllm_steps import (
    BOTH,
    KV,
    PEER,
    both_halves,
    offered,
    request,
    with_lossless,
)


@pytest.fixture
def side() -> SchedulerSide:
    return both_halves()


def test_a_wait_is_told_by_a_clock_that_does_not_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Arrival.of(request(arrived=0.0)).waited_s() < MAX_FRONT_S + 1
    assert Arrival.of(request(arrived=time.time() + 1e9)).waited_s() < 1.0
    taken = Arrival.of(request())
    set_ahead = time.time() + 3600
    monkeypatch.setattr(time, "time", lambda: set_ahead)
    assert taken.waited_s() < 60.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"policy": "greedy"},
        {"policy": {"name": "bandit", "configuration": {"x": 1}}},
        {"classifier": "nonesuch"},
        {"allow_unprofiled": "nonesuch"},
    ],
)
def test_what_decides_is_made_at_start_up(wrong: dict[str, Any]) -> None:
    deployment = Deployment(Settings.model_validate(wrong), KV)
    with pytest.raises(ConfigError):
        SchedulerSide(BOTH, [64], ServedModel(KV, (), 1, 1, 1), deployment, True)


REFUSED = "Unacceptable: the consumer cannot read 'artefact:0123456789abcdef': the loaded library does not hold it"
OTHER_MODEL = "Unacceptable: the consumer cannot read 'model:0123456789abcdef': the two sides serve different models"


@pytest.mark.parametrize("late", [False, True], ids=["while it is encoded", "when it is complete"])
@pytest.mark.parametrize(
    ("accept", "reason", "named", "again"),
    [
        ("portable", REFUSED, False, "raw"),
        ("portable", REFUSED, True, "lossless"),  # of a peer that is named it is known what it reads
        ("portable", OTHER_MODEL, False, "lossless"),
        ("portable", "PeerLost: gone", False, "lossless"),
        ("any", REFUSED, False, "lossless"),
    ],
)
def test_what_an_unknown_consumer_cannot_decode_is_not_sent_to_unknown_ones_again(
    late: bool, accept: str, reason: str, named: bool, again: str
) -> None:
    side = with_lossless(accept)
    peer = {"kvserve": {"peer": msgspec.to_builtins(PEER)}} if named else {}
    offered(side, "a", **peer)
    if late:
        side.learn(WorkerReport([Outcome("a", "lossless", 0, 0, ok=False, reason=reason)]))
    else:
        side.learn(WorkerReport(failed=[("a", reason)]))
    assert offered(side, "b") == again


def test_a_refused_profile_is_tried_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    side = with_lossless("portable")
    offered(side, "a")
    side.learn(WorkerReport(failed=[("a", REFUSED)]))
    later = time.monotonic() + 3600
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert offered(side, "b") == "lossless"
