"""``Consumer.wait``: an engine's thread with nothing to do leaves the interpreter to the fetch threads."""

from __future__ import annotations

import time

from fake_engine import FakeEngine, decision, dense
from kvserve_core.pipeline import Pipeline
from kvserve_core.profile import RAW_PIPELINE
from kvserve_core.registry import default_registry
from kvserve_core.session import Consumer, Loaded, Producer
from kvserve_core.spec import whole
from kvserve_core.transport import Locator

TOTAL = 512
LONG = 60.0


def test_waiting_ends_with_the_load_and_without_one_at_once() -> None:
    kv = dense()
    prefill, decode = FakeEngine(kv, whole(kv), 16), FakeEngine(kv, whole(kv), 16)
    transport = default_registry().create("transport", "memory")
    producer = Producer({"raw": Pipeline.build(RAW_PIPELINE, kv, whole(kv))}, transport, prefill.gather)
    consumer = Consumer(kv, whole(kv), lambda _: transport, decode.scatter)
    try:
        prefill.allocate("t", TOTAL)
        decode.allocate("t", TOTAL)
        began = time.monotonic()
        consumer.wait(LONG)
        at = producer.open("t", TOTAL, decision("raw"))
        prefill.prefill("t", range(TOTAL))
        producer.ready("t", range(TOTAL))
        consumer.fetch(Locator("t", TOTAL, (at,), "raw"), range(TOTAL), began + LONG)
        consumer.wait(LONG)
        (event,) = consumer.poll()
        assert isinstance(event, Loaded)
        assert time.monotonic() < began + LONG  # neither call waited for its end
    finally:
        consumer.close()
        producer.close()
        transport.close()
