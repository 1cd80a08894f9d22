"""The same sessions over tcp and nccl between processes and over a file store."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fake_engine import FakeEngine, collect, decision, wait_for
from kvserve_core.errors import LeaseLost, PeerLost, TransferTimeout, UnsupportedSpecError
from kvserve_core.pipeline import Pipeline
from kvserve_core.profile import LOSSLESS_PIPELINE
from kvserve_core.registry import default_registry
from kvserve_core.session import Consumer, Freed, Loaded, LoadFailed, Producer
from kvserve_core.spec import Shard, whole
from kvserve_core.transport import Endpoint, Locator, Transport
from prefill_process import KV, TOTAL, prefill_rank


class Prefill:
    """Processes of one tensor-parallel prefill engine."""

    def __init__(self, size: int = 1, name: str = "tcp", **config: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=prefill_rank, args=(theirs, rank, size, name, config), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def publish(self, transfer_id: str, ready: int = TOTAL) -> Locator:
        for pipe in self.pipes:
            pipe.send((transfer_id, ready))
        endpoints = tuple(msgspec.json.decode(pipe.recv(), type=Endpoint) for pipe in self.pipes)
        sent = msgspec.json.encode(Locator(transfer_id, TOTAL, endpoints, "lossless"))  # as a router passes it on
        return msgspec.json.decode(sent, type=Locator)

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                os.kill(process.pid, signal.SIGCONT)
                try:
                    pipe.send(None)
                except OSError:
                    process.kill()
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()


class Decode:
    """A consumer with its engine, in this process."""

    def __init__(self, transport: Transport, shard: Shard) -> None:
        self.engine = FakeEngine(KV, shard)
        self.session = Consumer(KV, shard, lambda _: transport, self.engine.scatter)

    def load(self, loc: Locator, seconds: float = 30.0) -> Loaded | LoadFailed:
        self.start(loc, seconds)
        event = wait_for(self.session.poll, (Loaded, LoadFailed), seconds + 10)
        assert isinstance(event, Loaded | LoadFailed)
        return event

    def start(self, loc: Locator, seconds: float = 30.0) -> None:
        self.engine.allocate(loc.transfer_id, loc.num_tokens)
        self.session.fetch(loc, range(loc.num_tokens), time.monotonic() + seconds)


@pytest.fixture
def tcp() -> Iterator[Transport]:
    transport = default_registry().create("transport", "tcp")
    yield transport
    transport.close()


@pytest.mark.parametrize(("name", "config"), [("tcp", {}), ("nccl", {"backend": "gloo"})])
def test_two_prefill_processes_serve_two_decode_ranks(name: str, config: dict[str, Any]) -> None:
    transport = default_registry().create("transport", {"name": name, "configuration": config})
    prefill = Prefill(2, name, **config)
    decodes = [Decode(transport, Shard(whole(KV).layers, r, 2)) for r in range(2)]
    try:
        loc = prefill.publish("t")
        for decode in decodes:
            decode.start(loc)
        for decode in decodes:
            event = wait_for(decode.session.poll, (Loaded, LoadFailed), 40)
            assert isinstance(event, Loaded), event
            assert decode.engine.holds("t", range(TOTAL), TOTAL)
        reports = [pipe.recv() for pipe in prefill.pipes]
        assert all(ok for ok, _ in reports)
        assert all(0 < wire < TOTAL * KV.token_bytes() for _, wire in reports)
    finally:
        prefill.close()
        for decode in decodes:
            decode.session.close()
        transport.close()


def test_a_killed_producer_fails_its_requests_and_no_others(tcp: Transport) -> None:
    doomed, healthy = Prefill(), Prefill()
    decode = Decode(tcp, whole(KV))
    try:
        decode.start(doomed.publish("doomed", ready=256))
        doomed.processes[0].kill()
        decode.start(healthy.publish("healthy"))
        ended = collect(decode.session.poll, (Loaded, LoadFailed), 2, 60)
        events = {e.transfer_id: e for e in ended if isinstance(e, Loaded | LoadFailed)}
        assert isinstance(events["healthy"], Loaded)
        assert decode.engine.holds("healthy", range(TOTAL), TOTAL)
        failed = events["doomed"]
        assert isinstance(failed, LoadFailed)
        assert isinstance(failed.error, PeerLost | TransferTimeout)
        assert failed.valid.stop in (0, 256)
    finally:
        decode.session.close()
        doomed.close()
        healthy.close()


def test_a_stopped_producer_ends_at_the_deadline(tcp: Transport) -> None:
    prefill = Prefill()
    decode = Decode(tcp, whole(KV))
    try:
        loc = prefill.publish("t", ready=256)
        os.kill(prefill.processes[0].pid, signal.SIGSTOP)
        event = decode.load(loc, seconds=1.0)
        assert isinstance(event, LoadFailed)
        assert isinstance(event.error, TransferTimeout | PeerLost)
    finally:
        decode.session.close()
        prefill.close()


def test_a_store_outlives_its_producer(tmp_path: Path) -> None:
    config = {"name": "file", "configuration": {"path": str(tmp_path)}}
    engine = FakeEngine(KV, whole(KV))
    writer = default_registry().create("transport", config)
    producer = Producer({"lossless": Pipeline.build(LOSSLESS_PIPELINE, KV, whole(KV))}, writer, engine.gather)
    engine.allocate("key", TOTAL)
    endpoint = producer.open("key", TOTAL, decision("lossless"))
    engine.prefill("key", range(TOTAL))
    producer.ready("key", range(TOTAL))
    wait_for(producer.poll, Freed)
    producer.close()
    writer.close()
    reader = default_registry().create("transport", config)
    decode = Decode(reader, whole(KV))
    try:
        assert reader.contains(["key", "other"]) == 1
        for i in range(2):  # a store's object is not used up
            event = decode.load(Locator("key", TOTAL, (endpoint,), "lossless"))
            assert isinstance(event, Loaded), event
            assert decode.engine.holds("key", range(TOTAL), TOTAL), i
        event = decode.load(Locator("other", TOTAL, (endpoint,), "lossless"))
        assert isinstance(event, LoadFailed)
        assert isinstance(event.error, LeaseLost)
    finally:
        decode.session.close()
        reader.close()


def test_a_prefix_is_stored_cell_by_cell_and_shared_by_requests(tmp_path: Path) -> None:
    store = default_registry().create("transport", {"name": "file", "configuration": {"path": str(tmp_path)}})
    engine = FakeEngine(KV, whole(KV))
    producer = Producer({"lossless": Pipeline.build(LOSSLESS_PIPELINE, KV, whole(KV))}, store, engine.gather)
    ends = {"cell-0": 256, "cell-1": 512}
    endpoints = {}
    for key, end in ends.items():
        engine.allocate(key, end)
        engine.prefill(key, range(end - 256, end))
        endpoints[key] = producer.open(key, end, decision("lossless"), start=end - 256)
        producer.ready(key, range(end - 256, end))
        wait_for(producer.poll, Freed)
    producer.close()
    whole_cells = 2 * 256 * KV.token_bytes()
    assert producer.counters.snapshot()["raw_bytes"] == whole_cells
    decode = FakeEngine(KV, whole(KV))
    session = Consumer(KV, whole(KV), lambda _: store, decode.scatter)
    try:
        for request in ("a", "b"):
            for key, end in ends.items():
                name = f"{request}/{key}"
                decode.allocate(name, end)
                loc = Locator(key, end, (endpoints[key],), "lossless")
                session.fetch(loc, range(end - 256, end), time.monotonic() + 30, name=name)
        loaded = collect(session.poll, (Loaded, LoadFailed), 4)
        assert {e.transfer_id for e in loaded if isinstance(e, Loaded)} == {f"{r}/{k}" for r in "ab" for k in ends}
        for request in ("a", "b"):
            assert all(decode.holds(f"{request}/{k}", range(end - 256, end), end) for k, end in ends.items())
    finally:
        session.close()
        store.close()


def test_a_published_range_begins_at_a_cell() -> None:
    pipeline = Pipeline.build(LOSSLESS_PIPELINE, KV, whole(KV))
    with pytest.raises(UnsupportedSpecError, match="begins no cell"):
        pipeline.header("key", 512, "lossless", 100)
