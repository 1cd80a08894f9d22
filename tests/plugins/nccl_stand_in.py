"""NCCL as ``nccl`` calls it, inside one process and without a GPU: what is sent lies ready until it is received."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections import defaultdict, deque
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvserve_core.bodies import host_bytes, piece_hashes
from kvserve_plugins.transports import _nccl_cuda, _nccl_library


class StandIn:
    """``fail``: what a communicator's state is from now on. ``calls``: what was called, but for questions."""

    def __init__(self) -> None:
        self.fail, self.version = 0, 22800
        self.answers: dict[str, int] = {}
        self.calls: list[str] = []
        self.configs: list[_nccl_library.Config] = []
        self._handles = itertools.count(1)
        self._members: dict[bytes, set[int]] = defaultdict(set)
        self._comms: dict[int | None, tuple[bytes, int, int]] = {}
        self._sent: dict[tuple[bytes, int], deque[bytes]] = defaultdict(deque)
        self._receiving: dict[int, deque[tuple[bytes, int, int, int]]] = defaultdict(deque)
        self._lock = threading.Lock()

    def _code(self, name: str) -> int:
        self.calls.append(name)
        return self.answers.get(name, 0)

    def ncclGetVersion(self, number: Any) -> int:  # noqa: N802  # NCCL's name, as all below
        number._obj.value = self.version
        return 0

    def ncclGetErrorString(self, code: int) -> bytes:  # noqa: N802
        return f"error {code}".encode()

    def ncclGetLastError(self, comm: Any) -> bytes:  # noqa: N802
        return b"first line\nlast line\n"

    def ncclGetUniqueId(self, made: Any) -> int:  # noqa: N802
        made._obj.internal = os.urandom(32).hex().encode()
        return self._code("id")

    def ncclCommInitRankConfig(self, comm: Any, size: int, given: Any, rank: int, config: Any) -> int:  # noqa: N802
        handle = comm._obj.value = next(self._handles)
        self.configs.append(config._obj)
        self._comms[handle] = (bytes(given), rank, size)
        self._members[bytes(given)].add(rank)
        return self._code("init") or 7

    def ncclCommGetAsyncError(self, comm: Any, state: Any) -> int:  # noqa: N802
        given, _, size = self._comms[comm.value]
        state._obj.value = self.fail or (0 if len(self._members[given]) == size else 7)
        return 0

    def ncclCommAbort(self, comm: Any) -> int:  # noqa: N802
        return self._code("abort")

    def ncclGroupStart(self) -> int:  # noqa: N802
        return self._code("start")

    def ncclGroupEnd(self) -> int:  # noqa: N802
        return self._code("end") or 7

    def ncclSend(self, at: int, count: int, kind: int, peer: int, comm: Any, stream: int) -> int:  # noqa: N802
        given, rank, size = self._comms[comm.value]
        with self._lock:
            self._sent[given, peer].append(ctypes.string_at(at, count))
        assert (kind, peer) == (1, size - 1 - rank)
        return self._code("send")

    def ncclRecv(self, at: int, count: int, kind: int, peer: int, comm: Any, stream: int) -> int:  # noqa: N802
        given, rank, size = self._comms[comm.value]
        with self._lock:
            self._receiving[stream].append((given, rank, at, count))
        assert (kind, peer) == (1, size - 1 - rank)
        return self._code("recv")

    def through(self, stream: int) -> bool:
        """Whether nothing is awaited on a stream."""
        waiting = self._receiving[stream]
        with self._lock:
            while waiting and self._sent[waiting[0][:2]]:
                given, rank, at, count = waiting.popleft()
                data = self._sent[given, rank].popleft()
                assert len(data) == count
                ctypes.memmove(at, data, count)
            return not waiting


def installed(patch: pytest.MonkeyPatch) -> StandIn:
    """Take NCCL's place, and CUDA's in ``_nccl_cuda``. Producers look like another GPU than consumers."""
    made, numbers = StandIn(), itertools.count(100)

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.cuda_stream = next(numbers)

        def query(self) -> bool:
            return True

    class Event:
        def record(self, stream: Stream) -> None:
            self.stream = stream.cuda_stream

        def query(self) -> bool:
            return made.through(self.stream)

    def device(self: Any) -> str:
        return "GPU-0" if threading.current_thread().name == "kvserve-tcp-io" else "GPU-1"

    def taken(self: Any, bodies: list[torch.Tensor]) -> list[tuple[torch.Tensor, bytes]]:
        return [(body, piece_hashes(host_bytes(body))) for body in bodies]

    cuda = SimpleNamespace(
        Stream=Stream, Event=Event, stream=lambda stream: nullcontext(), set_device=lambda device: None
    )
    patch.setattr(_nccl_library, "library", lambda: made)
    patch.setattr(_nccl_cuda, "current", lambda: torch.device("cpu"))
    patch.setattr(_nccl_cuda.NcclBackend, "device", device)
    patch.setattr(_nccl_cuda.NcclBackend, "taken", taken)
    patch.setattr(torch, "cuda", cuda)
    return made
