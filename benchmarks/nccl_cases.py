"""The cases of ``gpu_nccl.py``."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from nccl_sides import COUNT, SIZE, Bodies, made

from kvserve_core.errors import KVServeError, PeerLost, TransferCancelled, TransferTimeout, TransportError
from kvserve_core.wire import Codebook
from kvserve_plugins.transports import _nccl_library as library
from kvserve_plugins.transports._nccl_cuda import join, settle
from kvserve_plugins.transports.nccl import Nccl
from plugins.transport_checks import Remote, Source, soon, want


def arrived(transport: Nccl, there: Remote, source: Bodies, key: str = "t") -> tuple[list[Any], Any]:
    delivery = transport.fetch(there.address, key, want(source.plan), soon(120))
    return list(delivery), delivery.stats


def equal(got: list[Any], source: Bodies) -> bool:
    book = Codebook(source.header)
    bodies = {s.index: book.unseal(s).body for s in got}
    tensors = [b if isinstance(b, torch.Tensor) else torch.frombuffer(bytearray(b), dtype=torch.uint8)
               for _, b in sorted(bodies.items())]  # fmt: skip
    return len(tensors) == COUNT and all(torch.equal(t, s.body) for t, s in zip(tensors, source.sealed, strict=True))


def fetches(transport: Nccl, there: Remote, source: Bodies) -> dict[str, Any]:
    """All segments, again and again, on one pair."""
    t0 = time.perf_counter()
    got, _ = arrived(transport, there, source)
    out: dict[str, Any] = {"first_fetch_s": round(time.perf_counter() - t0, 3), "equal": equal(got, source)}
    del got
    rates, walls = [], []
    for _ in range(5):
        t0 = time.perf_counter()
        got, stats = arrived(transport, there, source)
        walls.append(stats.nbytes / (time.perf_counter() - t0) / 1e9)
        rates.append(stats.nbytes / stats.link_s / 1e9)
        out["equal"] &= equal(got, source)
        del got
    pairs = len(transport._pool._pairs)
    return out | {
        "gbs": round(statistics.median(walls), 3),
        "link_gbs": round(statistics.median(rates), 3),
        "pairs": pairs,
    }


def device_copy() -> float:
    """GB/s of a copy of as many bytes, from one GPU to the other, or within the one there is."""
    far = torch.empty(COUNT * SIZE, dtype=torch.uint8, device=f"cuda:{0}")
    near = torch.empty(COUNT * SIZE, dtype=torch.uint8, device=f"cuda:{torch.cuda.device_count() - 1}")
    times = []
    for _ in range(8):
        torch.cuda.synchronize(near.device)
        t0 = time.perf_counter()
        near.copy_(far)
        torch.cuda.synchronize(near.device)
        times.append(time.perf_counter() - t0)
    return COUNT * SIZE / statistics.median(times[1:]) / 1e9


def given_up(transport: Nccl, there: Remote, source: Bodies) -> dict[str, Any]:
    """Fetches closed at several moments; the pair is not made anew."""
    (pair,) = transport._pool._pairs.values()
    closed = 0
    for taken in (0, 1, 5):
        delivery = transport.fetch(there.address, "t", want(source.plan), soon(60))
        got = iter(delivery)
        for _ in range(taken):
            next(got)
        delivery.close()
        closed += isinstance(seconds_to(TransferCancelled, lambda: list(got)), float)  # noqa: B023  # called here
    again, _ = arrived(transport, there, source)
    same = list(transport._pool._pairs.values()) == [pair]
    return {"closed": closed, "same_pair": same, "equal": equal(again, source)}


def seconds_to(error: type[KVServeError], call: Callable[[], object]) -> float | str:
    t0 = time.perf_counter()
    try:
        call()
    except error:
        return round(time.perf_counter() - t0, 3)
    except Exception as other:  # noqa: BLE001  # told in the result
        return f"{type(other).__name__}: {other}"[:300]
    return "nothing was raised"


def killed_in_a_fetch(transport: Nccl, there: Remote, source: Bodies) -> dict[str, Any]:
    """The producer dies when half of a fetch has come."""
    got = iter(transport.fetch(there.address, "h", want(source.plan), soon(120)))
    taken = [next(got) for _ in range(COUNT // 2)]
    there.process.kill()
    lost_after_s = seconds_to(PeerLost, lambda: next(got))
    there.process.join()
    return {"taken": len(taken), "lost_after_s": lost_after_s}


def killed_in_the_library(transport: Nccl, there: Remote, source: Bodies) -> dict[str, Any]:
    """It is stopped, so that a posted batch waits for it inside NCCL, and then killed."""
    arrived(transport, there, source)
    pair = transport._pool._pairs[next(reversed(transport._pool._pairs))]
    os.kill(there.process.pid, signal.SIGSTOP)
    job = pair.take(b"t" * 16, [SIZE] * 4)
    stuck = not job.done.wait(1.0)
    there.process.kill()

    def wait() -> None:
        while not job.done.wait(0.02):
            pair.look()
        if job.error is not None:
            raise job.error

    out = {"stuck": stuck, "lost_after_s": seconds_to(PeerLost, wait)}
    there.process.join()
    t0 = time.perf_counter()
    while not pair.channel.gone and time.perf_counter() - t0 < 10:
        time.sleep(0.01)
    return out | {"thread_ended": pair.channel.gone, "then_s": round(time.perf_counter() - t0, 3)}


def after(transport: Nccl, there: Remote, source: Bodies, device: str) -> dict[str, Any]:
    """Another producer, in the same process."""
    return {"equal": equal(arrived(transport, there, source)[0], source), "usable": usable(device)}


def usable(device: str) -> bool:
    """Whether this process still computes."""
    x = torch.randn(256, 256, device=device)
    return bool(torch.isfinite(x @ x).all())


def nobody_comes(device: str) -> dict[str, Any]:
    """A rank whose peer never joins gives up; closing meanwhile works too."""

    def alone(timeout_s: float, check: Callable[[], None] = lambda: None) -> None:
        join(library.unique_id(), 0, torch.device(device), timeout_s, None, check)

    def closed() -> None:
        if time.perf_counter() - t0 > 0.5:
            raise TransferCancelled("closed")

    late = seconds_to(TransferTimeout, lambda: alone(2.0))
    t0 = time.perf_counter()
    return {"timed_out_after_s": late, "closed_after_s": seconds_to(TransferCancelled, lambda: alone(60, closed))}


def loopback(device: str) -> dict[str, Any]:
    """One rank that sends to itself, all segments in one group: the calls by themselves."""
    handle = library.Handle(library.unique_id(), 0, 1, None)
    settle(handle, lambda: None)
    sent = [torch.randint(0, 256, (SIZE,), dtype=torch.uint8, device=device) for _ in range(COUNT)]
    into = [torch.empty_like(body) for body in sent]
    stream, times = torch.cuda.Stream(), []
    for _ in range(6):
        torch.cuda.synchronize()
        t0 = time.perf_counter()
        handle.move(sent, into, 0, stream.cuda_stream)
        settle(handle, lambda: None)
        stream.synchronize()
        times.append(time.perf_counter() - t0)
    same = all(torch.equal(a, b) for a, b in zip(sent, into, strict=True))
    handle.abort()
    return {"equal": same, "gbs": round(COUNT * SIZE / statistics.median(times[1:]) / 1e9, 1)}


def one_gpu_for_both(device: str) -> dict[str, Any]:
    """Two sides on one GPU hear at once what to use."""
    here, there = made(False), made(False)
    address = there.publish("t", Source(), 60)
    try:
        list(here.fetch(address, "t", want(Source().plan), soon(30)))
        said = "nothing was raised"
    except TransportError as error:
        said = str(error)
    here.close()
    there.close()
    return {"said": said, "ok": "use 'cuda_ipc'" in said}
