"""The two sides of ``gpu_breakeven.py``: a producer in a process of its own, a consumer here, ``cuda_ipc`` between.

Caches are paged as vLLM lays them out and copied by its adapter's kernels. On a CPU host memory stands in for a GPU's.
"""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

sys.path.append(str(Path(__file__).parents[1] / "tests"))
sys.path.append(str(Path(__file__).parents[1] / "adapters/vllm"))

import torch
from breakeven_model import Stamps

from kvserve_core.pipeline import Pipeline
from kvserve_core.policy import Decision, Outcome, ServiceContext
from kvserve_core.session import Consumer, Loaded, Producer
from kvserve_core.session.source import Source
from kvserve_core.spec import DType, KVSpec, LayerGroup, PlanePart, PlaneSpec, Region, whole
from kvserve_core.transport import Locator
from kvserve_plugins.transports._pacing import Pacer
from kvserve_plugins.transports.cuda_ipc import CudaIpc
from kvserve_vllm.placement import LayerCache, Placement

PAGE = 16
WAIT_S = 60.0


@dataclass(frozen=True)
class Setup:
    """What both sides agree on. specs: pipelines by profile. batch_bytes: as a deployment's ``gpu.batch_bytes``."""

    device: str
    layers: int
    heads: int
    dim: int
    tokens: int
    specs: Mapping[str, Any]
    batch_bytes: int

    def kv(self) -> KVSpec:
        """One group of layers, bf16."""
        planes = tuple(PlaneSpec(n, self.heads, (PlanePart(n, self.dim),), DType.BF16) for n in ("k", "v"))
        return KVSpec("breakeven", (LayerGroup(0, tuple(range(self.layers)), planes),))

    def transport(self) -> CudaIpc:
        """``cuda_ipc``; on a CPU the same over POSIX shared memory."""
        if self.device == "cuda":
            return CudaIpc(CudaIpc.Config())
        from plugins.shared_memory import HostIpc

        return HostIpc(HostIpc.Config())


class Cache:
    """Blocks in a random order, filled with the same normal values on both sides."""

    def __init__(self, setup: Setup, filled: bool) -> None:
        shape = (1 + setup.tokens // PAGE, setup.heads, PAGE, 2 * setup.dim)
        draw = torch.Generator(setup.device).manual_seed(7)
        caches = {}
        self.flat = torch.zeros(setup.layers, *shape, dtype=torch.bfloat16, device=setup.device)
        for layer, one in enumerate(self.flat):
            if filled:
                one.normal_(generator=draw)
            views = {"k": one[..., : setup.dim], "v": one[..., setup.dim :]}
            caches[layer] = LayerCache(str(layer), 0, PAGE, views)
        order = torch.randperm(setup.tokens // PAGE, generator=torch.Generator().manual_seed(1))
        self.blocks = [(order + 1).tolist()]  # block 0 is vLLM's null block
        self.placed = Placement(setup.kv(), whole(setup.kv()), caches)

    def gather(self, _: str, at: Region) -> torch.Tensor:
        """``Gather``."""
        return self.placed.gather(self.blocks, at)

    def scatter(self, _: str, at: Region, x: torch.Tensor) -> None:
        """``Scatter``."""
        self.placed.scatter(self.blocks, at, x)


class Serving:
    """The producer's side: transfers as it is told to through a pipe."""

    def __init__(self, pipe: Connection, setup: Setup) -> None:
        self._pipe, kv = pipe, setup.kv()
        pipelines = {n: Pipeline.build(s, kv, whole(kv), torch.device(setup.device)) for n, s in setup.specs.items()}
        self._transport = setup.transport()
        self._producer = Producer(
            pipelines, self._transport, Cache(setup, True).gather, batch_bytes=setup.batch_bytes, lease_s=WAIT_S,
            published_bytes_max=16 * 2**30,
        )  # fmt: skip
        _ = self._transport.address  # the server comes up
        self._sender: Any = cast(Any, self._transport._server)._sender
        self._opened = threading.Event()
        self._serve, self._sender.add = self._sender.add, self._added

    def run(self) -> None:
        """Until the other side closes."""
        while (told := self._pipe.recv()) is not None:
            self._pipe.send(self._transfer(*told))
        self._producer.close()
        self._transport.close()

    def _transfer(self, name: str, profile: str, tokens: int, rate: float | None) -> tuple[float, float, int]:
        """The fetch waits for segments when the tokens become ready, as one that was asked for in time does."""
        self._sender._pacer = Pacer(rate)
        self._opened.clear()
        endpoint = self._producer.open(name, tokens, Decision(profile, "", ServiceContext(nbytes=0), 1e12))
        source = self._producer._sources[name]
        self._pipe.send(endpoint)
        if not self._opened.wait(WAIT_S):
            raise RuntimeError(f"{name} was not fetched within {WAIT_S} s")
        began = time.monotonic()
        self._producer.ready(name, range(tokens))
        self._pipe.recv()  # loaded: until then this thread wants nothing of the interpreter
        _until(self._producer.poll, Outcome)
        return began, _encoded_at.pop(name) - began, source.wire_bytes

    def _added(self, stream: Any) -> None:
        self._serve(stream)
        self._opened.set()


_encoded_at: dict[str, float] = {}
"""When the last batch of each transfer came."""


def _stamped(add: Callable[..., None]) -> Callable[..., None]:
    def added(source: Source, *batch: Any) -> None:
        _encoded_at[source.transfer_id] = time.monotonic()
        add(source, *batch)

    return added


def serve(pipe: Connection, setup: Setup) -> None:
    """The process of the producer."""
    torch.set_num_threads(1)
    cast(Any, Source).add = _stamped(Source.add)  # of the class: an object that holds its own method is freed late
    Serving(pipe, setup).run()


class Sides:
    """Both sides; transfers one at a time."""

    def __init__(self, setup: Setup, pipe: Connection) -> None:
        self.setup, self._pipe, self._count = setup, pipe, 0
        self.cache = Cache(setup, False)
        kv, self.transport = setup.kv(), setup.transport()
        self.consumer = Consumer(
            kv, whole(kv), lambda _: self.transport, self.cache.scatter, device=torch.device(setup.device),
            batch_bytes=setup.batch_bytes, threads=1,
        )  # fmt: skip

    def transfer(self, profile: str, tokens: int, rate: float | None) -> Stamps:
        """One transfer over a link of ``rate`` bytes/s."""
        self._count += 1
        name = f"t{self._count}"
        self._pipe.send((name, profile, tokens, rate))
        locator = Locator(name, tokens, (self._pipe.recv(),), profile)
        self.consumer.fetch(locator, range(tokens), time.monotonic() + WAIT_S)
        self.consumer.wait(WAIT_S)
        loaded = time.monotonic()
        (event,) = self.consumer.poll()
        if not isinstance(event, Loaded):
            raise RuntimeError(f"{name}: {event}")
        self._pipe.send("loaded")
        began, encode_s, wire_bytes = self._pipe.recv()
        return Stamps(loaded - began, encode_s, wire_bytes, event.outcome.raw_bytes)

    def error(self, profile: str, tokens: int) -> float:
        """Relative error of what arrives of fresh blocks; 0 only where every element is equal."""
        self.cache.flat.zero_()
        self.transfer(profile, tokens, None)
        wanted = Cache(self.setup, True)
        used = torch.tensor(wanted.blocks[0][: tokens // PAGE], device=self.setup.device)
        off = total = 0.0
        for mine, theirs in zip(self.cache.flat, wanted.flat, strict=True):
            a, b = mine[used].float(), theirs[used].float()
            off, total = off + float((a - b).square().sum()), total + float(b.square().sum())
        return (off / total) ** 0.5

    def close(self) -> None:
        """This side; the other one ends by itself then."""
        self._pipe.send(None)
        self.consumer.close()
        self.transport.close()


@contextmanager
def sides(setup: Setup, apart: bool) -> Iterator[Sides]:
    """apart: the producer in a process of its own, else in a thread of this one."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    kind: Any = context.Process if apart else threading.Thread
    other = kind(target=serve, args=(theirs, setup), daemon=True)
    other.start()
    if apart:
        theirs.close()  # so that its end is seen here
    both = Sides(setup, ours)
    try:
        yield both
    finally:
        both.close()
        other.join(WAIT_S)


def _until(poll: Callable[[], Any], kind: type) -> Any:
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        for event in poll():
            if isinstance(event, kind):
                return event
            if type(event).__name__ == "Failed":
                raise RuntimeError(str(event))
        time.sleep(2e-5)
    raise RuntimeError(f"no {kind.__name__} within {WAIT_S} s")
