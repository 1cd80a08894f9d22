"""What the transport tests share: a source of sealed segments, and a producer in a process of its own."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from kvserve_core.bodies import host_bytes
from kvserve_core.errors import PeerLost, TransferTimeout
from kvserve_core.peer import PeerInfo
from kvserve_core.spec import Region, Shard
from kvserve_core.transport import Selection, Transport
from kvserve_core.wire import ChainInfo, Codebook, FrameHeader, Sealed, Segment, tables

SHARD = Shard((0, 1))
FINGERPRINT = "f" * 64
STAGES = ("quantizer:identity@1", "codec:raw@1")
PEER = PeerInfo((1, 1), {"quantizer:identity": (1,), "codec:raw": (1,)}, "cpu", FINGERPRINT, SHARD)
LONG = 20.0


def region(index: int) -> Region:
    """Segment ``index``: cell ``index // 2`` of layer ``index % 2``."""
    cell = index // 2
    return Region(0, "k", (index % 2,), (0,), cell * 256, cell * 256 + 256)


def want(plan: Sequence[Region], *indices: int, peer: PeerInfo = PEER) -> Selection:
    """The regions of these segments, or all."""
    return Selection(tuple(plan[i] for i in indices) or tuple(plan), peer)


class Source:
    """``count`` segments of ``size`` bytes each, ready at once or when :meth:`finish` says so."""

    def __init__(self, count: int = 6, size: int = 1000, ready: bool = True, key: str = "t", seed: int = 0) -> None:
        self.plan = [region(i) for i in range(count)]
        planes, layers, heads = tables(self.plan)
        self.header = FrameHeader(
            key, FINGERPRINT, "raw", 256 * (count + 1), count, count * size, 7 + seed, SHARD,
            (ChainInfo(STAGES, "{}"),), planes, layers, heads,
        )  # fmt: skip
        book = Codebook(self.header)
        bodies = [(i + seed).to_bytes(8, "little") * (size // 8) for i in range(count)]
        self.sealed = [book.seal(Segment(i, at, 0, b"m", bodies[i])) for i, at in enumerate(self.plan)]
        self.closed: str | None = None
        self._ready = set(range(count)) if ready else set()
        self._changed = threading.Condition()

    @property
    def complete(self) -> bool:
        return len(self._ready) == len(self.plan)

    def finish(self, *indices: int) -> None:
        with self._changed:
            self._ready.update(indices or range(len(self.plan)))
            self._changed.notify_all()

    def get(self, index: int, deadline: float) -> Sealed:
        with self._changed:
            while index not in self._ready:
                if self.closed is not None:
                    raise PeerLost(self.closed)
                if not self._changed.wait(deadline - time.monotonic()):
                    raise TransferTimeout("not ready")
            return self.sealed[index]

    def close(self, reason: str) -> None:
        with self._changed:
            self.closed = self.closed or reason
            self._changed.notify_all()


def soon(seconds: float = LONG) -> float:
    return time.monotonic() + seconds


def same(got: Sealed, expected: Sealed) -> bool:
    return (got.index, bytes(got.head), bytes(host_bytes(got.body))) == (
        expected.index,
        bytes(expected.head),
        bytes(host_bytes(expected.body)),
    )


def check(got: Sequence[Sealed], source: Source, *indices: int) -> None:
    """``got`` is exactly these segments (or all) in any order, and each unseals."""
    expected = indices or range(len(source.plan))
    by_index = {s.index: s for s in got}
    assert len(got) == len(by_index)
    assert sorted(by_index) == sorted(expected)
    book = Codebook(source.header)
    for i, sealed in by_index.items():
        assert same(sealed, source.sealed[i])
        assert book.unseal(sealed).at == source.plan[i]


def settle(condition: Any, seconds: float = 10.0) -> None:
    """Wait until ``condition()``, which must become true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not become true"
        time.sleep(0.005)


def threads() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith(("kvserve-tcp", "kvserve-nccl"))}


class Remote(NamedTuple):
    """A producer in another process."""

    process: Any
    address: str
    pipe: Connection


def _produce(pipe: Connection, kind: str, config: dict[str, Any], source: dict[str, Any], lease_s: float) -> None:
    from kvserve_plugins.transports.nccl import Nccl
    from kvserve_plugins.transports.tcp import Tcp

    cls = {"tcp": Tcp, "nccl": Nccl}[kind]
    transport = cls(cls.Config(**config))
    made = Source(**source)
    pipe.send(transport.publish("t", made, lease_s))
    while (order := pipe.recv()) != "stop":
        if order == "poll":
            pipe.send([(r.key, r.reason, r.reports) for r in transport.poll()])
        else:
            made.finish(*order)
    transport.close()


@contextmanager
def remote_producer(
    config: dict[str, Any] | None = None, lease_s: float = 60.0, kind: str = "tcp", **source: Any
) -> Iterator[Remote]:
    """A producer of one source under the key ``t`` in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_produce, args=(theirs, kind, config or {}, source, lease_s), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Remote(process, ours.recv(), ours)
    finally:
        if process.is_alive():
            ours.send("stop")
            process.join(2)
            process.kill()
        process.join()
        process.close()
        ours.close()


def fetch_all(transport: Transport, address: str, source: Source, *indices: int, seconds: float = LONG) -> list[Sealed]:
    return list(transport.fetch(address, "t", want(source.plan, *indices), soon(seconds)))
