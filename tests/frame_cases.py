"""Frames for tests, and a forger that writes any bytes with right digests: the format once more, from the document.

``Forged`` shares no code with the writer in ``kvserve_core``, so that the two check each other.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from kvserve_core.container import write_frame
from kvserve_core.errors import FrameError
from kvserve_core.spec import Region, Shard
from kvserve_core.wire import ChainInfo, Codebook, FrameHeader, Segment

PRELUDE = struct.Struct("<8sBBBBIBBHIQ")
DESCRIPTOR = struct.Struct("<IHBBHHHHIIIQI")
ENTRY = struct.Struct("<QQIHBBHHHHIIQ")
RAW_SPEC = '{"quantizer":{"name":"identity"},"codec":{"name":"raw"}}'
RAW_STAGES = ("quantizer:identity@1", "codec:raw@1")
REGIONS = (
    Region(0, "k", (0,), (0, 1), 0, 4),
    Region(0, "v", (0,), (0, 1), 0, 4),
    Region(0, "k", (1,), (0, 1), 0, 4),
)


def make_header(num_segments: int = len(REGIONS), nonce: int = 0x1234_5678_9ABC_DEF0, **changes: Any) -> FrameHeader:
    values: dict[str, Any] = {
        "transfer_id": "request-1",
        "fingerprint": "f" * 64,
        "profile": "raw",
        "num_tokens": 4,
        "num_segments": num_segments,
        "raw_bytes": 768,
        "nonce": nonce,
        "shard": Shard((0, 1)),
        "chains": (ChainInfo(RAW_STAGES, RAW_SPEC),),
        "planes": ("k", "v"),
        "layer_blocks": ((0,), (1,)),
        "head_groups": ((0, 1),),
    }
    return FrameHeader(**(values | changes))


def make_segments(body_bytes: int = 100) -> list[Segment]:
    """Wire-level segments; metadata and body mean nothing."""
    return [
        Segment(i, at, 0, b"meta" * (i + 1), bytes((7 * i + j) % 256 for j in range(body_bytes + 40 * i)))
        for i, at in enumerate(REGIONS)
    ]


def make_file(header: FrameHeader, segments: Sequence[Segment]) -> bytes:
    book, out = Codebook(header), io.BytesIO()
    write_frame(out, header, map(book.seal, segments))
    return out.getvalue()


def refusal(call: Callable[[], object], kind: type[Exception] = FrameError) -> str | None:
    """The message of the error that ``call`` raises, None if it raises none; any other error goes on."""
    try:
        call()
    except kind as error:
        return str(error)
    return None


def pad(data: bytes) -> bytes:
    return data + bytes(-len(data) % 64)


def forge_header(body: bytes, prelude: dict[int, int] | None = None) -> bytes:
    """Header bytes around any msgpack; ``prelude`` overrides fields by position. The digest is right."""
    fields: list[Any] = [b"kvserve\0", 1, 0, 1, 0, len(body), 1, 0, 0, 0]
    for i, value in (prelude or {}).items():
        fields[i] = value
    padded = body + bytes(-(32 + len(body)) % 64)
    return PRELUDE.pack(*fields, xxh3_64_intdigest(PRELUDE.pack(*fields, 0) + padded)) + padded


def reference_digest(nonce: int, index: int, head: bytes, body: bytes) -> int:
    hashes = xxh3_64_digest(head) + b"".join(xxh3_64_digest(body[i : i + 16384]) for i in range(0, len(body), 16384))
    return xxh3_64_intdigest(hashes, (nonce + (index + 1) * 0x9E3779B97F4A7C15) % 2**64)


@dataclass
class Forged:
    """A segment whose descriptor holds any values, sealed with a right digest."""

    fields: list[int]
    meta: bytes
    body: bytes

    @classmethod
    def of(cls, header: FrameHeader, segment: Segment) -> Forged:
        at = segment.at
        codes = (header.planes.index(at.plane), 0, at.group, header.layer_blocks.index(at.layers))
        heads = (header.head_groups.index(at.heads), 0, at.start, at.stop)
        sizes = (len(segment.meta), len(segment.body), 0)
        return cls([segment.index, segment.chain, *codes, *heads, *sizes], segment.meta, bytes(segment.body))

    def seal(self, nonce: int) -> tuple[bytes, bytes]:
        descriptor = DESCRIPTOR.pack(*self.fields)
        head = pad(descriptor + bytes(8) + self.meta)
        body = pad(self.body)
        digest = reference_digest(nonce, self.fields[0], descriptor + head[48:], body)
        return descriptor + struct.pack("<Q", digest) + head[48:], body


@dataclass
class ForgedFile:
    """A file whose header, segments, table and trailer hold any values, with right digests."""

    header: bytes
    nonce: int
    segments: list[Forged]
    entry: dict[tuple[int, int], int] = field(default_factory=dict)
    trailer: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, header: FrameHeader, segments: Sequence[Segment]) -> ForgedFile:
        body = msgspec.msgpack.encode(header)
        return cls(forge_header(body), header.nonce, [Forged.of(header, s) for s in segments])

    def entries(self, sealed: list[tuple[bytes, bytes]]) -> Iterator[bytes]:
        position = len(self.header)
        for i, (head, body) in enumerate(sealed):
            length = len(head) + len(body)
            values = [position, length, *DESCRIPTOR.unpack_from(head)[:10], *struct.unpack("<Q", head[40:48])]
            for (row, column), value in self.entry.items():
                if row == i:
                    values[column] = value
            yield ENTRY.pack(*values)
            position += length

    def pack(self) -> bytes:
        sealed = [s.seal(self.nonce) for s in self.segments]
        table = b"".join(self.entries(sealed))
        data = self.header + b"".join(head + body for head, body in sealed)
        fields = [len(data), len(self.segments), self.nonce]
        for i, value in self.trailer.items():
            fields[i] = value
        end = struct.pack("<8sQQQ", b"kvsend\0\0", *fields)
        return data + table + end + struct.pack("<Q", xxh3_64_intdigest(table + end)) + bytes(24)
