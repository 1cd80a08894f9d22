"""The frame: self-describing, versioned, checksummed per segment, bounded, 64-byte aligned and streamable.

``docs/wire-format.md`` gives it to the byte. Digests show accidental change (integrity); they do not authenticate a
peer. Nothing here allocates by a length that was not checked against bytes already at hand.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
from xxhash import xxh3_64_intdigest

from kvserve_core.bodies import Body, host_bytes, piece_hashes, sealed_digest
from kvserve_core.bodies import Buffer as Buffer
from kvserve_core.errors import ConfigError, FrameError, IntegrityError, KVServeError
from kvserve_core.spec import MAX_TOKENS, Region, Shard

MAGIC = b"kvserve\0"
VERSION = (1, 0)
"""Format this version writes; the first number changes when old readers cannot follow."""
READS = (1, 1)
"""Lowest and highest major version this version reads."""
ALIGN = 64
XXH3_PIECES = 1
"""Digest algorithm 1: xxh3-64 over the xxh3-64 of 16 KiB pieces."""
MAX_HEADER = 3968
"""Bytes of msgpack: with prelude, padding and trailer a frame's header stays within 4 KiB."""
MAX_SEGMENTS = 2**20
MAX_META = 2**16
MAX_PLANES = 255
MAX_ID = 2**16
"""Layer and head numbers, and tensor-parallel sizes, stay below this."""
MAX_SEGMENT_BYTES = 2**28
"""Original bytes of one segment: what a decoder may be made to allocate is a small multiple of it."""


_PRELUDE = struct.Struct("<8sBBBBIBBHIQ")
_DESCRIPTOR = struct.Struct("<IHBBHHHHIIIQI")
_DIGEST = struct.Struct("<Q")
_HASH = re.compile("[0-9a-f]{64}")
PRELUDE_BYTES = _PRELUDE.size
DESCRIPTOR_BYTES = _DESCRIPTOR.size + _DIGEST.size


class ChainInfo(msgspec.Struct, frozen=True):
    """A chain as a frame names it: stages with format versions for negotiation, and the spec that rebuilds it."""

    stages: tuple[str, ...]
    spec: str


class FrameHeader(msgspec.Struct, frozen=True):
    """What precedes all segments. Regions are coded by indices into ``planes``, ``layer_blocks`` and ``head_groups``.

    fingerprint: of the KVSpec. num_tokens: of the whole request. raw_bytes: original bytes of all segments.
    nonce: random per frame; it seeds every segment's digest, so that segments of two frames cannot be mixed.
    """

    transfer_id: str
    fingerprint: str
    profile: str
    num_tokens: int
    num_segments: int
    raw_bytes: int
    nonce: int
    shard: Shard
    chains: tuple[ChainInfo, ...]
    planes: tuple[str, ...]
    layer_blocks: tuple[tuple[int, ...], ...]
    head_groups: tuple[tuple[int, ...], ...]
    artefacts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Segment:
    """The unit on the wire: a region, the chain that coded it, its metadata (msgpack) and its bytes.

    A body on a device has its padding already.
    """

    index: int
    at: Region
    chain: int
    meta: bytes
    body: Body


@dataclass(frozen=True)
class Sealed:
    """A segment as bytes: ``head`` (descriptor, metadata, padding) and ``body`` (with padding). Digest included.

    hashes: of the pieces of a body on a device, computed there by the receiving transport from what arrived.
    """

    index: int
    head: Buffer
    body: Body
    hashes: bytes | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return len(self.head) + len(self.body)


def padding(size: int, align: int = ALIGN) -> int:
    """Bytes to add to ``size`` to reach a multiple of ``align``."""
    return -size % align


def pack_header(header: FrameHeader, version: tuple[int, int] = VERSION) -> bytes:
    """Prelude, msgpack and padding.

    Raises:
        ConfigError: the header does not fit in 4 KiB (long inline tables belong in an artefact).
    """
    body = msgspec.msgpack.encode(header)
    if len(body) > MAX_HEADER:
        raise ConfigError(
            f"the frame header needs {len(body)} bytes, at most {MAX_HEADER} fit; move inline tables of profile"
            f" {header.profile!r} into an artefact, or use a larger 'layer_block' or fewer 'head_groups'"
        )
    fields = (MAGIC, *version, version[0], 0, len(body), XXH3_PIECES, 0, 0, 0)
    body += bytes(padding(PRELUDE_BYTES + len(body)))
    unsigned = _PRELUDE.pack(*fields, 0)
    return _PRELUDE.pack(*fields, xxh3_64_intdigest(unsigned + body)) + body


def header_length(prelude: Buffer) -> int:
    """Total bytes of a packed header, from its prelude.

    Raises:
        FrameError: not a kvserve frame, a version this kvserve cannot read, or a length out of bounds.
    """
    if len(prelude) < PRELUDE_BYTES:
        raise FrameError(f"frame ends after {len(prelude)} bytes, inside its prelude", "prelude")
    magic, major, minor, min_reader, zero, size, algorithm, *reserved, _ = _PRELUDE.unpack_from(prelude)
    if magic != MAGIC:
        raise FrameError(f"not a kvserve frame: it starts with {bytes(magic)!r}, expected {MAGIC!r}", "prelude")
    if not 1 <= min_reader <= major:
        raise FrameError(f"frame version {major}.{minor} cannot have min_reader {min_reader}", "prelude")
    if min_reader > READS[1] or major < READS[0]:
        raise FrameError(
            f"frame version {major}.{minor} needs a reader of version {min_reader}, this one reads"
            f" {READS[0]} to {READS[1]}; upgrade the consumer first or set 'wire_compat' on the producer",
            "prelude",
        )
    if algorithm != XXH3_PIECES or zero or any(reserved):
        raise FrameError(f"unknown digest algorithm {algorithm}, or reserved bits set", "prelude")
    if size > MAX_HEADER:
        raise FrameError(f"header length {size} is out of bounds (at most {MAX_HEADER})", "prelude")
    return int(PRELUDE_BYTES + size + padding(PRELUDE_BYTES + size))


def unpack_header(data: Buffer) -> FrameHeader:
    """The header at the start of ``data``.

    Raises:
        FrameError: malformed or truncated. IntegrityError: its digest does not match.
    """
    total = header_length(data)
    if len(data) < total:
        raise FrameError(f"frame ends after {len(data)} bytes, its header has {total}", "header")
    view = memoryview(data)[:total]
    *fields, digest = _PRELUDE.unpack_from(view)
    unsigned = _PRELUDE.pack(*fields, 0)
    if xxh3_64_intdigest(unsigned + view[PRELUDE_BYTES:]) != digest:
        raise IntegrityError("digest mismatch; the bytes changed on the way", "header")
    body, rest = view[PRELUDE_BYTES : PRELUDE_BYTES + fields[5]], view[PRELUDE_BYTES + fields[5] :]
    header = _decode_header(body)
    canonical = (fields[1], fields[2]) > VERSION or msgspec.msgpack.encode(header) == body
    if any(rest) or not canonical:
        raise FrameError("the header is not in canonical form (duplicate keys, unknown fields or padding)", "header")
    return header


def _decode_header(body: memoryview) -> FrameHeader:
    try:
        header = msgspec.msgpack.decode(body, type=FrameHeader)
    except (msgspec.MsgspecError, KVServeError, ValueError, RecursionError) as error:
        raise FrameError(f"malformed header: {error}", "header") from None
    counts = (header.num_segments, header.num_tokens, header.raw_bytes, header.nonce)
    if min(counts) < 0 or header.num_segments > MAX_SEGMENTS or header.num_tokens > MAX_TOKENS:
        raise FrameError("a count in the header is out of bounds", "header")
    _check_tables(header)
    return header


def _check_tables(header: FrameHeader) -> None:
    tables = {"plane": header.planes, "layer block": header.layer_blocks, "head group": header.head_groups}
    for what, table in tables.items():
        if not all(table) or len(set(table)) < len(table):
            raise FrameError(f"an empty {what}, or one named twice", "header")
    if len(header.planes) > MAX_PLANES or header.shard.size > MAX_ID:
        raise FrameError("too many planes or ranks", "header")
    for ids in (header.shard.layers, *header.layer_blocks, *header.head_groups):
        if len(set(ids)) < len(ids) or (ids and not 0 <= min(ids) <= max(ids) < MAX_ID):
            raise FrameError(f"layer or head numbers {list(ids)[:4]} repeat or are not in 0-{MAX_ID - 1}", "header")
    if not all(map(_HASH.fullmatch, header.artefacts)):
        raise FrameError("an artefact is not named by its blake3 hash", "header")


class Codebook:
    """Regions to and from the indices of one header; made once per frame and side."""

    def __init__(self, header: FrameHeader) -> None:
        self.header = header
        self._planes = {p: i for i, p in enumerate(header.planes)}
        self._layers = {p: i for i, p in enumerate(header.layer_blocks)}
        self._heads = {p: i for i, p in enumerate(header.head_groups)}

    def seal(self, segment: Segment, hashes: bytes | None = None) -> Sealed:
        """The bytes of a segment, with padding and digest. A body of a multiple of 64 bytes is not copied.

        hashes: of the padded body's pieces (:func:`piece_hashes`), where they were computed on a device.

        Raises:
            FrameError: its region is not in the header's tables, or its metadata is too long.
        """
        at, meta, body = segment.at, segment.meta, segment.body
        try:
            plane, layers, heads = self._planes[at.plane], self._layers[at.layers], self._heads[at.heads]
        except KeyError as error:
            raise FrameError(f"{error.args[0]!r} is not in the header's tables", at) from None
        if len(meta) > MAX_META:
            raise FrameError(f"segment metadata of {len(meta)} bytes, at most {MAX_META} fit", at)
        descriptor = _DESCRIPTOR.pack(
            segment.index, segment.chain, plane, 0, at.group, layers, heads, 0, at.start, at.stop,
            len(meta), len(body), 0,
        )  # fmt: skip
        tail = meta + bytes(padding(DESCRIPTOR_BYTES + len(meta)))
        padded = body if len(body) % ALIGN == 0 else b"".join((host_bytes(body), bytes(padding(len(body)))))
        hashes = piece_hashes(host_bytes(padded)) if hashes is None else hashes
        digest = sealed_digest(self.header.nonce, segment.index, descriptor + tail, hashes)
        return Sealed(segment.index, descriptor + _DIGEST.pack(digest) + tail, padded)

    def unseal(self, sealed: Sealed, expect: Region | None = None) -> Segment:
        """The verified segment. ``expect``: the region it must be, where the reader knows.

        The padding of a body on a device is not looked at: the digest covers it, and nobody reads it.

        Raises:
            FrameError: malformed, or another region than expected. IntegrityError: its digest does not match.
        """
        where = expect or f"segment {sealed.index}"
        head = memoryview(sealed.head)
        body = memoryview(sealed.body) if isinstance(sealed.body, Buffer) else sealed.body
        if len(head) < DESCRIPTOR_BYTES or len(head) % ALIGN or len(body) % ALIGN:
            raise FrameError(f"segment of {len(head)} + {len(body)} bytes", where)
        index, chain, plane, flags, group, layers, heads, zero, start, stop, meta_len, body_len, zero2 = (
            _DESCRIPTOR.unpack_from(head)
        )
        if index != sealed.index or index >= self.header.num_segments:
            raise FrameError(f"descriptor says segment {index}, expected {sealed.index}", where)
        end = DESCRIPTOR_BYTES + meta_len
        if meta_len > MAX_META or end + padding(end) != len(head) or body_len + padding(body_len) != len(body):
            raise FrameError("segment lengths do not match its bytes", where)
        (digest,) = _DIGEST.unpack_from(head, _DESCRIPTOR.size)
        signed = b"".join((head[: _DESCRIPTOR.size], head[DESCRIPTOR_BYTES:]))
        hashes = piece_hashes(host_bytes(body)) if sealed.hashes is None else sealed.hashes
        if sealed_digest(self.header.nonce, index, signed, hashes) != digest:
            raise IntegrityError("digest mismatch; the bytes changed on the way", where)
        padded = isinstance(body, memoryview) and any(body[body_len:])
        if flags or zero or zero2 or any(head[end:]) or padded:
            raise FrameError("reserved bits or padding set", where)
        at = self.region(plane, group, layers, heads, start, stop, where)
        if expect is not None and at != expect:
            raise FrameError(f"the segment covers {at}", where)
        if chain >= len(self.header.chains):
            raise FrameError(f"chain {chain} of {len(self.header.chains)}", where)
        return Segment(index, at, chain, bytes(head[DESCRIPTOR_BYTES:end]), body[:body_len])

    def region(self, plane: int, group: int, layers: int, heads: int, start: int, stop: int, where: object) -> Region:
        """The region that a descriptor or a table entry codes.

        Raises:
            FrameError: an index outside the header's tables, or tokens outside the request.
        """
        h = self.header
        if plane >= len(h.planes) or layers >= len(h.layer_blocks) or heads >= len(h.head_groups):
            raise FrameError("index outside the header's tables", where)
        if not start < stop <= max(1, h.num_tokens):
            raise FrameError(f"tokens {start}-{stop} of {h.num_tokens}", where)
        return Region(group, h.planes[plane], h.layer_blocks[layers], h.head_groups[heads], start, stop)


def tables(plan: Iterable[Region]) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """The distinct planes, layer blocks and head groups of a plan, in order of appearance."""
    regions = list(plan)
    planes = dict.fromkeys(at.plane for at in regions)
    return (
        tuple(planes),
        tuple(dict.fromkeys(at.layers for at in regions)),
        tuple(dict.fromkeys(at.heads for at in regions)),
    )
