"""nvCOMP 6's batched C API through ctypes: what takes device pointers, writes device sizes and never waits.

All algorithms share one set of functions, ``nvcompBatched<Symbol>CompressAsync`` and so on, and differ in two structs
of 64 bytes, passed by value, in which zero means default.
"""

from __future__ import annotations

import ctypes
import struct
from ctypes import POINTER, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from kvserve_core.errors import UnavailableComponentError

Way = Literal["Compress", "Decompress"]
ALIGN = 16
"""What every algorithm accepts as alignment of a chunk, both ways; ANS asks for it."""
OPTION_BYTES = 64
UCHAR = 1
"""``NVCOMP_TYPE_UCHAR``."""
FLOAT16 = 10
"""``NVCOMP_TYPE_FLOAT16``, for every two-byte float."""


class Options(ctypes.Structure):
    """Any ``nvcompBatched<Symbol>CompressOpts_t`` or ``DecompressOpts_t`` of nvCOMP 6."""

    _fields_ = (("words", c_uint64 * (OPTION_BYTES // 8)),)


def options(layout: str = "", *values: float) -> Options:
    """Options whose first fields are ``values``, laid out as :mod:`struct` says; the rest is 0."""
    return Options.from_buffer_copy(struct.pack("<" + layout, *values).ljust(OPTION_BYTES, b"\0"))


@dataclass(frozen=True)
class Algorithm:
    """symbol: its name within function names. compress, decompress: its options as (struct layout, values)."""

    symbol: str
    compress: tuple[str, tuple[float, ...]] = ("", ())
    decompress: tuple[str, tuple[float, ...]] = ("", ())

    def options(self, way: Way) -> Options:
        """The struct of one way."""
        layout, values = self.compress if way == "Compress" else self.decompress
        return options(layout, *values)


class Batch(NamedTuple):
    """Chunks on the device: addresses, their sizes, how many, and bytes of the largest (uncompressed)."""

    addresses: int
    sizes: int
    chunks: int
    largest: int


class Results(NamedTuple):
    """Where nvCOMP writes, on the device: addresses of outputs, sizes and status codes of the chunks."""

    addresses: int
    sizes: int
    status: int


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """libnvcomp, from the wheel ``nvidia-libnvcomp-cu12`` or ``-cu13``.

    Raises:
        UnavailableComponentError: it is not installed or does not load.
    """
    try:
        from nvidia.libnvcomp.load import load_library
    except ImportError as error:
        raise UnavailableComponentError(f"nvCOMP is not installed ({error}); {_INSTALL}") from error
    found: ctypes.CDLL | None = load_library()
    if found is None:
        raise UnavailableComponentError(f"the library of nvCOMP 6 does not load here; {_INSTALL}")
    return found


_INSTALL = "pip install 'kvserve[nvcomp-cu13]', or 'kvserve[nvcomp-cu12]' for CUDA 12"


class NvcompCalls:
    """The functions of one algorithm, with their signatures."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._symbol = algorithm.symbol
        self._options = {way: algorithm.options(way) for way in ("Compress", "Decompress")}
        size, pointer, out = c_size_t, c_void_p, POINTER(c_size_t)
        self._bound = self._function("CompressGetMaxOutputChunkSize", size, Options, out)
        self._temp = {
            way: self._function(f"{way}GetTempSize", size, size, Options, out, size, pointer)
            for way in ("Compress", "Decompress")
        }
        self._compress = self._function(
            "CompressAsync", *(pointer, pointer, size, size, pointer, size, pointer, pointer, Options, pointer, pointer)
        )
        self._decompress = self._function(
            "DecompressAsync",
            *(pointer, pointer, pointer, pointer, size, pointer, size, pointer, Options, pointer, pointer),
        )

    def _function(self, name: str, *arguments: object) -> Any:
        function = getattr(library(), f"nvcompBatched{self._symbol}{name}")
        function.argtypes = list(arguments)
        return function

    def chunk_bound(self, nbytes: int) -> int:
        """Most bytes that are written for a chunk of ``nbytes``, rounded up to the alignment."""
        out = c_size_t()
        self._check(self._bound(nbytes, self._options["Compress"], out), "bound")
        return -(-out.value // ALIGN) * ALIGN

    def scratch(self, way: Way, chunks: int, largest: int, total: int) -> int:
        """Bytes of scratch for one call over ``total`` bytes in ``chunks`` of at most ``largest``."""
        need = c_size_t()
        self._check(self._temp[way](chunks, largest, self._options[way], need, total, None), "scratch")
        return max(need.value, 1)

    def compress(self, batch: Batch, temp: tuple[int, int], out: Results, stream: int) -> None:
        """Queue the compression of a batch. ``temp``: address and bytes of scratch."""
        given = (batch.addresses, batch.sizes, batch.largest, batch.chunks, *temp)
        self._check(
            self._compress(*given, out.addresses, out.sizes, self._options["Compress"], out.status, stream), "compress"
        )

    def decompress(self, batch: Batch, rooms: int, temp: tuple[int, int], out: Results, stream: int) -> None:
        """Queue the decompression of a batch. ``rooms``: address of the sizes of the output buffers."""
        given = (batch.addresses, batch.sizes, rooms, out.sizes, batch.chunks, *temp)
        self._check(
            self._decompress(*given, out.addresses, self._options["Decompress"], out.status, stream), "decompress"
        )

    def _check(self, status: int, what: str) -> None:
        """What nvCOMP reports on the host side of a call: bad arguments, a failed launch."""
        if status:
            raise RuntimeError(f"nvCOMP {self._symbol} {what} returned status {status}")
