"""A policy that misbehaves stops nobody."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from controller_cases import FREE_RAW, GBPS, MIB, Clock, library, profile
from kvserve_core.component import ComponentConfig
from kvserve_core.controller import Controller
from kvserve_core.errors import UnknownNameError
from kvserve_core.policy import Candidate, Choice, Decision, Outcome, Policy, ServiceContext


class Misbehaving(Policy):
    """Answers whatever it is given; raises what is an exception."""

    def __init__(self, answer: Any) -> None:
        super().__init__(ComponentConfig())
        self.answer = answer

    def choose(self, context: ServiceContext, candidates: Sequence[Candidate]) -> Any:
        if isinstance(candidates, list):
            candidates.clear()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def observe(self, decision: Decision, outcome: Outcome) -> None:
        raise KeyError("arm")


ANSWERS = [Choice(-1, "x"), Choice(99, "x"), Choice(0, None), Choice(0.5, "x"), None, 0, (0, "x"), "raw"]  # type: ignore[arg-type]  # wrong on purpose
FAILURES = [RuntimeError("no"), RecursionError("deep"), UnknownNameError("gone")]


@pytest.mark.parametrize("answer", [*ANSWERS, *FAILURES], ids=repr)
def test_a_policy_that_fails_gives_way_to_raw(answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    control = Controller(library(FREE_RAW, profile("p", 8.0, 1e11)), Misbehaving(answer))
    for _ in range(3):
        decision = control.choose(ServiceContext(nbytes=56 * MIB, bandwidth=GBPS))
        assert decision.profile == "raw"
        assert decision.reason.startswith("policy failed: ")
        assert "p" in {c.profile for c in decision.candidates}
    assert control.policy_failures == 3
    said = [m for m in caplog.messages if "failed to choose" in m]
    assert len(said) == 1
    assert "Misbehaving" in said[0]


def test_a_policy_that_fails_to_learn_stops_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    control = Controller(library(FREE_RAW), Misbehaving(Choice(0, "x")), clock=Clock())
    decision = control.choose(ServiceContext(nbytes=10**8))
    for _ in range(2):
        control.observe(decision, Outcome("t", "raw", 10**8, 10**8, transfer_s=1.0))
    assert control.policy_failures == 2
    assert len([m for m in caplog.messages if "failed to observe" in m]) == 1
    assert control.links.estimate() == pytest.approx(1e8, rel=0.1)


class Timely(Misbehaving):
    """Notes when it was started and asked, by its clock."""

    def start(self, clock: Callable[[], float]) -> None:
        super().start(clock)
        self.times = [clock()]

    def choose(self, context: ServiceContext, candidates: Sequence[Candidate]) -> Any:
        self.times.append(self.clock())
        return super().choose(context, candidates)


def test_a_policy_is_started_once_and_keeps_the_controllers_time() -> None:
    clock, policy = Clock(), Timely(Choice(0, "x"))
    control = Controller(library(FREE_RAW), policy, clock=clock)
    clock.now = 3.0
    control.choose(ServiceContext(nbytes=MIB))
    assert policy.times == [0.0, 3.0]


def test_a_policy_that_nobody_started_keeps_the_time_of_the_machine() -> None:
    before = time.monotonic()
    assert before <= Misbehaving(None).clock() <= time.monotonic()
