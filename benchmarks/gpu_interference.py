"""A decode step of an engine beside decompression on the same GPU, with and without a budget of multiprocessors."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from gpu import LARGE
from gpu_cases import CUDA, gaussian, pipeline, size_of
from gpu_decode import _decode_step

from kvserve_core.session.lanes import Lane

BUDGETS = (8, 16, 32, 64)


class DecodeSteps:
    """The matrix products of Qwen2.5-7B's decode step, 16 requests at a time, replayed as a CUDA graph.

    28 layers and the output layer, 14.1 GB of weights a step: bound by memory, as decoding is.
    """

    SHAPES = ((3584, 4608), (3584, 3584), (3584, 37888), (18944, 3584))

    def __init__(self, priority: int = 0) -> None:
        self.stream = torch.cuda.Stream(priority=priority)
        weights = [
            [torch.empty(n, k, device=CUDA, dtype=torch.bfloat16).normal_(0, 0.02) for n, k in self.SHAPES]
            for _ in range(28)
        ]
        head = torch.empty(3584, 152064, device=CUDA, dtype=torch.bfloat16).normal_(0, 0.02)
        inputs = {n: torch.randn(16, n, device=CUDA, dtype=torch.bfloat16) for n in (3584, 18944)}
        self._kept = weights, head, inputs
        for _ in range(2):
            self._step()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream):
            self._step()

    def _step(self) -> None:
        weights, head, inputs = self._kept
        for layer in weights:
            for w in layer:
                inputs[w.shape[0]] @ w
        inputs[3584] @ head

    def times(self, steps: int) -> list[float]:
        """Milliseconds from the end of one step to the end of the next."""
        marks = []
        with torch.cuda.stream(self.stream):
            for i in range(steps + 1):
                self.graph.replay()
                marks.append(torch.cuda.Event(enable_timing=True))
                marks[-1].record()
                if i >= 8:
                    marks[i - 8].synchronize()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in pairwise(marks)]


class Background:
    """Decodes the same batch over and over in a thread, on a lane."""

    def __init__(self, lane: Lane, step: Callable[[], object], nbytes: int) -> None:
        self._lane, self._step, self._nbytes = lane, step, nbytes
        self._stop, self.rounds, self.seconds = threading.Event(), 0, 0.0
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        t0 = time.perf_counter()
        while not self._stop.is_set():
            with self._lane.work():
                for _ in range(4):
                    self._step()
            self._lane.wait()
            self.rounds += 4
        self.seconds = time.perf_counter() - t0

    def __enter__(self) -> Background:
        self._thread.start()
        time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def gbs(self) -> float:
        """Original bytes a second."""
        return round(self.rounds * self._nbytes / self.seconds / 1e9, 1)


def interference(chain: dict[str, Any], tokens: int, steps: int, budgets: Sequence[int]) -> dict[str, Any]:
    """Time per output token beside decompression, with each of these budgets; 0: none."""
    made = pipeline(chain, **LARGE)
    batch = gaussian(made, tokens)[:8]
    step, nbytes = _decode_step(made, batch), size_of(batch)
    out: dict[str, Any] = {"decoded_bytes": nbytes}
    engine = DecodeSteps()
    engine.times(20)
    step()  # kernels are compiled and loaded when first used
    torch.cuda.synchronize()
    out["alone"] = alone = _tpot(engine.times(steps))
    for sms in budgets:
        out[f"{sms} sms" if sms else "no budget"] = _beside(engine, sms, step, nbytes, steps, alone)
    if 0 in budgets:
        first = DecodeSteps(-5)
        first.times(20)
        out["no budget, engine of high priority"] = _beside(first, 0, step, nbytes, steps, _tpot(first.times(steps)))
    return out


def _beside(
    engine: DecodeSteps, sms: int, step: Callable[[], object], nbytes: int, steps: int, alone: dict[str, float]
) -> dict[str, float]:
    lane = Lane(CUDA, sms)
    with Background(lane, step, nbytes):  # its memory pool is empty, and a budget is new
        time.sleep(0.1)
    with Background(lane, step, nbytes) as idle:
        time.sleep(0.3)
    with Background(lane, step, nbytes) as busy:
        found = _tpot(engine.times(steps))
    slower = round(found["p50_ms"] / alone["p50_ms"], 3)
    return {**found, "slower": slower, "decode_gbs": busy.gbs, "decode_gbs_on_an_idle_gpu": idle.gbs}


def _tpot(ms: list[float]) -> dict[str, float]:
    ordered = sorted(ms)
    return {"p50_ms": round(statistics.median(ms), 3), "p99_ms": round(ordered[int(0.99 * (len(ordered) - 1))], 3)}
