"""Memory that two processes of a host share, as ``cuda_ipc`` needs it, without a GPU: POSIX shared memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import torch
from torch import Tensor

from kvserve_core.bodies import Body, host_bytes, piece_hashes
from kvserve_core.errors import TransportError
from kvserve_core.wire import Codebook, Segment
from kvserve_plugins.transports._lending import Memory, Place
from kvserve_plugins.transports.cuda_ipc import CudaIpc
from plugins.transport_checks import Source, soon, want

MIB = 2**20


class HostMemory:
    """Counts what is copied in and what is mapped, so that tests can see what is there and what is let go."""

    def __init__(self) -> None:
        self.made: dict[int, SharedMemory] = {}
        self.mapped: dict[bytes, SharedMemory] = {}
        self.laid = 0

    def allocate(self, nbytes: int, like: Body) -> tuple[Tensor, bytes]:
        shared = SharedMemory(create=True, size=nbytes)
        room = torch.frombuffer(shared.buf, dtype=torch.uint8)
        self.made[room.data_ptr()] = shared
        return room, shared.name.encode()

    def free(self, room: Tensor) -> None:
        self.made[room.data_ptr()].unlink()  # stays mapped here: tensors may still point to it

    def put(self, room: Tensor, body: Body) -> None:
        room.copy_(torch.frombuffer(bytearray(host_bytes(body)), dtype=torch.uint8))
        self.laid += 1

    def take(self, handle: bytes, nbytes: int, places: Sequence[Place]) -> list[tuple[Tensor, bytes]]:
        if handle not in self.mapped:
            try:
                self.mapped[handle] = SharedMemory(handle.decode())
            except FileNotFoundError as error:
                raise TransportError(f"no memory {handle!r}") from error
        bodies = [bytearray(self.mapped[handle].buf[at : at + size]) for at, size in places]
        return [(torch.frombuffer(body, dtype=torch.uint8), piece_hashes(body)) for body in bodies]

    def forget(self, handle: bytes) -> None:
        self.mapped.pop(handle, None)

    def close(self) -> None:
        self.mapped.clear()


class HostIpc(CudaIpc):
    """``cuda_ipc`` over host memory."""

    def _memory(self) -> Memory:
        return HostMemory()

    def piece_hashes(self, bodies: Any) -> list[bytes]:
        return [piece_hashes(host_bytes(body)) for body in bodies]


def made(**config: Any) -> HostIpc:
    """With little memory, so that places are used again."""
    return HostIpc(HostIpc.Config(**({"staging": MIB, "heartbeat": 0.2} | config)))


class OnDevice(Source):
    """Bodies are tensors, as an encoder on a GPU leaves them."""

    def __init__(self, count: int = 6, size: int = 64_000) -> None:
        super().__init__(count, size)
        book = Codebook(self.header)
        bodies = [torch.randint(0, 256, (size,), dtype=torch.uint8) for _ in range(count)]
        self.sealed = [book.seal(Segment(i, at, 0, b"m", bodies[i])) for i, at in enumerate(self.plan)]


def consume(address: str, pipe: Connection) -> None:
    source = OnDevice(40, 64_000)
    transport = made()
    delivery = transport.fetch(address, "t", want(source.plan), soon())
    got = iter(delivery)
    next(got)
    pipe.send(True)
    time.sleep(60)


def produce(pipe: Connection) -> None:
    source = OnDevice(4, 64_000)
    source._ready.clear()
    transport = made()
    pipe.send(transport.publish("t", source, 60))
    source.finish(0)
    pipe.recv()
