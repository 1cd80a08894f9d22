"""The bytes of a segment, on the host or on a device, and their digests. Imports torch for its types only."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, Union

from xxhash import xxh3_64_digest, xxh3_64_intdigest

if TYPE_CHECKING:
    from torch import Tensor

Buffer: TypeAlias = bytes | bytearray | memoryview
Body: TypeAlias = Union[Buffer, "Tensor"]
"""A segment's bytes: on the host, or as a contiguous 1-D u8 tensor where both ends of a transport are GPUs."""
PIECE = 16 * 1024
_SEED_STEP = 0x9E3779B97F4A7C15


def host_bytes(body: Body) -> Buffer:
    """A body as host bytes; one on a device is copied."""
    if isinstance(body, Buffer):
        return body
    data: memoryview = body.cpu().numpy().data
    return data


def piece_hashes(body: Buffer) -> bytes:
    """The xxh3-64 (8 bytes, big endian) of each 16 KiB piece of a body, one after the other."""
    view = memoryview(body)
    return b"".join([xxh3_64_digest(view[i : i + PIECE]) for i in range(0, len(view), PIECE)])


def sealed_digest(nonce: int, index: int, head: Buffer, hashes: bytes) -> int:
    """xxh3-64 over the hash of the head and those of the body's pieces.

    The seed holds nonce and index, so that a segment of another frame or place does not pass.
    """
    return xxh3_64_intdigest(xxh3_64_digest(head) + hashes, (nonce + (index + 1) * _SEED_STEP) % 2**64)
