"""Consumers may be done, or give up, before the producer has encoded all of a transfer."""

from __future__ import annotations

import pytest

from fake_engine import FakeEngine, collect, decision, dense
from kvserve_core.pipeline import Pipeline
from kvserve_core.policy import Outcome
from kvserve_core.profile import RAW_PIPELINE
from kvserve_core.registry import default_registry
from kvserve_core.session import Failed, Freed, Producer
from kvserve_core.spec import whole

TOTAL = 512


def report(ok: bool, reason: str = "") -> Outcome:
    return Outcome("t", "raw", 1, 1, ok=ok, reason=reason)


@pytest.mark.parametrize(
    ("given", "expected", "reason"),
    [
        (report(False, "the disk is full"), Failed, "the disk is full"),
        (report(False), Failed, "a consumer gave up before all of it was encoded"),
        (report(True), Outcome, ""),
    ],
)
def test_a_release_of_what_is_not_encoded_yet_ends_as_its_report_says(
    given: Outcome, expected: type, reason: str
) -> None:
    kv = dense()
    engine, transport = FakeEngine(kv, whole(kv), 16), default_registry().create("transport", "memory")
    producer = Producer({"raw": Pipeline.build(RAW_PIPELINE, kv, whole(kv))}, transport, engine.gather)
    try:
        engine.allocate("t", TOTAL)
        at = producer.open("t", TOTAL, decision("raw"))
        engine.prefill("t", range(256))
        producer.ready("t", range(256))
        transport.release(at.address, "t", (0, 1), given)
        ended, freed = collect(producer.poll, (Failed, Outcome, Freed), 2)
        assert isinstance(ended, expected)
        assert ended.reason == reason
        assert isinstance(freed, Freed)
        assert producer.budget.held_bytes == 0
    finally:
        producer.close()
        transport.close()
