"""How many threads decode at a time: on a CPU they take the cores that the engine computes on."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import Tensor

from fake_engine import FakeEngine, decision, dense
from kvserve_core.pipeline import Pipeline
from kvserve_core.profile import RAW_PIPELINE
from kvserve_core.registry import default_registry
from kvserve_core.session import Consumer, Loaded, Producer
from kvserve_core.session.gate import LONGEST_REST_S, Gate, default_turns
from kvserve_core.spec import Region, whole
from kvserve_core.transport import Locator

TOTAL, NAMES = 512, ("a", "b", "c", "d")


class Meeting:
    """A scatter that others can meet in."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine, self._lock = engine, threading.Lock()
        self.here = self.most = 0

    def __call__(self, name: str, at: Region, x: Tensor) -> None:
        with self._lock:
            self.here += 1
            self.most = max(self.most, self.here)
        time.sleep(0.005)
        self._engine.scatter(name, at, x)
        with self._lock:
            self.here -= 1


@pytest.mark.parametrize(("decoders", "least", "most"), [(1, 1, 1), (4, 2, 4)])
def test_no_more_threads_decode_than_there_may(decoders: int, least: int, most: int) -> None:
    kv = dense()
    prefill, decode = FakeEngine(kv, whole(kv), 16, 1024), FakeEngine(kv, whole(kv), 16, 1024)
    transport = default_registry().create("transport", "memory")
    producer = Producer({"raw": Pipeline.build(RAW_PIPELINE, kv, whole(kv))}, transport, prefill.gather)
    scatter = Meeting(decode)
    consumer = Consumer(kv, whole(kv), lambda _: transport, scatter, decoders=decoders, batch_bytes=1)
    try:
        for name in NAMES:
            prefill.allocate(name, TOTAL)
            decode.allocate(name, TOTAL)
            at = producer.open(name, TOTAL, decision("raw"))
            prefill.prefill(name, range(TOTAL))
            producer.ready(name, range(TOTAL))
            consumer.fetch(Locator(name, TOTAL, (at,), "raw"), range(TOTAL), time.monotonic() + 60)
        events = []
        while len(events) < len(NAMES):
            consumer.wait(60)
            events += consumer.poll()
        assert all(isinstance(event, Loaded) for event in events)
        assert least <= scatter.most <= most
        assert all(decode.holds(name, range(TOTAL), TOTAL) for name in NAMES)
    finally:
        consumer.close()
        producer.close()
        transport.close()


def test_a_thread_rests_beside_a_batch_only_and_not_once_it_is_given_up() -> None:
    gate, given_up = Gate(1, 0.5), threading.Event()
    rests: list[float] = []
    given_up.wait = lambda timeout=None: bool(rests.append(timeout))  # type: ignore[method-assign]
    for busy in (False, True):
        gate.busy = busy
        with gate.turn(given_up):
            time.sleep(0.01)
    assert len(rests) == 1
    assert 0.01 <= rests[0] <= LONGEST_REST_S


def test_a_gpu_takes_two_at_a_time_however_many_cores_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)), raising=False)
    assert (default_turns(torch.device("cuda")), default_turns(torch.device("cpu"))) == (2, 32)
