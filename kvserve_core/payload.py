"""Inside a segment: parameters and coded streams to ``(meta, body)`` and back, without trust in the sender.

meta is msgpack: per stage the names, dtypes and shapes of its parameters, and per stream its length, alphabet, rows,
width and coded size. body holds the tensors, then the streams, each 16-byte aligned, zeros between and after.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod

import msgspec
import torch
from torch import Tensor

from kvserve_core.bodies import Body
from kvserve_core.errors import FrameError
from kvserve_core.spec import DType, Region
from kvserve_core.tensor import TORCH, Params, Part, dtype_of
from kvserve_core.wire import MAX_SEGMENT_BYTES, Buffer, padding

PIECE_ALIGN = 16
MAX_NDIM = 6


class ParamMeta(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A parameter tensor: name, dtype, shape."""

    name: str
    dtype: DType
    shape: tuple[int, ...]


class PartMeta(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A stream: codes it holds, their alphabet, runs, bytes a code (1 or 2), bytes on the wire, whether coded."""

    length: int
    alphabet: int
    rows: int
    width: int
    nbytes: int
    coded: bool
    table: str | None = None


class Meta(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A segment's metadata. ``stages``: parameters of each transform, then of the quantizer."""

    stages: tuple[tuple[ParamMeta, ...], ...]
    parts: tuple[PartMeta, ...]


def as_bytes(x: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    return x.detach().reshape(-1).view(torch.uint8).numpy().data


def pack(stages: Sequence[Params], parts: Sequence[Part], blobs: Sequence[Buffer | None]) -> tuple[bytes, bytearray]:
    """``(meta, body)``. ``blobs[i]`` is part i coded, or None to store its codes as they stand.

    The body is padded to 64 bytes here, so that sealing it needs no copy.
    """
    pieces: list[Buffer] = [as_bytes(p.cpu().contiguous()) for params in stages for p in params.values()]
    data = [as_bytes(p.codes.cpu()) if b is None else b for p, b in zip(parts, blobs, strict=True)]
    meta = pack_meta(stages, parts, [len(d) for d in data], [b is not None for b in blobs])
    return meta, _join(pieces + data)


def pack_meta(stages: Sequence[Params], parts: Sequence[Part], sizes: Sequence[int], coded: Sequence[bool]) -> bytes:
    """``meta``. sizes: bytes of each part in the body."""
    stage_meta = [tuple(ParamMeta(n, dtype_of(p), tuple(p.shape)) for n, p in params.items()) for params in stages]
    part_meta = [
        PartMeta(p.codes.numel(), p.alphabet, p.rows, p.codes.element_size(), size, c, p.table)
        for p, size, c in zip(parts, sizes, coded, strict=True)
    ]
    return msgspec.msgpack.encode(Meta(tuple(stage_meta), tuple(part_meta)))


def body_bytes(pieces: Sequence[Tensor]) -> int:
    """How long the body of these pieces is, padding included."""
    size = sum(_room(p) for p in pieces)
    return size + padding(size)


def bodies_on_device(segments: Sequence[Sequence[Tensor]], device: torch.device) -> list[Tensor]:
    """The bodies of segments from their pieces in order, as slices of one buffer on ``device``; zeros between.

    Pieces elsewhere are copied there. Nothing waits.
    """
    ends = list(accumulate(map(body_bytes, segments)))
    room = torch.zeros(ends[-1] if ends else 0, dtype=torch.uint8, device=device)
    places, flat = [], []
    for begin, pieces in zip([0, *ends], segments, strict=False):
        for p in pieces:
            flat.append(p.to(device, non_blocking=True).contiguous().reshape(-1).view(torch.uint8))
            places.append(room[begin : begin + flat[-1].numel()])
            begin += _room(p)
    if flat:
        torch._foreach_copy_(places, flat)
    return [room[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def _room(x: Tensor) -> int:
    size = x.numel() * x.element_size()
    return size + padding(size, PIECE_ALIGN)


def _join(pieces: Sequence[Buffer]) -> bytearray:
    size = sum(len(p) + padding(len(p), PIECE_ALIGN) for p in pieces)
    body = bytearray(size + padding(size))
    at = 0
    for piece in pieces:
        body[at : at + len(piece)] = piece
        at += len(piece) + padding(len(piece), PIECE_ALIGN)
    return body


class Unpacked:
    """The parameters of each stage, and each stream as (description, bytes). Copied: the sender's buffer is free.

    ``raw_bytes``: original bytes of the region ``at``; what may be allocated is bounded by it. A body on a device is
    not copied: it is the receiver's own. Bytes between its pieces mean nothing and are not looked at.

    Raises:
        FrameError: metadata that is malformed, out of bounds or at odds with the body.
    """

    def __init__(self, meta: bytes, body: Body, raw_bytes: int, at: Region) -> None:
        if raw_bytes > MAX_SEGMENT_BYTES:
            raise FrameError(f"a segment of {raw_bytes} original bytes, at most {MAX_SEGMENT_BYTES} are taken", at)
        parsed = parse_meta(meta, at)
        _check_bounds(parsed, 4 * raw_bytes + 4096, at)
        self._body = body if isinstance(body, Tensor) else bytearray(body)
        self._offset = 0
        self.at = at
        self.stages = [{p.name: self._tensor(p) for p in stage} for stage in parsed.stages]
        self.parts = parsed.parts
        self.blobs = [self._take(p.nbytes) for p in parsed.parts]
        if self._offset + padding(self._offset) != len(self._body):
            raise FrameError(f"{len(self._body)} bytes, the metadata describes {self._offset}", at)
        self._require_zeros(self._offset, len(self._body))

    def _require_zeros(self, start: int, stop: int) -> None:
        if not isinstance(self._body, Tensor) and any(self._body[start:stop]):
            raise FrameError("padding set", self.at)

    def _take(self, nbytes: int) -> Tensor:
        start, stop = self._offset, self._offset + nbytes
        end = stop + padding(stop, PIECE_ALIGN)
        if end > len(self._body):
            raise FrameError(f"a stream ends at byte {stop} of {len(self._body)}", self.at)
        self._require_zeros(stop, end)
        self._offset = end
        if isinstance(self._body, Tensor):
            return self._body[start:stop]
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._body, dtype=torch.uint8, count=nbytes, offset=start)

    def _tensor(self, p: ParamMeta) -> Tensor:
        data = self._take(prod(p.shape) * p.dtype.itemsize)
        return data.view(TORCH[p.dtype]).reshape(p.shape)


def parse_meta(meta: bytes, at: object) -> Meta:
    """A segment's metadata, its sizes not yet checked.

    Raises:
        FrameError: not msgpack of the expected types; names ``at``.
    """
    try:
        return msgspec.msgpack.decode(meta, type=Meta)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FrameError(f"malformed segment metadata: {error}", at) from None


def _check_bounds(meta: Meta, limit: int, at: Region) -> None:
    """Refuse sizes beyond any honest segment before anything is allocated."""
    for stage in meta.stages:
        if len({p.name for p in stage}) < len(stage):
            raise FrameError("a parameter is named twice", at)
        for p in stage:
            if not _honest_shape(p.shape, limit // p.dtype.itemsize):
                raise FrameError(f"parameter {p.name[:32]!r} of shape {list(p.shape)[:8]} is out of bounds", at)
    total = 0
    for part in meta.parts:
        total += part.length * part.width
        if not _honest_part(part) or total > limit:
            raise FrameError(f"a stream of {part.length} codes is out of bounds", at)


def _honest_shape(shape: tuple[int, ...], limit: int) -> bool:
    # The largest dimension counts too: [0, 2**62] holds nothing, yet its strides overflow.
    return len(shape) <= MAX_NDIM and min(shape, default=0) >= 0 and max(prod(shape), *shape, 0) <= limit


def _honest_part(part: PartMeta) -> bool:
    size = part.length * part.width
    return (
        part.width in (1, 2)
        and 1 <= part.alphabet <= (2**8 if part.width == 1 else 2**15)
        and part.length >= 0
        and part.rows >= 1
        and part.length % part.rows == 0
        and 0 <= part.nbytes <= size
        and (part.coded or part.nbytes == size)
    )
