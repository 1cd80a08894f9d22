"""The calls of NCCL that a pair needs, through ctypes.

Not through ``torch.distributed``: its watchdog ends the whole process when a peer is lost, which must not happen to an
engine for the sake of a KV cache, and its store would be one more open port. Communicators are non-blocking (NCCL 2.18
and later), so that opening one and posting to it can be given up too.
"""

from __future__ import annotations

import ctypes
import time
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_void_p
from functools import lru_cache
from pathlib import Path

import torch

from kvserve_core.errors import PeerLost, TransportError, UnavailableComponentError

ID_BYTES = 128
SUCCESS, IN_PROGRESS = 0, 7
_UINT8 = 1
_MAGIC = 0xCAFEBEEF
_LAYOUT = 21800
"""The version whose ``ncclConfig_t`` is written here; later libraries add their own defaults."""
_UNDEFINED = -(2**31)
_POLL_S = 5e-4


class UniqueId(ctypes.Structure):
    """``ncclUniqueId``, passed by value."""

    _fields_ = (("internal", c_char * ID_BYTES),)


class Config(ctypes.Structure):
    """``ncclConfig_t`` of NCCL 2.18."""

    _fields_ = (
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("blocking", c_int),
        ("cga_cluster_size", c_int),
        ("min_ctas", c_int),
        ("max_ctas", c_int),
        ("net_name", c_char_p),
        ("split_share", c_int),
    )


def config(ctas: int | None) -> Config:
    """Non-blocking; ctas: at most so many multiprocessors, None: as NCCL likes."""
    most = _UNDEFINED if ctas is None else ctas
    return Config(ctypes.sizeof(Config), _MAGIC, _LAYOUT, 0, _UNDEFINED, _UNDEFINED, most, None, _UNDEFINED)


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The NCCL that torch has loaded.

    Raises:
        UnavailableComponentError: there is none, or it is too old.
    """
    if not torch.cuda.is_available():
        raise UnavailableComponentError("transport 'nccl' needs an NVIDIA GPU, and torch sees none; use 'tcp'")
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    loaded = {line.split()[-1] for line in maps if "libnccl.so" in line}
    try:
        found = ctypes.CDLL(min(loaded, default="libnccl.so.2"))
    except OSError as error:
        raise UnavailableComponentError(f"torch has no NCCL loaded, and none is found: {error}; use 'tcp'") from None
    found.ncclGetErrorString.argtypes, found.ncclGetErrorString.restype = [c_int], c_char_p
    found.ncclGetLastError.argtypes, found.ncclGetLastError.restype = [c_void_p], c_char_p
    found.ncclGetVersion.argtypes = [POINTER(c_int)]
    found.ncclGetUniqueId.argtypes = [POINTER(UniqueId)]
    found.ncclCommInitRankConfig.argtypes = [POINTER(c_void_p), c_int, UniqueId, c_int, POINTER(Config)]
    found.ncclCommGetAsyncError.argtypes = [c_void_p, POINTER(c_int)]
    found.ncclCommAbort.argtypes = [c_void_p]
    for call in (found.ncclSend, found.ncclRecv):
        call.argtypes = [c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p]
    return checked(found)


def checked(found: ctypes.CDLL) -> ctypes.CDLL:
    """A library that is new enough.

    Raises:
        UnavailableComponentError: it is not.
    """
    if version(found) < _LAYOUT:
        raise UnavailableComponentError(f"NCCL {version(found)} is too old; 'nccl' needs 2.18 ({_LAYOUT}) or later")
    return found


def version(found: ctypes.CDLL) -> int:
    """As NCCL counts: 22705 is 2.27.5."""
    number = c_int()
    found.ncclGetVersion(byref(number))
    return number.value


def unique_id() -> bytes:
    """What the two ends of a communicator find each other by; this process listens for them."""
    made = UniqueId()
    expect(library().ncclGetUniqueId(byref(made)), None, "opening NCCL's meeting point")
    return bytes(made)


def expect(code: int, comm: c_void_p | None, what: str) -> None:
    """``code`` is success, or under way.

    Raises:
        TransportError: it is not.
    """
    if code in (SUCCESS, IN_PROGRESS):
        return
    found = library()
    detail = (found.ncclGetLastError(comm) or b"").decode(errors="replace").strip().splitlines()
    reason = "; ".join([found.ncclGetErrorString(code).decode(errors="replace"), *detail[-1:]])
    raise TransportError(f"{what} failed in NCCL: {reason}")


class Handle:
    """One communicator. Call :meth:`settled` until true after each call that begins something."""

    def __init__(self, invite: bytes, rank: int, size: int, ctas: int | None) -> None:
        self._comm = c_void_p()
        given = config(ctas)
        code = library().ncclCommInitRankConfig(
            byref(self._comm), size, UniqueId.from_buffer_copy(invite), rank, byref(given)
        )
        expect(code, None, "opening a communicator")

    def settled(self) -> bool:
        """Whether nothing is being set up any more.

        Raises:
            PeerLost: setting up or a transfer failed, as NCCL sees it.
        """
        state = c_int()
        code = library().ncclCommGetAsyncError(self._comm, byref(state))
        try:
            expect(code, self._comm, "asking a communicator")
            expect(state.value, self._comm, "a pair")
        except TransportError as error:
            raise PeerLost(f"{error}; both sides need a GPU of their own (use 'cuda_ipc' on one)") from None
        return state.value == SUCCESS

    def move(self, sends: list[torch.Tensor], receives: list[torch.Tensor], peer: int, stream: int) -> None:
        """Begin all of these at once, in order, on a CUDA stream."""
        calls = library()
        expect(calls.ncclGroupStart(), self._comm, "beginning a batch")
        codes = [self._call(calls.ncclSend, t, peer, stream) for t in sends]
        codes += [self._call(calls.ncclRecv, t, peer, stream) for t in receives]
        codes.append(calls.ncclGroupEnd())
        for code in codes:
            expect(code, self._comm, "posting a batch")

    def _call(self, call: object, tensor: torch.Tensor, peer: int, stream: int) -> int:
        return int(call(tensor.data_ptr(), tensor.numel(), _UINT8, peer, self._comm, stream))  # type: ignore[operator]

    def abort(self) -> None:
        """Free it, whatever it is doing."""
        if self._comm:
            library().ncclCommAbort(self._comm)
            self._comm = c_void_p()


def pause() -> None:
    """Between two looks at what NCCL does."""
    time.sleep(_POLL_S)
