"""A producer that closes while its store hangs."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from fake_engine import FakeEngine, decision, dense
from kvserve_core.errors import TransportError
from kvserve_core.pipeline import Pipeline
from kvserve_core.profile import RAW_PIPELINE
from kvserve_core.registry import default_registry
from kvserve_core.session import Failed, Producer
from kvserve_core.spec import whole
from kvserve_core.transport import Transport

TOTAL = 100


class Hanging:
    """Makes the puts of a store wait until it is let go."""

    def __init__(self, store: Transport) -> None:
        self.entered, self.gate = threading.Event(), threading.Event()
        self._publish, store.publish = store.publish, self.publish  # type: ignore[method-assign]  # stands before it

    def publish(self, *given: Any) -> str:
        self.entered.set()
        self.gate.wait()
        return self._publish(*given)


def test_closing_does_not_wait_for_a_store_that_hangs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kv = dense()
    engine = FakeEngine(kv, whole(kv))
    store = default_registry().create("transport", {"name": "file", "configuration": {"path": tmp_path}})
    hanging = Hanging(store)
    producer = Producer({"raw": Pipeline.build(RAW_PIPELINE, kv, whole(kv))}, store, engine.gather)
    try:
        for name in ("under way", "waiting"):
            engine.allocate(name, TOTAL)
            engine.prefill(name, range(TOTAL))
            producer.open(name, TOTAL, decision("raw"))
            producer.ready(name, range(TOTAL))
        assert hanging.entered.wait(20)
        producer.close(0.05)
        assert not hanging.gate.is_set()
        (said,) = [record.getMessage() for record in caplog.records]
        assert (
            said
            == f"the store {store.address!r} did not let go of the encode thread within 0.05 s, which is left behind"
        )
        assert {event.transfer_id for event in producer.poll() if isinstance(event, Failed)} == {"under way", "waiting"}
        with pytest.raises(TransportError, match="closed"):
            producer.open("late", TOTAL, decision("raw"))
    finally:
        hanging.gate.set()
        producer.close(20)
        store.close()
    assert len(caplog.records) == 1  # the second time it ended
    assert store.contains(["under way"]) == 1
    assert store.contains(["waiting"]) == 0
