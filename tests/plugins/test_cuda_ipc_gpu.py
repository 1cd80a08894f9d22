"""``cuda_ipc`` on a GPU: producer and consumer in processes of their own."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import pytest
import torch

from kvserve_core.errors import PeerLost
from kvserve_core.wire import Codebook, Sealed, Segment
from plugins.transport_checks import Source, settle, soon, want

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: shares its memory by CUDA IPC"),
]
SIZE = 8 * 2**20


class OnGpu(Source):
    """Bodies as an encoder leaves them, the same in every process."""

    def __init__(self, count: int = 40) -> None:
        from kvserve_plugins.kernels.digest import piece_hashes

        super().__init__(count, SIZE)
        draw = torch.Generator("cuda").manual_seed(1)
        bodies = [torch.randint(0, 256, (SIZE,), dtype=torch.uint8, device="cuda", generator=draw) for _ in self.plan]
        book = Codebook(self.header)
        segments = [Segment(i, at, 0, b"m", bodies[i]) for i, at in enumerate(self.plan)]
        self.sealed = [book.seal(s, h) for s, h in zip(segments, piece_hashes(bodies), strict=True)]


def produce(pipe: Connection, hold: bool) -> None:
    from kvserve_plugins.transports.cuda_ipc import CudaIpc

    source = OnGpu()
    if hold:
        source._ready.clear()
        source.finish(0)
    transport = CudaIpc(CudaIpc.Config(heartbeat=0.3))
    pipe.send(transport.publish("t", source, 60))
    pipe.recv()
    transport.close()


@pytest.mark.parametrize("hold", [False, True])
def test_segments_cross_on_the_gpu_and_a_killed_producer_leaves_no_mapping(hold: bool) -> None:
    from kvserve_plugins.transports.cuda_ipc import CudaIpc

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=produce, args=(theirs, hold), daemon=True)
    process.start()
    theirs.close()
    address = ours.recv()
    transport = CudaIpc(CudaIpc.Config(heartbeat=0.3))
    source = OnGpu()
    delivery = transport.fetch(address, "t", want(source.plan), soon(60))
    book, got = Codebook(delivery.header), iter(delivery)
    received: list[Sealed] = [next(got)] if hold else list(got)
    for sealed in received:
        segment = book.unseal(sealed)
        assert isinstance(segment.body, torch.Tensor)
        assert segment.body.is_cuda
        assert torch.equal(segment.body, source.sealed[sealed.index].body)
    assert len(received) == (1 if hold else 40)
    if hold:
        free = torch.cuda.mem_get_info()[0]
        process.kill()
        process.join()
        with pytest.raises(PeerLost):
            next(got)
        settle(lambda: torch.cuda.mem_get_info()[0] > free + 256 * 2**20)  # its staging, and its context
    else:
        ours.send("stop")
        process.join()
    transport.close()
