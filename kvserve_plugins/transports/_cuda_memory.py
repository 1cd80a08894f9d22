"""GPU memory that processes of a host share: the CUDA runtime's IPC calls, through ctypes.

The caching allocator's memory is not exported: its blocks move between tensors, and with expandable segments they have
no handle at all. See "Interprocess Communication" in the CUDA C++ programming guide.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char, c_int, c_size_t, c_uint, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvserve_core.bodies import Body
from kvserve_core.errors import FrameError, TransportError, UnavailableComponentError
from kvserve_core.wire import Buffer
from kvserve_plugins.transports._lending import Place

HANDLE_BYTES = 64
PEER_ACCESS = 1
"""``cudaIpcMemLazyEnablePeerAccess``: the memory may be another GPU's."""
TOKEN_BYTES = 8
"""After the handle: CUDA may give memory that is made later the handle of some that is gone."""
MAX_OPEN = 64
IDLE_S = 60.0
"""Mappings that nobody used for so long go when another is made: their producers may be dead."""
_ours: dict[bytes, Tensor] = {}
"""Memory of this process by handle: CUDA opens only what other processes made."""


class Handle(ctypes.Structure):
    """``cudaIpcMemHandle_t``, passed by value."""

    _fields_ = (("reserved", c_char * HANDLE_BYTES),)


@lru_cache(maxsize=1)
def runtime() -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded.

    Raises:
        UnavailableComponentError: it has none.
    """
    if not torch.cuda.is_available():
        raise UnavailableComponentError("transport 'cuda_ipc' needs an NVIDIA GPU, and torch sees none; use 'tcp'")
    torch.cuda.init()  # type: ignore[no-untyped-call]  # torch does not annotate it
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcudart" in line}
    if not loaded:
        raise UnavailableComponentError("torch has no CUDA runtime of its own loaded; use 'tcp'")
    found = ctypes.CDLL(min(loaded))
    found.cudaMalloc.argtypes = [POINTER(c_void_p), c_size_t]
    found.cudaFree.argtypes = [c_void_p]
    found.cudaIpcGetMemHandle.argtypes = [POINTER(Handle), c_void_p]
    found.cudaIpcOpenMemHandle.argtypes = [POINTER(c_void_p), Handle, c_uint]
    found.cudaIpcCloseMemHandle.argtypes = [c_void_p]
    found.cudaGetErrorString.argtypes, found.cudaGetErrorString.restype = [c_int], ctypes.c_char_p
    return found


def extent(pointer: int) -> int:
    """How many bytes of device memory there are from the beginning of an allocation to its end, by the driver."""
    base, size = c_void_p(), c_size_t()
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuMemGetAddressRange_v2.argtypes = [POINTER(c_void_p), POINTER(c_size_t), c_void_p]
    if driver.cuMemGetAddressRange_v2(byref(base), byref(size), c_void_p(pointer)):
        raise TransportError("the driver does not say how large the producer's GPU memory is; use 'tcp'")
    return int(base.value or 0) + size.value - pointer


def _check(code: int, what: str) -> None:
    if code:
        runtime().cudaGetLastError()
        reason = runtime().cudaGetErrorString(code).decode()
        raise TransportError(f"{what} failed: {reason}; both sides must see the GPU, on one host, outside of"
                             " containers that hide it, or use 'tcp'")  # fmt: skip


class _Raw:
    """Device memory as what torch takes without a copy."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "version": 3,
        }  # fmt: skip


def _tensor(pointer: int, nbytes: int, device: torch.device) -> Tensor:
    return torch.as_tensor(_Raw(pointer, nbytes), device=device)


class Mapping:
    """Memory of another process, and who copies from it just now. It is closed when nobody does any more."""

    def __init__(self, room: Tensor) -> None:
        self.room, self.users, self.doomed, self.used_at = room, 0, False, time.monotonic()

    def close(self) -> None:
        """Unmap it, once."""
        if not self.users:
            runtime().cudaIpcCloseMemHandle(c_void_p(self.room.data_ptr()))


class CudaMemory:
    """What ``cuda_ipc`` lends. Copies run on a stream of their own, and are waited for."""

    def __init__(self) -> None:
        self._open: OrderedDict[bytes, Mapping] = OrderedDict()
        self._lock = threading.Lock()
        self._local = threading.local()

    def allocate(self, nbytes: int, like: Body) -> tuple[Tensor, bytes]:
        """On the GPU of ``like``, or the current one for a body on the host."""
        device = torch.device("cuda", torch.cuda.current_device()) if isinstance(like, Buffer) else like.device
        pointer, handle = c_void_p(), Handle()
        with torch.cuda.device(device):
            _check(runtime().cudaMalloc(byref(pointer), nbytes), f"allocating {nbytes} bytes of 'staging'")
            try:
                _check(runtime().cudaIpcGetMemHandle(byref(handle), pointer), "sharing GPU memory")
            except TransportError:
                runtime().cudaFree(pointer)
                raise
        room = _tensor(int(pointer.value or 0), nbytes, device)
        key = bytes(handle) + os.urandom(TOKEN_BYTES)
        with self._lock:
            _ours[key] = room
        return room, key

    def free(self, room: Tensor) -> None:
        """Give it back to the GPU. What consumers that still copy from it see is undefined; digests tell them."""
        with self._lock:
            for handle in [h for h, mine in _ours.items() if mine.data_ptr() == room.data_ptr()]:
                del _ours[handle]
        runtime().cudaFree(c_void_p(room.data_ptr()))

    def put(self, room: Tensor, body: Body) -> None:
        """A copy on the device."""
        source = torch.from_numpy(np.frombuffer(body, np.uint8).copy()) if isinstance(body, Buffer) else body
        stream = self._stream(room.device)
        with torch.cuda.stream(stream):
            room.copy_(source, non_blocking=True)
        stream.synchronize()

    def take(self, handle: bytes, nbytes: int, places: Sequence[Place]) -> list[tuple[Tensor, bytes]]:
        """On the current GPU and stream, as slices of one buffer. Reading the hashes waits for all of it."""
        from kvserve_plugins.kernels.digest import piece_hashes

        device = torch.device("cuda", torch.cuda.current_device())
        bodies = list(torch.empty(sum(p.size for p in places), dtype=torch.uint8, device=device).split_with_sizes(
            [p.size for p in places]))  # fmt: skip
        with self._mapped(handle, nbytes, device) as room:
            torch._foreach_copy_(bodies, [room[p.at : p.at + p.size] for p in places])
            torch.cuda.current_stream(device).synchronize()
        return list(zip(bodies, piece_hashes(bodies), strict=True))

    @contextmanager
    def _mapped(self, handle: bytes, nbytes: int, device: torch.device) -> Iterator[Tensor]:
        """The memory, which stays mapped until the end of the block; all that reads it must be done by then."""
        with self._lock:
            mapping = self._mapping(handle, device)
            mapping.users += 1
        try:
            if nbytes > mapping.room.numel():
                raise FrameError(f"a ticket for memory of {nbytes} bytes, it has {mapping.room.numel()}")
            yield mapping.room
        finally:
            with self._lock:
                mapping.users, mapping.used_at = mapping.users - 1, time.monotonic()
                if mapping.doomed:
                    mapping.close()

    def _mapping(self, handle: bytes, device: torch.device) -> Mapping:
        if handle in _ours:
            return Mapping(_ours[handle])
        if handle not in self._open:
            self._make_room(handle)
            self._open[handle] = self._opened(handle, device)
        self._open.move_to_end(handle)
        return self._open[handle]

    def _make_room(self, handle: bytes) -> None:
        """Before another memory is mapped: those that are idle, beyond the limit, or had this handle before go."""
        now = time.monotonic()
        for key, mapping in list(self._open.items()):
            idle = not mapping.users and now - mapping.used_at > IDLE_S
            if idle or len(self._open) >= MAX_OPEN or key[:HANDLE_BYTES] == handle[:HANDLE_BYTES]:
                self._unmap(key)

    @staticmethod
    def _opened(handle: bytes, device: torch.device) -> Mapping:
        if len(handle) != HANDLE_BYTES + TOKEN_BYTES:
            raise FrameError(f"a memory handle of {len(handle)} bytes, expected {HANDLE_BYTES + TOKEN_BYTES}")
        pointer = c_void_p()
        made = Handle.from_buffer_copy(handle[:HANDLE_BYTES])
        _check(runtime().cudaIpcOpenMemHandle(byref(pointer), made, PEER_ACCESS), "opening the producer's GPU memory")
        try:
            at = int(pointer.value or 0)
            return Mapping(_tensor(at, extent(at), device))
        except BaseException:
            runtime().cudaIpcCloseMemHandle(pointer)
            raise

    def forget(self, handle: bytes) -> None:
        """Unmap it, as soon as nobody copies from it."""
        with self._lock:
            self._unmap(handle)

    def _unmap(self, handle: bytes) -> None:
        if mapping := self._open.pop(handle, None):
            mapping.doomed = True
            mapping.close()

    def close(self) -> None:
        """Unmap everything."""
        with self._lock:
            for handle in list(self._open):
                self._unmap(handle)

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        """Of this thread."""
        found: torch.cuda.Stream | None = getattr(self._local, "stream", None)
        if found is None or found.device != device:
            found = self._local.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # as above
        return found
