"""Goodput of the ``tcp`` transport on loopback against bare pyzmq (DEALER/ROUTER, 1 MiB frames, no copies).

Both move the same bytes between two processes, in turn within each round, and hand the receiver whole buffers, of
which it keeps the last four without looking into them. What ``tcp`` adds is in its figure: typed messages, selection,
credit, leases, the puller threads, reassembly and limits. A round is one transfer of 256 MiB; ``--segments 64 --repeat
4`` moves the same bytes in four, where opening each (about half a millisecond on loopback) weighs more. Verifying
digests is the session's work and in neither figure.

glibc gives freed megabytes back to the system or keeps them, depending on the layout of the heap; either way of
receiving runs at 4 or at 6 GB/s by that alone. So the allocator is told to keep them, for both; see ``--no-pin``. What
remains of such luck stays with a process for its life, so all of them are started anew several times.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sized
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection

import zmq

from kvserve_core.peer import PeerInfo
from kvserve_core.spec import Region, Shard
from kvserve_core.transport import Selection
from kvserve_core.wire import ChainInfo, FrameHeader, Sealed, tables
from kvserve_plugins.transports.tcp import Tcp

FRAME = 2**20
BAR = 0.80
HELD = 4
"""Buffers alive at a time on either side: a consumer decodes batches of 4 MiB."""
PINNED = {"MALLOC_TRIM_THRESHOLD_": "1000000000", "MALLOC_MMAP_THRESHOLD_": "33554432", "MALLOC_TOP_PAD_": "67108864"}
SHARD = Shard((0,))
PEER = PeerInfo((1, 1), {"quantizer:identity": (1,), "codec:raw": (1,)}, "cpu", "f", SHARD)


class Source:
    """``count`` segments of 1 MiB, ready from the start."""

    complete = True

    def __init__(self, count: int) -> None:
        self.plan = [Region(0, "k", (0,), (0,), i * 256, (i + 1) * 256) for i in range(count)]
        chains = (ChainInfo(("quantizer:identity@1", "codec:raw@1"), "{}"),)
        self.header = FrameHeader(
            "t", "f", "raw", 256 * count, count, count * FRAME, 0, SHARD, chains, *tables(self.plan)
        )
        self._body = [os.urandom(FRAME) for _ in range(count)]

    def get(self, index: int, deadline: float) -> Sealed:
        return Sealed(index, bytes(128), self._body[index])

    def close(self, reason: str) -> None:
        """Nothing waits."""


def serve_tcp(pipe: Connection, count: int) -> None:
    transport = Tcp(Tcp.Config())
    pipe.send(transport.publish("t", Source(count), 3600.0))
    pipe.recv()
    transport.close()


def serve_bare(pipe: Connection, count: int) -> None:
    frames = [os.urandom(FRAME) for _ in range(count)]
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger, router.sndhwm = 0, 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        pipe.send(f"tcp://127.0.0.1:{port}")
        while True:
            owner, order = router.recv_multipart()
            if order == b"stop":
                return
            for frame in frames:
                router.send(owner, zmq.SNDMORE)
                router.send(frame, copy=False)


def fetch_tcp(transport: Tcp, address: str, regions: tuple[Region, ...]) -> int:
    delivery = transport.fetch(address, "t", Selection(regions, PEER), time.monotonic() + 60)
    return held(sealed.body for sealed in delivery)


def fetch_bare(socket: zmq.Socket[bytes], count: int) -> int:
    socket.send(b"go")
    return held(socket.recv(copy=False) for _ in range(count))


def held(buffers: Iterable[Sized]) -> int:
    """Bytes of all; each is kept until HELD more have come."""
    kept: deque[Sized] = deque(maxlen=HELD)
    total = 0
    for buffer in buffers:
        kept.append(buffer)
        total += len(buffer)
    return total


def timed(fetch: Callable[[], int], expected: int, repeat: int) -> float:
    """Bytes per second over ``repeat`` fetches."""
    start = time.perf_counter()
    got = sum(fetch() for _ in range(repeat))
    seconds = time.perf_counter() - start
    if got != expected * repeat:
        raise SystemExit(f"{got} bytes came, expected {expected * repeat}")
    return got / seconds


def measure(count: int, rounds: int, repeat: int) -> list[tuple[float, float]]:
    """Bytes per second of ``tcp`` and of bare pyzmq by round, between processes made for this call."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for target in (serve_tcp, serve_bare):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=target, args=(theirs, count), daemon=True))
        processes[-1].start()
        pipes.append(ours)
    tcp_address, bare_address = (pipe.recv() for pipe in pipes)
    transport, regions = Tcp(Tcp.Config()), (Region(0, "k", (0,), (0,), 0, 256 * count),)
    pairs = []
    with zmq.Context() as zcontext, zcontext.socket(zmq.DEALER) as socket:
        socket.linger, socket.rcvhwm = 1000, 0
        socket.connect(bare_address)
        ways = [lambda: fetch_tcp(transport, tcp_address, regions), lambda: fetch_bare(socket, count)]
        for n in range(rounds + 1):
            order = (0, 1) if n % 2 else (1, 0)
            speeds = {i: timed(ways[i], count * FRAME, repeat) for i in order}
            pairs.append((speeds[0], speeds[1]))
        socket.send(b"stop")
    pipes[0].send("stop")
    transport.close()
    for process in processes:
        process.join(10)
    return pairs[1:]


def measure_afresh(starts: int, *args: int) -> list[tuple[float, float]]:
    """``measure`` in new processes each time, the consumer's included."""
    pairs = []
    for _ in range(starts):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            pairs += pool.submit(measure, *args).result()
    return pairs


def report(pairs: list[tuple[float, float]], count: int, repeat: int) -> dict[str, object]:
    ratio = statistics.median(ours / bare for ours, bare in pairs)
    return {
        "bars": [{"name": "tcp_goodput_vs_bare_pyzmq", "value": round(ratio, 3), "bar": BAR, "ok": ratio >= BAR}],
        "what": "median over rounds of tcp's bytes/s over bare pyzmq's; loopback, two processes, 1 MiB frames",
        "tcp_bytes_per_s": round(statistics.median(ours for ours, _ in pairs)),
        "bare_bytes_per_s": round(statistics.median(bare for _, bare in pairs)),
        "ratios": [round(ours / bare, 3) for ours, bare in pairs],
        "bytes_per_round": count * FRAME * repeat,
        "allocator_pinned": "MALLOC_TOP_PAD_" in os.environ,
        "machine": {"cpus": os.cpu_count(), "arch": platform.machine(), "system": platform.system()},
        "versions": {"python": platform.python_version(), "pyzmq": zmq.__version__, "libzmq": zmq.zmq_version()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--segments", type=int, default=256, help="1 MiB segments in the transfer")
    parser.add_argument("--rounds", type=int, default=7, help="of each start")
    parser.add_argument("--starts", type=int, default=7, help="of all processes anew")
    parser.add_argument("--repeat", type=int, default=1, help="fetches timed together")
    parser.add_argument("--no-pin", action="store_true", help="leave the allocator as it is")
    given = parser.parse_args()
    if not given.no_pin and os.environ.get("MALLOC_TOP_PAD_") is None:
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | PINNED)  # glibc reads them at start only
    pairs = measure_afresh(given.starts, given.segments, given.rounds, given.repeat)
    result = report(pairs, given.segments, given.repeat)
    bar = result["bars"][0]  # type: ignore[index]  # the list made above
    print(json.dumps(result, indent=2) if given.json else f"{bar['name']}: {bar['value']} (bar {bar['bar']})")
    return 0 if bar["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
