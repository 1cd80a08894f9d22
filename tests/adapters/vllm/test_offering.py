"""The offering half of the scheduler side, call by call: what it answers when offers fail, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvserve_vllm.metadata import LoadEnd, StepMeta, WorkerReport
from kvserve_vllm.scheduler import wanted
from kvserve_vllm.scheduler.offering import Offering
from kvserve_vllm.scheduler.side import SchedulerSide
from kvserve_vllm.worker.offers import PREEMPTED
from vllm_steps import (
    LENGTH,
    OUTCOME,
    TOTAL,
    blocks,
    both_halves,
    failures,
    locator,
    offering,
    request,
    step,
)


@pytest.fixture
def side() -> SchedulerSide:
    return both_halves()


def test_a_request_whose_offer_failed_is_kept_until_the_workers_hand_it_back(side: SchedulerSide) -> None:
    asked = request()
    side.arrived(asked)
    assert [op.transfer_id for op in side.plan(step({"r": 100})).open] == ["t"]
    side.learn(WorkerReport(failed=[("t", "StoreFull: no room")]))
    meta = side.plan(step(more={"r": (100, 100)}))
    assert (list(meta.drop), meta.ready) == (["r"], {})
    assert side.finished(asked) == (True, None)


def test_a_failed_offer_is_made_again_after_a_preemption(side: SchedulerSide) -> None:
    asked = request()
    side.arrived(asked)
    side.plan(step({"r": 100}))
    side.learn(WorkerReport(failed=[("t", "StoreFull: no room")]))
    assert side.plan(step(preempted=["r"])).drop == {"r": PREEMPTED}
    meta = side.plan(step({"r": LENGTH}))
    assert ([op.transfer_id for op in meta.open], meta.ready) == (["t.1"], {"r": TOTAL})
    keep, params = side.finished(asked)
    assert keep
    assert params is not None
    assert params["kvserve"]["locator"]["transfer_id"] == "t.1"


def test_a_decision_that_fails_costs_its_request_the_offer_and_nobody_else(
    side: SchedulerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = request("a", "ta"), request("b", "tb")
    side.arrived(first)
    side.arrived(second)
    decide = Offering._decide

    def fail(self: Offering, given: wanted.Wanted) -> Any:
        if given.request.request_id == "a":
            raise OverflowError("numerical result out of range")
        return decide(self, given)

    monkeypatch.setattr(Offering, "_decide", fail)
    meta = side.plan(step({"a": LENGTH, "b": LENGTH}))
    assert ([op.req_id for op in meta.open], meta.ready) == (["b"], {"b": TOTAL})
    assert side.finished(first) == (False, None)  # no worker knows it, so none would hand its blocks back
    assert side.finished(second)[0]
    assert failures(side.stats) == {"build_connector_meta": 1}


def test_a_step_that_cannot_be_read_ends_offers_whose_blocks_are_no_longer_known(side: SchedulerSide) -> None:
    asked = request()
    side.arrived(asked)
    side.plan(step({"r": 100}))
    side.plan(SimpleNamespace())
    meta = side.plan(step(more={"r": (100, 100)}))
    assert (list(meta.drop), meta.grow, meta.ready) == (["r"], {}, {})
    assert side.finished(asked) == (True, None)


def test_a_step_that_cannot_be_read_leaves_the_orders_of_the_other_halves(side: SchedulerSide) -> None:
    asked = request("b", do_remote_prefill=True, kvserve={"locator": locator()})
    side.arrived(asked)
    assert side.matched(asked, 0) == (TOTAL, False)
    side.allocated(asked, blocks(1, 2, 3, 4), TOTAL)
    meta = side.plan(SimpleNamespace())
    assert [load.req_id for load in meta.load] == ["b"]


def test_a_half_that_fails_at_the_end_does_not_take_the_blocks_from_the_workers(side: SchedulerSide) -> None:
    asked = request()
    side.arrived(asked)
    side.plan(step({"r": LENGTH}))
    assert side._fetching is not None
    side._fetching._wanted = None  # type: ignore[assignment]  # whatever is wrong with it
    assert side.finished(asked)[0]
    assert failures(side.stats) == {"request_finished": 1}


def test_an_answer_that_fails_still_keeps_the_blocks(side: SchedulerSide) -> None:
    asked = request()
    side.arrived(asked)
    side.plan(step({"r": LENGTH}))
    asked.num_output_tokens = None
    assert side.finished(asked) == (True, None)
    assert list(side.plan(step()).drop) == ["r"]
    assert failures(side.stats) == {"request_finished": 1}


def test_a_status_that_is_none_still_keeps_the_blocks(side: SchedulerSide) -> None:
    asked = request()
    side.arrived(asked)
    side.plan(step({"r": 100}))
    asked.status = "no status"
    assert side.finished(asked) == (True, None)
    assert list(side.plan(step()).drop) == ["r"]
    assert failures(side.stats) == {"request_finished": 1}


@pytest.mark.parametrize("planned", [True, False])
def test_blocks_are_kept_for_workers_that_hold_them_when_the_half_cannot_say(
    side: SchedulerSide, planned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request()
    side.arrived(asked)
    if planned:
        side.plan(step({"r": LENGTH}))

    def fail(*given: Any) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(Offering, "finished", fail)
    assert side.finished(asked) == (planned, None)
    assert list(side.plan(step()).drop) == ["r"]
    monkeypatch.undo()
    assert side.finished(asked) == (False, None)  # nothing is left of it
    assert failures(side.stats) == {"request_finished": 1}


def test_a_transfer_id_in_use_is_not_offered_twice(side: SchedulerSide) -> None:
    first, second, third = request("a"), request("b"), request("c")
    side.arrived(first)
    side.arrived(second)
    assert [op.req_id for op in side.plan(step({"a": LENGTH, "b": LENGTH})).open] == ["a"]
    assert side.finished(first)[1] is not None
    assert side.finished(second) == (False, None)
    side.learn(WorkerReport(failed=[("t", "its lease ended")]))
    side.arrived(third)
    assert [op.req_id for op in side.plan(step({"c": LENGTH})).open] == ["c"]


def test_cached_tokens_say_nothing_of_how_long_prompts_take(
    side: SchedulerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    controller = offering(side)._deployment.controller
    monkeypatch.setattr(controller, "observe_prefill", lambda tokens, *_: seen.append(tokens))
    for req_id, computed in (("a", 0), ("b", LENGTH - 8)):
        asked = request(req_id, req_id)
        side.arrived(asked)
        side.plan(step({req_id: LENGTH - computed}, computed=computed))
        side.finished(asked)
    assert seen == [LENGTH]


def test_a_half_that_cannot_take_its_reports_leaves_them_to_the_others(side: SchedulerSide) -> None:
    asked = request("b", do_remote_prefill=True, kvserve={"locator": locator()})
    side.arrived(asked)
    side.matched(asked, 0)
    side.allocated(asked, blocks(1, 2, 3, 4), TOTAL)
    side._offering._unsettled = None  # type: ignore[union-attr, assignment]  # whatever is wrong with it
    side.learn(WorkerReport([OUTCOME], loads=[LoadEnd("b", "source", TOTAL, TOTAL)]))
    assert side._fetching is not None
    assert side._fetching._loading == {}  # who waits for the same transfer goes on
    assert failures(side.stats) == {"update_connector_output": 1}


def loading(side: SchedulerSide, tokens: int) -> tuple[Any, StepMeta]:
    """A request that is offered, and loads ``tokens`` of its prompt within its first step."""
    asked = request(do_remote_prefill=True, kvserve={"locator": locator()})
    side.arrived(asked)
    side.matched(asked, 0)
    side.allocated(asked, blocks(1, 2, 3, 4), tokens)
    return asked, side.plan(step({"r": LENGTH - tokens}, computed=tokens))


def ended(reason: str = "") -> WorkerReport:
    return WorkerReport(loads=[LoadEnd("r", "source", TOTAL, 0 if reason else TOTAL, reason)])


def test_what_is_computed_on_a_load_is_announced_once_the_load_is_known_to_be_good(side: SchedulerSide) -> None:
    _, meta = loading(side, TOTAL)
    assert (len(meta.load), len(meta.open), meta.ready) == (1, 1, {})
    assert side.plan(step(more={"r": (LENGTH, 1)})).ready == {}  # planned before the step before has ended
    side.learn(ended())
    assert side.plan(step(more={"r": (LENGTH + 1, 1)})).ready == {"r": TOTAL}


def test_a_failed_load_ends_the_offer_and_what_is_computed_again_is_another(side: SchedulerSide) -> None:
    asked, meta = loading(side, TOTAL)
    side.learn(ended("FrameError: damaged"))
    meta = side.plan(step(more={"r": (0, LENGTH)}))
    assert meta.drop == {"r": PREEMPTED}
    assert [(op.transfer_id, op.blocks) for op in meta.open] == [("t.1", ([1, 2, 3],))]
    assert (meta.grow, meta.ready) == ({}, {"r": TOTAL})
    keep, params = side.finished(asked)
    assert keep
    assert params is not None
    assert params["kvserve"]["locator"]["transfer_id"] == "t.1"


@pytest.mark.parametrize(("reason", "ready", "drop"), [("", {"r": TOTAL}, []), ("FrameError: damaged", {}, ["r"])])
def test_a_request_that_ends_in_the_step_of_its_load_is_announced_after_it(
    side: SchedulerSide, reason: str, ready: dict[str, int], drop: list[str]
) -> None:
    asked, _ = loading(side, TOTAL)
    keep, params = side.finished(asked)
    assert keep
    assert params is not None
    side.learn(ended(reason))
    meta = side.plan(step())
    assert (meta.ready, list(meta.drop)) == (ready, drop)
    assert side.plan(step()).ready == {}
