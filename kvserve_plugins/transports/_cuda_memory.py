"""GPU memory that processes of a host share: the CUDA runtime's IPC calls, through ctypes.

The caching allocator's memory is not exported: its blocks move between tensors, and with expandable segments they have
no handle at all. See "Interprocess Communication" in the CUDA C++ programming guide.
"""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char, c_int, c_size_t, c_uint, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvserve_core.bodies import Body
from kvserve_core.errors import TransportError, UnavailableComponentError
from kvserve_core.wire import Buffer
from kvserve_plugins.transports._lending import Place

HANDLE_BYTES = 64
PEER_ACCESS = 1
"""``cudaIpcMemLazyEnablePeerAccess``: the memory may be another GPU's."""
MAX_OPEN = 64
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


class CudaMemory:
    """What ``cuda_ipc`` lends. Copies run on a stream of their own, and are waited for."""

    def __init__(self) -> None:
        self._open: OrderedDict[bytes, Tensor] = OrderedDict()
        self._lock = threading.Lock()
        self._local = threading.local()

    def allocate(self, nbytes: int, like: Body) -> tuple[Tensor, bytes]:
        """On the GPU of ``like``, or the current one for a body on the host."""
        device = torch.device("cuda", torch.cuda.current_device()) if isinstance(like, Buffer) else like.device
        pointer, handle = c_void_p(), Handle()
        with torch.cuda.device(device):
            _check(runtime().cudaMalloc(byref(pointer), nbytes), f"allocating {nbytes} bytes of 'staging'")
            _check(runtime().cudaIpcGetMemHandle(byref(handle), pointer), "sharing GPU memory")
        room = _tensor(int(pointer.value or 0), nbytes, device)
        key = bytes(handle)
        _ours[key] = room
        return room, key

    def free(self, room: Tensor) -> None:
        """Give it back to the GPU; mappings of other processes keep it until they close."""
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
        mapped = self._mapped(handle, nbytes, device)
        bodies = list(torch.empty(sum(p.size for p in places), dtype=torch.uint8, device=device).split_with_sizes(
            [p.size for p in places]))  # fmt: skip
        torch._foreach_copy_(bodies, [mapped[p.at : p.at + p.size] for p in places])
        return list(zip(bodies, piece_hashes(bodies), strict=True))

    def _mapped(self, handle: bytes, nbytes: int, device: torch.device) -> Tensor:
        with self._lock:
            if handle in _ours:
                return _ours[handle]
            if handle not in self._open:
                if len(handle) != HANDLE_BYTES:
                    raise TransportError(f"a memory handle of {len(handle)} bytes, expected {HANDLE_BYTES}")
                pointer = c_void_p()
                code = runtime().cudaIpcOpenMemHandle(byref(pointer), Handle.from_buffer_copy(handle), PEER_ACCESS)
                _check(code, "opening the producer's GPU memory")
                self._open[handle] = _tensor(int(pointer.value or 0), nbytes, device)
            self._open.move_to_end(handle)
            while len(self._open) > MAX_OPEN:
                self._unmap(next(iter(self._open)))
            return self._open[handle]

    def forget(self, handle: bytes) -> None:
        """Unmap it."""
        with self._lock:
            self._unmap(handle)

    def _unmap(self, handle: bytes) -> None:
        mapped = self._open.pop(handle, None)
        if mapped is not None:
            torch.cuda.synchronize(mapped.device)
            runtime().cudaIpcCloseMemHandle(c_void_p(mapped.data_ptr()))

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
