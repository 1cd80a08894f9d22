"""Stand-ins for a prefill engine, each a process of its own that serves KV which a real one computed, and then dies."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any, Self

import msgspec
import numpy as np
import torch
from torch import Tensor

from fake_engine import decision, wait_for
from kvserve_core.pipeline import Pipeline
from kvserve_core.profile import RAW_PIPELINE
from kvserve_core.registry import default_registry
from kvserve_core.session import Consumer, Loaded, LoadFailed, Producer
from kvserve_core.session.source import Source
from kvserve_core.spec import KVSpec, Region, whole
from kvserve_core.transport import Endpoint, Locator
from kvserve_vllm.params import TransferParams, answer

Planes = dict[tuple[int, str], np.ndarray]
"""A prompt's KV, ``[L, H, T, D]`` by group and plane."""
WAIT_S = 60.0


def fetched(kv: KVSpec, params: Mapping[str, Any]) -> Planes | None:
    """What an engine offers, raw or lossless; None where its transfer failed."""
    locator = TransferParams.parse(params).locator
    assert locator is not None
    total = locator.num_tokens
    found = {
        (group.id, plane.name): np.zeros((len(group.layers), plane.num_heads, total, plane.dim), np.float32)
        for group in kv.groups
        for plane in group.planes
    }

    def scatter(name: str, at: Region, x: Tensor) -> None:
        found[at.group, at.plane][_place(kv, at)] = x.numpy()

    transport = default_registry().create("transport", "tcp")
    consumer = Consumer(kv, whole(kv), lambda _: transport, scatter)
    try:
        consumer.fetch(locator, range(total), time.monotonic() + WAIT_S)
        event = wait_for(consumer.poll, (Loaded, LoadFailed), WAIT_S)
    finally:
        consumer.close()
        transport.close()
    return found if isinstance(event, Loaded) else None


def _place(kv: KVSpec, at: Region) -> tuple[Any, ...]:
    layers = [kv.group(at.group).layers.index(layer) for layer in at.layers]
    return *np.ix_(layers, at.heads), slice(at.start, at.stop)


class Peer:
    """Starts at once. bandwidth: of what it sends."""

    def __init__(self, kv: KVSpec, planes: Planes, bandwidth: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, kv, planes, bandwidth), daemon=True)
        self._process.start()
        theirs.close()
        self._total = next(iter(planes.values())).shape[2]
        self._endpoint = msgspec.json.decode(self._received(), type=Endpoint)

    def offer(self, transfer_id: str, ready: int) -> dict[str, Any]:
        """What its router would be given. ready: tokens that it has computed; the others never come."""
        self._pipe.send((transfer_id, ready))
        self._received()
        return self.named(transfer_id)

    def named(self, transfer_id: str) -> dict[str, Any]:
        """The same of a transfer that it may not offer."""
        return answer(Locator(transfer_id, self._total, (self._endpoint,), "raw"), None)

    def wait_asked(self, token: int) -> None:
        """Until the consumer's turn is at a segment of this token, or a later one."""
        while self._received() < token:
            pass

    def _received(self) -> Any:
        assert self._pipe.poll(WAIT_S)
        return self._pipe.recv()

    def kill(self) -> None:
        """As a crash: nothing is closed."""
        self._process.kill()
        self._process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._pipe.close()


def _serve(pipe: Connection, kv: KVSpec, planes: Planes, bandwidth: str) -> None:
    def gather(name: str, at: Region) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(planes[at.group, at.plane][_place(kv, at)]))

    transport = default_registry().create(
        "transport", {"name": "tcp", "configuration": {"max_bandwidth": bandwidth, "heartbeat": "0.5s"}}
    )
    producer = Producer({"raw": Pipeline.build(RAW_PIPELINE, kv, whole(kv))}, transport, gather)
    pipe.send(msgspec.json.encode(Endpoint(transport.address, whole(kv))))
    _tell_what_is_asked(pipe)
    while True:
        transfer_id, ready = pipe.recv()
        producer.open(transfer_id, next(iter(planes.values())).shape[2], decision("raw"))
        producer.ready(transfer_id, range(ready))
        pipe.send(True)


def _tell_what_is_asked(pipe: Connection) -> None:
    """The first token of each segment that a consumer is about to get."""
    get, told, lock = Source.get, set[int](), threading.Lock()

    def telling(source: Source, index: int, deadline: float) -> Any:
        with lock:
            if index not in told:
                told.add(index)
                pipe.send(source.plan[index].start)
        return get(source, index, deadline)

    Source.get = telling  # type: ignore[method-assign]  # in this process only
