"""An engine's paged cache on a GPU, and a run in which everybody overwrites blocks as early as the sessions allow."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvserve_core import DType, KVSpec, LayerGroup, Pipeline, PlanePart, PlaneSpec
from kvserve_core.decoder import Decoder
from kvserve_core.policy import Decision, ServiceContext
from kvserve_core.registry import default_registry
from kvserve_core.session import Consumer, Freed, Loaded, Producer
from kvserve_core.spec import Region, whole
from kvserve_core.transport import Locator, Transport

PAGE, LAYERS, HEADS, DIM = 16, 4, 4, 128
KV = KVSpec(
    "paged",
    (
        LayerGroup(
            0, tuple(range(LAYERS)), tuple(PlaneSpec(n, HEADS, (PlanePart(n, DIM),), DType.BF16) for n in ("k", "v"))
        ),
    ),
)
CUDA = torch.device("cuda")


class PagedEngine:
    """``cache[layer, block, token, head, K then V]``, blocks by request."""

    def __init__(self, blocks: int) -> None:
        self.cache = torch.zeros((LAYERS, blocks, PAGE, HEADS, 2 * DIM), dtype=torch.bfloat16, device=CUDA)
        self.blocks: dict[str, Tensor] = {}

    def allocate(self, name: str, tokens: int) -> Tensor:
        """Blocks in any order."""
        self.blocks[name] = torch.randperm(self.cache.shape[1], device=CUDA)[: tokens // PAGE]
        return self.blocks[name]

    def gather(self, name: str, at: Region) -> Tensor:
        """``Gather``."""
        pages = self.cache[at.layers[0] : at.layers[-1] + 1][:, self.blocks[name][at.start // PAGE : at.stop // PAGE]]
        return pages[..., _half(at)].flatten(1, 2).transpose(1, 2)[:, list(at.heads)].contiguous()

    def scatter(self, name: str, at: Region, x: Tensor) -> None:
        """``Scatter``, of all heads."""
        pages = self.blocks[name][at.start // PAGE : at.stop // PAGE]
        for layer, values in zip(at.layers, x, strict=True):
            self.cache[layer, pages, :, :, _half(at)] = values.transpose(0, 1).unflatten(0, (len(pages), PAGE))


def _half(at: Region) -> slice:
    return slice(0, DIM) if at.plane == "k" else slice(DIM, 2 * DIM)


class Adversary:
    """Both sides of transfers in one process, each on a stream of its own that never waits for the sessions'."""

    def __init__(self, chain: dict[str, Any], tokens: int, batch_bytes: int, sms: int = 0) -> None:
        self.tokens = tokens
        self.prefill, self.decode = PagedEngine(2 * tokens // PAGE), PagedEngine(2 * tokens // PAGE)
        self.pipeline = Pipeline.build(
            {"planes": {"*": chain}, "layer_block": 2, "sink_tokens": 0}, KV, whole(KV), CUDA
        )
        self.transport: Transport = default_registry().create("transport", "memory")
        sizes = {"batch_bytes": batch_bytes, "sms": sms}
        self.producer = Producer({"p": self.pipeline}, self.transport, self.prefill.gather, **sizes)
        self.consumer = Consumer(KV, whole(KV), lambda _: self.transport, self.decode.scatter, device=CUDA, **sizes)
        self._decoder: Decoder | None = None
        self._streams = [torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Stream()]

    def run(self, name: str, early: bool = False) -> bool:
        """One transfer; whether what arrived is what was there. early: overwrite before Freed, as nobody may."""
        writer, reader, other = self._streams
        with torch.cuda.stream(writer):
            mine = self.prefill.allocate(name, self.tokens)
            torch.cuda._sleep(2_000_000)  # about a millisecond: who does not wait for the event reads old values
            self.prefill.cache[:, mine] = torch.randn_like(self.prefill.cache[:, mine])
            there = self.prefill.cache[:, mine].clone()
            written = writer.record_event()
        endpoint = self.producer.open(name, self.tokens, Decision("p", "test", ServiceContext(nbytes=0), 1e9))
        self.producer.ready(name, range(self.tokens), written)
        if not early:
            until(self.producer.poll, Freed)
        with torch.cuda.stream(writer):
            self.prefill.cache[:, mine] = 1000.0
        with torch.cuda.stream(reader):
            into = self.decode.allocate(name, self.tokens)
            torch.cuda._sleep(2_000_000)
            self.decode.cache[:, into] = -1000.0  # a step that was queued before: who does not wait is overwritten
            locator = Locator(name, self.tokens, (endpoint,), "p")
            self.consumer.fetch(locator, range(self.tokens), time.monotonic() + 60)
        until(self.consumer.poll, Loaded)
        with torch.cuda.stream(other):
            arrived = self.decode.cache[:, into].clone()
        torch.cuda.synchronize()
        return torch.equal(arrived, self._expected(name, there))

    def _expected(self, name: str, there: Tensor) -> Tensor:
        """What the same chain makes of the values, without sessions."""
        engine = PagedEngine(self.tokens // PAGE)
        engine.cache, engine.blocks[name] = there, torch.arange(self.tokens // PAGE, device=CUDA)
        header, planned = self.pipeline.header(name, self.tokens, "p")
        segments = self.pipeline.encode([(p, engine.gather(name, p.at)) for p in planned])
        engine.cache = torch.empty_like(there)
        self._decoder = self._decoder or Decoder(header, KV, CUDA)
        for at, x in self._decoder.decode(segments):
            engine.scatter(name, at, x)
        torch.cuda.synchronize()
        return engine.cache

    def close(self) -> None:
        """Both sessions and the transport."""
        self.consumer.close()
        self.producer.close()
        self.transport.close()


def until(poll: Callable[[], Sequence[object]], kind: type, seconds: float = 60.0, pause: float = 2e-5) -> None:
    """Wait for an event of a kind, and return at once; the sessions' threads need the interpreter in the meantime."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for event in poll():
            if isinstance(event, kind):
                return
            if type(event).__name__ in ("Failed", "LoadFailed"):
                raise AssertionError(event)
        time.sleep(pause)
    raise AssertionError(f"no {kind.__name__} within {seconds} s")
