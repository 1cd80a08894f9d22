"""Built-in transports and stores. Imports no torch and no zmq."""

from __future__ import annotations

from collections.abc import Iterator

from kvserve_core.component import Component
from kvserve_core.hookspecs import hookimpl


@hookimpl
def kvserve_transports() -> Iterator[Component]:
    """The built-in transports."""
    here = "kvserve_plugins.transports"
    yield Component("memory", f"{here}.memory:Memory", "Inside one process: for tests and for engines that share it.")
    yield Component("file", f"{here}.file:File", "A folder as a store: atomic publish, bounded size, LRU eviction.")
    yield Component(
        "tcp",
        f"{here}.tcp:Tcp",
        "Pull over TCP with ZeroMQ: leases, flow control, CURVE keys, bandwidth limit.",
        requires=("zmq",),
        extra="pyzmq",
    )
    yield Component(
        "cuda_ipc",
        f"{here}.cuda_ipc:CudaIpc",
        "Between processes of one host through GPU memory, over a link of any bandwidth.",
        requires=("zmq", "triton"),
        needs=("cuda",),
        extra="pyzmq and a CUDA build of torch",
    )
    yield Component(
        "nccl",
        f"{here}.nccl:Nccl",
        "Between two GPUs, of one host or two: requests over ZeroMQ, bodies over NCCL.",
        requires=("zmq",),
        extra="pyzmq and a CUDA build of torch",
    )
