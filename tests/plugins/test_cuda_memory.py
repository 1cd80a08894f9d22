"""Mappings of other processes' GPU memory: who keeps them, who closes them. CUDA's own calls are stood in for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvserve_core.errors import FrameError
from kvserve_plugins.transports import _cuda_memory
from kvserve_plugins.transports._cuda_memory import HANDLE_BYTES, TOKEN_BYTES, CudaMemory

CPU = torch.device("cpu")
SIZE = 1024


class Runtime:
    """What was opened, and what closed, by address."""

    def __init__(self) -> None:
        self.open: list[int] = []
        self.closed: list[int] = []

    def cudaIpcOpenMemHandle(self, pointer: Any, *_: object) -> int:  # noqa: N802  # its name
        pointer._obj.value = 4096 * (1 + len(self.open))
        self.open.append(pointer._obj.value)
        return 0

    def cudaIpcCloseMemHandle(self, pointer: Any) -> int:  # noqa: N802  # its name
        self.closed.append(pointer.value)
        return 0


class Room:
    def __init__(self, pointer: int, nbytes: int) -> None:
        self._pointer, self._nbytes = pointer, nbytes

    def data_ptr(self) -> int:
        return self._pointer

    def numel(self) -> int:
        return self._nbytes


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setattr(_cuda_memory, "runtime", lambda: made)
    monkeypatch.setattr(_cuda_memory, "extent", lambda pointer: SIZE)
    monkeypatch.setattr(_cuda_memory, "_tensor", lambda pointer, nbytes, device: Room(pointer, nbytes))
    return made


def handle(number: int, token: int = 0) -> bytes:
    return bytes([number]) * HANDLE_BYTES + bytes([token]) * TOKEN_BYTES


def test_memory_is_mapped_once(runtime: Runtime) -> None:
    memory = CudaMemory()
    for _ in range(2):
        with memory._mapped(handle(1), SIZE, CPU) as room:
            assert room.data_ptr() == 4096
    assert runtime.closed == []
    memory.close()
    assert runtime.closed == [4096]


@pytest.mark.parametrize("way", ["forget", "close"])
def test_who_copies_keeps_it_mapped(way: str, runtime: Runtime) -> None:
    memory = CudaMemory()
    with memory._mapped(handle(1), SIZE, CPU), memory._mapped(handle(1), SIZE, CPU):
        memory.forget(handle(1)) if way == "forget" else memory.close()
        assert runtime.closed == []
        with memory._mapped(handle(1), SIZE, CPU) as anew:
            assert anew.data_ptr() == 8192
        assert runtime.closed == []
    assert runtime.closed == [4096]


def test_no_more_than_so_many_stay(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cuda_memory, "MAX_OPEN", 2)
    memory = CudaMemory()
    for number in (1, 2, 3):
        with memory._mapped(handle(number), SIZE, CPU):
            pass
    assert runtime.closed == [4096]


def test_what_nobody_uses_goes_when_another_comes(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cuda_memory, "IDLE_S", -1.0)
    memory = CudaMemory()
    with memory._mapped(handle(1), SIZE, CPU):
        with memory._mapped(handle(2), SIZE, CPU):
            assert runtime.closed == []
        with memory._mapped(handle(3), SIZE, CPU):
            assert runtime.closed == [8192]


def test_a_handle_that_is_given_again_is_another_memory(runtime: Runtime) -> None:
    memory = CudaMemory()
    for token in (1, 2):
        with memory._mapped(handle(1, token), SIZE, CPU):
            pass
    assert (len(runtime.open), runtime.closed) == (2, [4096])


def test_a_ticket_for_more_than_there_is_is_refused(runtime: Runtime) -> None:
    memory = CudaMemory()
    with pytest.raises(FrameError, match="it has 1024"), memory._mapped(handle(1), 2**62, CPU):
        pass
    memory.forget(handle(1))
    assert runtime.closed == [4096]


def test_a_handle_of_another_length_is_refused(runtime: Runtime) -> None:
    with pytest.raises(FrameError, match="memory handle"), CudaMemory()._mapped(b"h", SIZE, CPU):
        pass
    assert runtime.open == []
