"""Offers over real blocks and a real producer, without an engine: what may be read, until when, and who is told."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvserve_core.errors import TransferCancelled
from kvserve_core.pipeline import Pipeline
from kvserve_core.policy import Decision, ServiceContext
from kvserve_core.profile import LOSSLESS_PIPELINE
from kvserve_core.registry import default_registry
from kvserve_core.session import Producer
from kvserve_core.spec import Region
from kvserve_vllm.metadata import Open, WorkerReport
from kvserve_vllm.worker.offers import PREEMPTED, Offers
from vllm_blocks import DIM, KV, WINDOW, caches, placed, tables, until

TOTAL = 300
DECISION = Decision("lossless", "test", ServiceContext(1), 1e9)


@pytest.fixture(params=[(0, 1, 2)])
def offers(request: pytest.FixtureRequest) -> Iterator[Offers]:
    """Of a rank that holds these layers."""
    registry = default_registry()
    placement = placed(caches(), request.param)
    made = Offers(placement, lambda: None)
    pipelines = {"lossless": Pipeline.build(LOSSLESS_PIPELINE, KV, placement.shard)}
    transport = registry.create("transport", {"name": "memory"})
    producer = Producer(pipelines, transport, made.gather)
    made.attach(producer)
    yield made
    producer.close()
    transport.close()


def opened(req_id: str = "r", transfer_id: str = "t") -> Open:
    return Open(req_id, transfer_id, TOTAL, DECISION, None, tables())


def finished(offers: Offers, ids: set[str]) -> set[str]:
    offers.poll(WorkerReport())
    return offers.finished(ids)


def test_blocks_are_given_back_once_encoded_and_not_before_the_request_ends(offers: Offers) -> None:
    report = WorkerReport()
    offers.open(opened(), report)
    offers.advance({"r": 256})
    assert finished(offers, {"r"}) == set()
    offers.advance({"r": TOTAL})
    done: set[str] = set()
    until(lambda: bool(done.update(finished(offers, set())) or done))
    assert done == {"r"}
    assert offers.held == 0
    assert report.empty


def test_a_request_that_is_not_ours_is_never_reported(offers: Offers) -> None:
    assert finished(offers, {"stranger"}) == set()


def test_a_refused_offer_gives_its_blocks_back_and_says_so(offers: Offers) -> None:
    report = WorkerReport()
    offers.open(opened("a"), report)
    offers.open(opened("b"), report)  # the same transfer id
    assert report.failed[0][0] == "t"
    assert "already open" in report.failed[0][1]
    assert finished(offers, {"b"}) == {"b"}
    offers.advance({"a": TOTAL})
    done: set[str] = set()
    until(lambda: bool(done.update(finished(offers, {"a"})) or done))
    assert done == {"a"}  # the first request's offer went on: its blocks were read, and came back


def test_dropping_a_refused_offer_leaves_the_transfer_to_its_owner(offers: Offers) -> None:
    offers.open(opened("a"), WorkerReport())
    offers.open(opened("b"), WorkerReport())
    offers.drop({"b": "its offer failed"})
    report = WorkerReport()
    offers.poll(report)
    assert report.empty
    assert offers.gather("t", Region(0, "k", (0,), (0,), 0, 16)).shape == (1, 1, 16, DIM)


def test_trouble_with_one_offer_ends_that_one_only(offers: Offers) -> None:
    offers.open(opened("a", "ta"), WorkerReport())
    offers.open(opened("b", "tb"), WorkerReport())
    offers.grow({"a": ([1],), "b": ([39], [0])})  # blocks of one pool where there are two
    assert offers._by_request["b"].blocks[0][-1] == 39
    report = WorkerReport()
    offers.poll(report)
    assert [name for name, _ in report.failed] == ["ta"]
    assert finished(offers, {"a", "b"}) == {"a"}


def test_after_a_drop_nobody_reads_the_blocks(offers: Offers) -> None:
    offers.open(opened(), WorkerReport())
    offers.drop({"r": "the request ended"})
    with pytest.raises(TransferCancelled):
        offers.gather("t", Region(0, "k", (0,), (0,), 0, 16))
    assert finished(offers, {"r"}) == {"r"}


def test_a_preempted_request_is_forgotten_until_it_is_offered_anew(offers: Offers) -> None:
    offers.open(opened(), WorkerReport())
    offers.drop({"r": PREEMPTED})
    assert offers.held == 0
    offers.open(opened(transfer_id="t.1"), WorkerReport())
    offers.advance({"r": TOTAL})
    done: set[str] = set()
    until(lambda: bool(done.update(finished(offers, {"r"})) or done))
    assert done == {"r"}


def test_a_window_is_kept_when_the_engine_takes_its_blocks(offers: Offers) -> None:
    """Its blocks are overwritten right after the last step; the first token of the region is nobody's to read."""
    placement = offers._placement
    at = Region(1, "v", (1,), (0, 1), TOTAL - WINDOW, TOTAL)
    want = placement.gather(tables(), at)
    offers.open(opened(), WorkerReport())
    offers._by_transfer["t"].ready = TOTAL
    offers._keep(offers._by_transfer["t"])
    placement.layers[1].views["v"].fill_(7.0)
    got = offers.gather("t", at)
    assert torch.equal(got[:, :, 1:], want[:, :, 1:])
    assert int(got[:, :, 0].abs().sum()) == 0
    part = Region(1, "v", (1,), (1,), TOTAL - 9, TOTAL - 2)
    assert torch.equal(offers.gather("t", part), want[:, 1:, WINDOW - 9 : WINDOW - 2])


@pytest.mark.parametrize("offers", [(0, 2), (1,)], indirect=True, ids=["no window here", "windows only"])
def test_a_stage_of_a_pipeline_may_hold_no_layer_of_a_group(offers: Offers) -> None:
    report = WorkerReport()
    offers.open(opened(), report)
    offers.advance({"r": TOTAL})
    done: set[str] = set()

    def given_back() -> bool:
        offers.poll(report)
        done.update(offers.finished({"r"}))
        return bool(done)

    until(given_back)
    assert report.empty  # nothing failed


def test_growing_blocks_are_appended_by_pool(offers: Offers) -> None:
    offers.open(Open("r", "t", TOTAL, DECISION, None, ([1], [2])), WorkerReport())
    offers.grow({"r": ([3, 4], [5]), "stranger": ([1], [1])})
    assert offers._by_request["r"].blocks == ([1, 3, 4], [2, 5])
