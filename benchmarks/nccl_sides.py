"""Both sides of ``gpu_nccl.py``: bodies on a device, and a producer in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from kvserve_core.bodies import host_bytes
from kvserve_core.bodies import piece_hashes as host_hashes
from kvserve_core.wire import Codebook, Segment
from kvserve_plugins.transports.nccl import Nccl
from plugins.transport_checks import Remote, Source

COUNT, SIZE = 40, 8 * 2**20
BEAT_S = 0.5


class Bodies(Source):
    """Random bodies on a device, the same in both processes."""

    def __init__(self, device: str, count: int = COUNT) -> None:
        super().__init__(count, SIZE)
        draw = torch.Generator().manual_seed(1)
        made = [torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=draw) for _ in self.plan]
        bodies = [body.to(device) for body in made]
        book = Codebook(self.header)
        segments = [Segment(i, at, 0, b"m", bodies[i]) for i, at in enumerate(self.plan)]
        self.sealed = [book.seal(s, h) for s, h in zip(segments, hashes(bodies), strict=True)]


def hashes(bodies: list[torch.Tensor]) -> list[bytes]:
    if not bodies[0].is_cuda:
        return [host_hashes(host_bytes(body)) for body in bodies]
    from kvserve_plugins.kernels.digest import piece_hashes

    return piece_hashes(bodies)


def settings(rank: int, cpu: bool) -> str:
    """What a process needs before it uses NCCL; returns its device."""
    if cpu:
        return "cpu"
    gpus = torch.cuda.device_count()
    if gpus < 2:
        os.environ |= {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket"}
    device = f"cuda:{rank % gpus}"
    torch.cuda.set_device(device)
    return device


def made(cpu: bool, **more: Any) -> Nccl:
    return Nccl(Nccl.Config(backend="gloo" if cpu else "nccl", heartbeat=BEAT_S, join_timeout=20, **more))


def produce(pipe: Connection, cpu: bool) -> None:
    """A producer in a process of its own: all segments under ``t``, half of them under ``h``."""
    transport, whole, half = made(cpu), Bodies(settings(0, cpu)), Source(COUNT, SIZE)
    half.sealed, half._ready = whole.sealed, set(range(COUNT // 2))
    address = transport.publish("t", whole, 600)
    transport.publish("h", half, 600)
    pipe.send(address)
    pipe.recv()
    transport.close()


@contextmanager
def producer(cpu: bool) -> Iterator[Remote]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=produce, args=(theirs, cpu), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Remote(process, ours.recv(), ours)
        if process.is_alive():
            ours.send("stop")
            process.join(10)
    finally:
        process.kill()
        process.join()
