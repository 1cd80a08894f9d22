"""How much of the host's cores decoding takes from an engine that computes on them too."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

LONGEST_REST_S = 0.5


class Gate:
    """At most ``at_once`` threads decode, and while the engine is ``busy`` each a ``share`` of its turn only.

    A step of an engine on a CPU shares the interpreter, the caches and perhaps the core with threads that decode. One
    after another, with rests between, they leave most steps alone; an engine that waits for what they load loses
    nothing, as then it is not busy.
    """

    def __init__(self, at_once: int, share: float = 1.0) -> None:
        self._turns = threading.Semaphore(at_once)
        self._rests = 1.0 / share - 1.0
        self.busy = False

    @contextmanager
    def turn(self, cancelled: threading.Event) -> Iterator[None]:
        """One batch, and the rest after it, which ends early when ``cancelled``."""
        with self._turns:
            began = time.perf_counter()
            yield
            if self.busy and self._rests:
                cancelled.wait(min(self._rests * (time.perf_counter() - began), LONGEST_REST_S))


def default_turns(device: torch.device) -> int:
    """Two on a GPU, one that is queued while another is waited for; else half the cores that this process may use."""
    if device.type == "cuda":
        return 2
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // 2)
