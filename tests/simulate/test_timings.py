"""How ``benchmarks/controller.py`` judges times: nothing here measures any."""

from __future__ import annotations

import random
from types import ModuleType

import numpy as np

from kvserve_core.policy import ServiceContext
from kvserve_plugins.policies.analytic import Analytic


def window(call: int, loop: int) -> dict[str, dict[str, int]]:
    return {"choose": {"p50_ns": call, "p99_ns": call}, "empty loop": {"p50_ns": loop, "p99_ns": loop}}


def test_an_empty_loop_that_was_disturbed_makes_no_ratio_small(controller: ModuleType) -> None:
    found = [window(5000, 200), window(6000, 1000), window(5200, 260)]
    assert controller.decision.ratio(found, "choose") == 25.0
    assert controller.decision.middle(found, "choose") == 20.0


def test_a_call_counts_in_its_own_quietest_window(controller: ModuleType) -> None:
    found = [window(5000, 400), window(9000, 250)]
    assert controller.decision.ratio(found, "choose") == 20.0


def test_of_the_rounds_in_a_simulation_the_median_counts(controller: ModuleType) -> None:
    rounds = [np.full(100, us) for us in (19.0, 25.0, 21.0, 30.0, 20.0)]
    found = controller.online._median(rounds)
    assert (found["p99_us"], found["p99_us of all rounds"]) == (21.0, [19.0, 25.0, 21.0, 30.0, 20.0])


def test_what_is_timed_is_asked_as_adapters_ask(controller: ModuleType) -> None:
    decision = controller.decision
    asked = [decision.as_adapters_ask(request) for request in decision.contexts(random.Random(0), 50)]
    assert all(each.bandwidth is None and each.tokens and each.elapsed_s for each in asked)
    assert len({each.nbytes for each in asked}) == 50


def test_a_call_is_made_once_for_each_request_after_what_comes_before_it(controller: ModuleType) -> None:
    calls: list[str] = []

    def before(context: ServiceContext) -> None:
        calls.append("before")

    def call(context: ServiceContext) -> None:
        calls.append("call")

    given = [(ServiceContext(nbytes=1),)] * 3
    assert len(controller.decision.Timed(call, given, before).nanoseconds()) == 3
    assert calls == ["before", "call"] * 3


def test_every_call_has_its_percentiles_in_every_window(controller: ModuleType) -> None:
    found = controller.decision.measure(Analytic(Analytic.Config()), count=100, rounds=2)
    assert [set(each) for each in found] == [{"choose", "choose, bandwidth given", "observe", "empty loop"}] * 2
    assert all(0 < each["p50_ns"] <= each["p99_ns"] for window in found for each in window.values())
