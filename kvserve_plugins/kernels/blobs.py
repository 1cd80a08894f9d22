"""A codec's output as values: bytes with a size beside them, and back with the length checked."""

from __future__ import annotations

import torch
from torch import Tensor

from kvserve_core.errors import FrameError
from kvserve_core.tensor import Encoded


def blob(data: Tensor) -> Encoded:
    """1-D u8 of known size; the size is filled in on the device, without a copy from the host."""
    return Encoded(data, torch.full((), data.numel(), dtype=torch.int64, device=data.device))


def blob_of(data: bytes) -> Encoded:
    """Bytes of the host."""
    return blob(tensor_of(bytearray(data)))


def tensor_of(data: bytearray) -> Tensor:
    """1-D u8 over ``data``."""
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def payload(encoded: Encoded) -> Tensor:
    """The bytes that count. On a GPU all of ``data``, whose size the host knows without waiting."""
    return encoded.data if encoded.nbytes.is_cuda else encoded.data[: int(encoded.nbytes)]


def host_bytes(encoded: Encoded) -> memoryview:
    """The bytes that count of a CPU blob, without a copy."""
    return payload(encoded).contiguous().numpy().data


def exactly(data: Tensor, nbytes: int, codec: str) -> Tensor:
    """``data`` if it has that length.

    Raises:
        FrameError: it has not.
    """
    if data.numel() != nbytes:
        raise FrameError(f"codec {codec!r} got {data.numel()} bytes, expected {nbytes}")
    return data
