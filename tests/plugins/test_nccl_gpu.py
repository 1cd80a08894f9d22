"""``nccl`` between two GPUs: producer and consumer in processes of their own."""

from __future__ import annotations

import multiprocessing

import pytest
import torch

from kvserve_core.errors import PeerLost
from kvserve_core.wire import Codebook, Sealed
from kvserve_plugins.transports.nccl import Nccl
from plugins.nccl_peers import produce_on_gpu
from plugins.test_cuda_ipc_gpu import OnGpu
from plugins.transport_checks import settle, soon, want

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs: NCCL takes one for each side"),
]


@pytest.mark.parametrize("hold", [False, True])
def test_segments_cross_and_a_killed_producer_costs_its_pair_only(hold: bool) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=produce_on_gpu, args=(theirs, hold), daemon=True)
    process.start()
    theirs.close()
    address = ours.recv()
    torch.cuda.set_device(0)
    transport, source = Nccl(Nccl.Config(heartbeat=0.3)), OnGpu()
    delivery = transport.fetch(address, "t", want(source.plan), soon(60))
    book, got = Codebook(delivery.header), iter(delivery)
    received: list[Sealed] = [next(got)] if hold else list(got)
    for sealed in received:
        segment = book.unseal(sealed)
        assert isinstance(segment.body, torch.Tensor)
        assert segment.body.device == torch.device("cuda:0")
        assert torch.equal(segment.body, source.sealed[sealed.index].body)
    assert len(received) == (1 if hold else 40)
    if hold:
        (pair,) = transport._pool._pairs.values()
        process.kill()
        process.join()
        with pytest.raises(PeerLost):
            next(got)
        settle(lambda: pair.channel.gone)
    else:
        ours.send("stop")
        process.join()
    transport.close()
