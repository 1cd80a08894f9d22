"""Piece hashes of segment bodies that lie on a GPU; equal to those of :mod:`kvserve_core.wire`, byte for byte."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from xxhash import xxh3_64_digest

from kvserve_core.bodies import PIECE
from kvserve_core.payload import as_bytes
from kvserve_core.tensor import on_host
from kvserve_core.wire import ALIGN
from kvserve_plugins.kernels.launching import launch

SHORT = 256
"""Shorter inputs have other formulas in XXH3; pieces of 64, 128 and 192 bytes are hashed on the host."""
WIDE = 1
"""Pieces a program; measured best with 4 warps."""
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_SUMS = (
    0xC2B2AE3D, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
    0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, 0x9E3779B1,
)  # fmt: skip


def piece_hashes(bodies: Sequence[Tensor]) -> list[bytes]:
    """For each body the xxh3-64 of its 16 KiB pieces, 8 bytes each, big endian; one launch and one wait for all.

    bodies: 1-D u8 of one device, each a multiple of 64 bytes long and beginning at a multiple of 16.

    Raises:
        ValueError: a body is not so.
    """
    for body in bodies:
        if body.numel() % ALIGN or body.data_ptr() % 16 or not body.is_contiguous():
            raise ValueError(f"a body of {body.numel()} bytes at {body.data_ptr()}, expected multiples of 64 and 16")
    pieces, ends = _pieces(bodies)
    if not len(pieces):
        return [b""] * len(bodies)
    queued = _queued(pieces, bodies[0].device)
    short = {i: bodies[i][-(bodies[i].numel() % PIECE) :] for i in _with_short_end(bodies)}
    hashes, *rest = on_host([queued, *short.values()])
    flat = hashes.numpy().astype(">i8")
    for i, piece in zip(short, rest, strict=True):
        flat[ends[i + 1] - 1] = np.frombuffer(xxh3_64_digest(as_bytes(piece)), ">i8")[0]
    return [flat[a:b].tobytes() for a, b in pairwise(ends)]


def _with_short_end(bodies: Sequence[Tensor]) -> list[int]:
    return [i for i, body in enumerate(bodies) if 0 < body.numel() % PIECE < SHORT]


def _pieces(bodies: Sequence[Tensor]) -> tuple[NDArray[np.int64], list[int]]:
    """Address and length of every piece, and where those of each body begin."""
    sizes = np.array([b.numel() for b in bodies], np.int64)
    counts = -(-sizes // PIECE)
    ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
    body = np.repeat(np.arange(len(bodies)), counts)
    within = (np.arange(ends[-1]) - ends[body]) * PIECE
    address = np.array([b.data_ptr() for b in bodies], np.int64)[body] + within
    return np.stack((address, np.minimum(PIECE, sizes[body] - within)), 1), ends.tolist()


def _queued(pieces: NDArray[np.int64], device: torch.device) -> Tensor:
    """Hashes on the device. What the kernel gives for a short piece is of no use."""
    from kvserve_plugins.kernels.triton_digest import digest_kernel  # a CUDA build of torch brings Triton

    count, cuda = len(pieces), device.type == "cuda"
    pinned = torch.empty(pieces.shape, dtype=torch.int64, pin_memory=cuda)
    pinned.numpy()[:] = np.where(pieces[:, 1:] < SHORT, pieces * [[1, 0]] + [[0, 64]], pieces)
    hashes = torch.empty(count, dtype=torch.int64, device=device)
    table = pinned.to(device, non_blocking=True)
    given = {"pieces": table, "words": _words(device), "hashes": hashes, "count": count, "blocks": PIECE // 1024}
    launch(digest_kernel, -(-count // WIDE), (count == 1, count % 16 == 0), given | {"wide": WIDE})
    return hashes


@lru_cache(maxsize=8)
def _words(device: torch.device) -> Tensor:
    """Words of the secret where the kernel wants them, and the initial sums."""
    at = [*range(0, 192, 8), *range(121, 185, 8), *range(11, 75, 8)]
    words = [int.from_bytes(_SECRET[k : k + 8], "little") for k in at] + list(_SUMS)
    return torch.from_numpy(np.array(words, np.uint64).view(np.int64).copy()).to(device)
