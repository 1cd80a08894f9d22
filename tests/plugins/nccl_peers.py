"""What the tests of ``nccl`` share: transports over Gloo, and a consumer in a process of its own."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from kvserve_plugins.transports._nccl_carrier import Pair, PairCarrier
from kvserve_plugins.transports.nccl import Nccl
from plugins.transport_checks import Source, soon, want

BEAT_S = 0.2


def made(**config: Any) -> Nccl:
    return Nccl(Nccl.Config(**({"backend": "gloo", "heartbeat": BEAT_S} | config)))


def carrier_of(producer: Nccl) -> PairCarrier:
    assert producer._server is not None
    carrier = producer._server._carrier
    assert isinstance(carrier, PairCarrier)
    return carrier


def pairs(producer: Nccl) -> dict[bytes, Pair]:
    """Of a producer, by the connection on which a consumer joined."""
    return carrier_of(producer).pairs


def consume(address: str, pipe: Connection) -> None:
    source = Source(40, 64_000)
    got = iter(made().fetch(address, "t", want(source.plan), soon()))
    next(got)
    pipe.send(True)
    time.sleep(60)


def produce_on_gpu(pipe: Connection, hold: bool) -> None:
    """On the second GPU, all segments or the first."""
    from plugins.test_cuda_ipc_gpu import OnGpu

    torch.cuda.set_device(1)
    source = OnGpu()
    if hold:
        source._ready.clear()
        source.finish(0)
    transport = Nccl(Nccl.Config(heartbeat=0.3))
    pipe.send(transport.publish("t", source, 60))
    pipe.recv()
    transport.close()
