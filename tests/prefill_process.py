"""A prefill engine in a process of its own, for tests that kill, stop and split it."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import msgspec

from fake_engine import FakeEngine, decision, dense, wait_for
from kvserve_core.pipeline import Pipeline
from kvserve_core.policy import Outcome
from kvserve_core.profile import LOSSLESS_PIPELINE
from kvserve_core.registry import default_registry
from kvserve_core.session import Failed, Producer
from kvserve_core.spec import Shard, whole

TOTAL = 700
KV = dense(heads=2)


def prefill_rank(connection: Connection, rank: int, size: int, name: str, config: dict[str, Any]) -> None:
    """A prefill process: publishes what it is told, then answers with the events it sees."""
    shard = Shard(whole(KV).layers, rank, size)
    engine = FakeEngine(KV, shard)
    transport = default_registry().create("transport", {"name": name, "configuration": config})
    producer = Producer({"lossless": Pipeline.build(LOSSLESS_PIPELINE, KV, shard)}, transport, engine.gather)
    while (job := connection.recv()) is not None:
        transfer_id, ready = job
        engine.allocate(transfer_id, TOTAL)
        endpoint = producer.open(transfer_id, TOTAL, decision("lossless"))
        engine.prefill(transfer_id, range(ready))
        producer.ready(transfer_id, range(ready))
        connection.send(msgspec.json.encode(endpoint))
        if ready == TOTAL:
            outcome = wait_for(producer.poll, (Outcome, Failed))
            connection.send((outcome.ok, outcome.wire_bytes) if isinstance(outcome, Outcome) else outcome.reason)
    producer.close()
    transport.close()
