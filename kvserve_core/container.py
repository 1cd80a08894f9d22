"""The frame as a file: header, sealed segments in any order, a table to find them, a trailer.

Written in one pass, without a buffer of the whole; read through a memory map that touches a segment only when it is
asked for. ``docs/wire-format.md`` gives it to the byte.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from xxhash import xxh3_64

from kvserve_core.bodies import host_bytes
from kvserve_core.errors import FrameError, IntegrityError
from kvserve_core.payload import parse_meta
from kvserve_core.spec import Region
from kvserve_core.wire import (
    ALIGN,
    DESCRIPTOR_BYTES,
    Buffer,
    Codebook,
    FrameHeader,
    Sealed,
    Segment,
    header_length,
    pack_header,
    padding,
    unpack_header,
)

END_MAGIC = b"kvsend\0\0"
_ENTRY = struct.Struct("<QQIHBBHHHHIIQ")
_TRAILER = struct.Struct("<8sQQQQ24s")
_SIGNED = _TRAILER.size - 32  # the trailer up to its digest
_LENGTHS = struct.Struct("<IQI")
_PLACE = slice(0, 24)  # of a descriptor: number to stop, as a table entry repeats it
_META_AT = 24
_DIGEST = slice(DESCRIPTOR_BYTES - 8, DESCRIPTOR_BYTES)
ENTRY_BYTES = _ENTRY.size
TRAILER_BYTES = _TRAILER.size


class Entry(NamedTuple):
    """A row of the table: where a segment lies, what its descriptor says, its digest."""

    offset: int
    length: int
    number: int
    chain: int
    plane: int
    flags: int
    group: int
    layers: int
    heads: int
    zero: int
    start: int
    stop: int
    digest: int


def write_frame(out: BinaryIO, header: FrameHeader, segments: Iterable[Sealed]) -> int:
    """Write a whole frame and return its bytes. Segments may come in any order, each once.

    Raises:
        FrameError: a segment is missing, comes twice, or is not one of this header's.
    """
    start = pack_header(header)
    out.write(start)
    position = len(start)
    rows: dict[int, bytes] = {}
    for sealed in segments:
        if not 0 <= sealed.index < header.num_segments or sealed.index in rows:
            raise FrameError(f"segment {sealed.index} of {header.num_segments} comes twice or is not of this frame")
        if len(sealed.head) < DESCRIPTOR_BYTES or len(sealed.head) % ALIGN or len(sealed.body) % ALIGN:
            raise FrameError(f"segment {sealed.index} is not sealed: its length is not a multiple of {ALIGN}")
        head = bytes(sealed.head[:DESCRIPTOR_BYTES])
        if head[:4] != sealed.index.to_bytes(4, "little"):
            raise FrameError(f"segment {sealed.index} was sealed as another one")
        rows[sealed.index] = struct.pack("<QQ", position, sealed.nbytes) + head[_PLACE] + head[_DIGEST]
        out.write(sealed.head)
        out.write(host_bytes(sealed.body))
        position += sealed.nbytes
    if len(rows) < header.num_segments:
        missing = next(i for i in range(header.num_segments) if i not in rows)
        raise FrameError(f"{header.num_segments - len(rows)} segments are missing, the first is {missing}")
    end = _end(position, b"".join(rows[i] for i in range(len(rows))), header.nonce)
    out.write(end)
    return position + len(end)


def _end(table_at: int, table: bytes, nonce: int) -> bytes:
    fields = (END_MAGIC, table_at, len(table) // ENTRY_BYTES, nonce)
    digest = _sum(table, _TRAILER.pack(*fields, 0, b"")[:_SIGNED])
    return table + _TRAILER.pack(*fields, digest, b"")


def _sum(table: Buffer, signed: Buffer) -> int:
    state = xxh3_64(table)
    state.update(signed)
    return state.intdigest()


class FrameReader:
    """A frame in memory or in a file. Opening reads header, table and trailer; segments are read when asked for.

    Raises:
        FrameError: malformed or truncated; it names the prelude, header, table, trailer or region.
        IntegrityError: a digest does not match.
        OSError: the file cannot be opened.
    """

    def __init__(self, source: Buffer | str | os.PathLike[str]) -> None:
        self._map: mmap.mmap | None = None
        if isinstance(source, (str, os.PathLike)):
            source = self._open(Path(source))
        self._view = memoryview(source).cast("B")
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path) -> Buffer:
        with path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:  # mmap refuses an empty file with an error of its own
                return b""
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return memoryview(self._map)

    def _read(self) -> None:
        view = self._view
        self.header = unpack_header(view)
        self.version = (view[8], view[9])
        first = header_length(view)
        count, table_at = self._read_trailer(first)
        self.entries = tuple(map(Entry._make, _ENTRY.iter_unpack(view[table_at : table_at + count * ENTRY_BYTES])))
        self._codebook = Codebook(self.header)
        self.regions: tuple[Region, ...] = tuple(self._check(i, e) for i, e in enumerate(self.entries))
        position = first
        for entry in sorted(self.entries):
            if entry.offset != position:
                raise FrameError(f"segment {entry.number} starts at byte {entry.offset}, expected {position}", "table")
            position += entry.length
        if position != table_at:
            raise FrameError(f"segments end at byte {position}, the table starts at {table_at}", "table")

    def _read_trailer(self, first: int) -> tuple[int, int]:
        size = len(self._view)
        if size < first + TRAILER_BYTES:
            raise FrameError(f"frame ends after {size} bytes", "trailer")
        end = self._view[size - TRAILER_BYTES :]
        magic, table_at, count, nonce, digest, zeros = _TRAILER.unpack(end)
        if magic != END_MAGIC or any(zeros):
            raise FrameError("the frame does not end with a trailer; it is truncated or not whole", "trailer")
        if not first <= table_at <= size or table_at + count * ENTRY_BYTES + TRAILER_BYTES != size:
            raise FrameError(f"a table of {count} entries at byte {table_at} of {size}", "trailer")
        if nonce != self.header.nonce or count != self.header.num_segments:
            raise FrameError("nonce or number of segments is not the header's", "trailer")
        if _sum(self._view[table_at : size - TRAILER_BYTES], end[:_SIGNED]) != digest:
            raise IntegrityError("digest mismatch; the bytes changed since they were written", "table")
        return count, table_at

    def _check(self, i: int, e: Entry) -> Region:
        where = f"table entry {i}"
        if e.number != i or e.flags or e.zero or e.length < DESCRIPTOR_BYTES or e.length % ALIGN:
            raise FrameError(f"segment {e.number} of {e.length} bytes, or reserved bits set", where)
        if e.chain >= len(self.header.chains):
            raise FrameError(f"chain {e.chain} of {len(self.header.chains)}", where)
        return self._codebook.region(e.plane, e.group, e.layers, e.heads, e.start, e.stop, where)

    def sealed(self, index: int) -> Sealed:
        """Segment ``index`` as views of the frame; its digest is not yet checked.

        Raises:
            FrameError: no such segment, or it is not the one the table promises.
        """
        if not 0 <= index < len(self.entries):
            raise FrameError(f"segment {index} of {len(self.entries)}")
        entry, at = self.entries[index], self.regions[index]
        data = self._view[entry.offset : entry.offset + entry.length]
        if data[_PLACE] != _ENTRY.pack(*entry)[16:40] or data[_DIGEST] != _ENTRY.pack(*entry)[40:]:
            raise IntegrityError(f"segment {index} is not the one in the table", at)
        meta_bytes, _, _ = _LENGTHS.unpack_from(data, _META_AT)
        size = DESCRIPTOR_BYTES + meta_bytes
        size += padding(size)
        if size > len(data):
            raise FrameError(f"metadata of {meta_bytes} bytes in a segment of {len(data)}", at)
        return Sealed(index, data[:size], data[size:])

    def segment(self, index: int) -> Segment:
        """Segment ``index``, verified. Raises like :meth:`sealed`, and IntegrityError."""
        return self._codebook.unseal(self.sealed(index), self.regions[index])

    def segments(self) -> Iterator[Segment]:
        """All segments, verified, in the order they lie in the file."""
        for entry in sorted(self.entries):
            yield self.segment(entry.number)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole frame."""
        return len(self._view)

    def close(self) -> None:
        """Let go of the file; safe to call twice. Segments already handed out stay valid until they are dropped."""
        with contextlib.suppress(BufferError):  # views handed out keep the map until they go
            self._view.release()
            if self._map is not None:
                self._map.close()

    def __enter__(self) -> FrameReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def describe(reader: FrameReader, *, verify: bool = True) -> dict[str, Any]:
    """A frame as JSON-able values, for ``kvserve inspect``. ``verify`` reads every segment and checks its digest."""
    header = reader.header
    return {
        "version": list(reader.version),
        "transfer_id": header.transfer_id,
        "profile": header.profile,
        "fingerprint": header.fingerprint,
        "num_tokens": header.num_tokens,
        "shard": {"layers": list(header.shard.layers), "rank": header.shard.rank, "size": header.shard.size},
        "chains": [{"stages": list(chain.stages), "spec": chain.spec} for chain in header.chains],
        "artefacts": list(header.artefacts),
        "raw_bytes": header.raw_bytes,
        "file_bytes": reader.nbytes,
        "ratio": header.raw_bytes / reader.nbytes,
        "segments": [_describe_segment(reader, i, verify) for i in range(len(reader.entries))],
    }


def _describe_segment(reader: FrameReader, i: int, verify: bool) -> dict[str, Any]:
    entry, at = reader.entries[i], reader.regions[i]
    row: dict[str, Any] = {
        "index": i,
        "region": str(at),
        "chain": entry.chain,
        "wire_bytes": entry.length,
        "digest": f"{entry.digest:016x}",
        "ok": None,
        "error": None,
    }
    if verify:
        try:
            segment = reader.segment(i)
            row["code_bytes"] = sum(p.length * p.width for p in parse_meta(segment.meta, at).parts)
        except FrameError as error:
            row["error"] = error.reason
        row["ok"] = row["error"] is None
    return row
