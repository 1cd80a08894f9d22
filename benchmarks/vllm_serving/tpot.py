"""How much a running answer slows down while other requests fetch."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil

from vllm_servers import Process, processes
from vllm_serving.clients import Clients

FETCHERS = 4
RESTING_CORES = 0.1


def measure_tpot(clients: Clients, prefill: Process, link: str, rounds: int) -> dict[str, Any]:
    """Gaps between the tokens of one answer while others fetch, over those while none does, round by round."""
    rested(clients.decode)
    gaps: dict[str, list[list[float]]] = {"quiet": [], "kvserve": [], "raw": []}
    profiles: list[str] = []
    for _ in range(rounds):
        gaps["quiet"].append(_tpot(clients, []))
        for way in ("kvserve", "raw"):
            peer = clients.known(link, raw=way == "raw")
            waiting = [(p, clients.offered(prefill, p, peer)) for p in itertools.islice(clients.prompts, FETCHERS)]
            profiles += [params["kvserve"]["locator"]["profile"] for _, params in waiting if way == "kvserve"]
            rested(prefill)
            gaps[way].append(_tpot(clients, waiting))
    return {
        "tpot_s": {way: round(statistics.median(itertools.chain(*each)), 5) for way, each in gaps.items()},
        "ratio": {way: _ratio(gaps[way], gaps["quiet"], statistics.median) for way in ("kvserve", "raw")},
        "ratio_of_means": {way: _ratio(gaps[way], gaps["quiet"], statistics.mean) for way in ("kvserve", "raw")},
        "profiles": {name: profiles.count(name) for name in sorted(set(profiles))},
        "gaps": {way: sum(map(len, each)) for way, each in gaps.items()},
        "fetches_at_once": FETCHERS,
    }


def _ratio(
    busy: Sequence[Sequence[float]], quiet: Sequence[Sequence[float]], of: Callable[[Sequence[float]], float]
) -> float:
    """Median over rounds of a round's median, or mean, over that of the same round without fetches."""
    return round(statistics.median(of(b) / of(q) for b, q in zip(busy, quiet, strict=True)), 4)


def rested(server: Process) -> None:
    """Wait until its engine has prefilled and encoded: here it has the decode server's cores, in service its own."""
    before = _cpu_s(server)
    while True:
        time.sleep(1.0)
        now = _cpu_s(server)
        if now - before < RESTING_CORES:
            return
        before = now


def _cpu_s(server: Process) -> float:
    """CPU seconds that its processes have used."""
    times = [psutil.Process(pid).cpu_times() for pid in processes(server.popen.pid)]
    return sum(each.user + each.system for each in times)


def _tpot(clients: Clients, waiting: Sequence[tuple[list[int], Mapping[str, Any]]]) -> list[float]:
    """Gaps of a running answer from its fifth token on, until its end or until the first fetch is through."""
    first: list[float] = []
    started = time.perf_counter()

    def fetch(prompt: list[int], params: Mapping[str, Any]) -> None:
        clients.gaps(prompt, 1, params)
        first.append(time.perf_counter() - started)

    threads = [threading.Thread(target=fetch, args=each) for each in waiting]
    for thread in threads:
        thread.start()
    times = clients.gaps(next(clients.prompts)[:64], 64)
    for thread in threads:
        thread.join()
    until = min(first, default=times[-1])
    kept = [t for t in times if t <= until][4:]
    return [b - a for a, b in itertools.pairwise(kept)]
