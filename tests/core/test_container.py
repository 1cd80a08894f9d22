from __future__ import annotations

import io
import json
import struct
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frame_cases import REGIONS, ForgedFile, make_file, make_header, make_segments
from kvserve_core.container import FrameReader, describe, write_frame
from kvserve_core.errors import FrameError, IntegrityError
from kvserve_core.wire import Codebook, Sealed, Segment

HEADER = make_header()
BOOK = Codebook(HEADER)
FILE = make_file(HEADER, make_segments())


def read_all(data: bytes) -> list[Segment]:
    with FrameReader(data) as reader:
        return list(reader.segments())


def test_round_trip_in_memory() -> None:
    with FrameReader(FILE) as reader:
        assert reader.header == HEADER
        assert reader.version == (1, 0)
        assert reader.regions == REGIONS
        assert reader.nbytes == len(FILE)
        assert [reader.segment(i) for i in range(3)] == make_segments()


def test_round_trip_through_a_file(tmp_path: Path) -> None:
    path = tmp_path / "frame.kv"
    path.write_bytes(FILE)
    with FrameReader(path) as reader:
        assert list(reader.segments()) == make_segments()
    with FrameReader(str(path)) as reader:
        assert reader.header == HEADER


def test_segments_handed_out_outlive_the_reader(tmp_path: Path) -> None:
    path = tmp_path / "frame.kv"
    path.write_bytes(FILE)
    reader = FrameReader(path)
    segment = reader.segment(0)
    reader.close()
    reader.close()
    assert segment == make_segments()[0]


def test_file_is_what_the_document_says() -> None:
    assert ForgedFile.of(HEADER, make_segments()).pack() == FILE


def test_write_returns_the_bytes_written() -> None:
    out = io.BytesIO()
    assert write_frame(out, HEADER, map(BOOK.seal, make_segments())) == len(out.getvalue()) == len(FILE)


@given(st.permutations(range(3)))
@settings(max_examples=6, deadline=None, derandomize=True, database=None)
def test_segments_may_be_written_in_any_order(order: list[int]) -> None:
    segments = make_segments()
    out = io.BytesIO()
    write_frame(out, HEADER, [BOOK.seal(segments[i]) for i in order])
    reader = FrameReader(out.getvalue())
    assert [s.index for s in reader.segments()] == order
    assert [reader.segment(i) for i in range(3)] == segments


def test_a_frame_without_segments() -> None:
    empty = make_header(0, num_tokens=0, raw_bytes=0, planes=(), layer_blocks=(), head_groups=())
    assert read_all(make_file(empty, [])) == []


def test_writing_refuses_missing_and_repeated_segments() -> None:
    sealed = [BOOK.seal(s) for s in make_segments()]
    with pytest.raises(FrameError, match="2 segments are missing, the first is 0"):
        write_frame(io.BytesIO(), HEADER, sealed[2:])
    with pytest.raises(FrameError, match="segment 1 of 3 comes twice"):
        write_frame(io.BytesIO(), HEADER, [sealed[0], sealed[1], sealed[1]])
    with pytest.raises(FrameError, match="segment 2 of 2"):
        write_frame(io.BytesIO(), make_header(2), sealed)


def test_writing_refuses_what_is_not_sealed() -> None:
    sealed = BOOK.seal(make_segments()[0])
    for bad in (Sealed(0, sealed.head[:40], b""), Sealed(0, sealed.head, sealed.body[:-1])):
        with pytest.raises(FrameError, match="not sealed"):
            write_frame(io.BytesIO(), HEADER, [bad])
    with pytest.raises(FrameError, match="sealed as another"):
        write_frame(io.BytesIO(), HEADER, [Sealed(1, sealed.head, sealed.body)])


class CountingFile(io.RawIOBase):
    """Takes what is written and remembers only the largest piece."""

    largest = 0

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]  # RawIOBase has no narrower signature to keep
        self.largest = max(self.largest, len(data))
        return len(data)


def test_writing_streams() -> None:
    header = make_header(64, layer_blocks=tuple((i,) for i in range(64)))
    book = Codebook(header)
    body = bytes(1 << 20)
    plan = [REGIONS[0].__class__(0, "k", (i,), (0, 1), 0, 4) for i in range(64)]
    out = CountingFile()
    tracemalloc.start()
    total = write_frame(out, header, (book.seal(Segment(i, at, 0, b"", body)) for i, at in enumerate(plan)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert total > 64 << 20
    assert out.largest == 1 << 20
    assert peak < 4 << 20


def test_every_truncation_of_a_file() -> None:
    for size in range(len(FILE)):
        with pytest.raises(FrameError):
            read_all(FILE[:size])


def test_every_bit_of_a_file_counts() -> None:
    data = bytearray(FILE)
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameError):
            read_all(data)
        data[bit // 8] ^= 1 << bit % 8


def test_bytes_after_the_frame() -> None:
    with pytest.raises(FrameError, match="trailer"):
        read_all(FILE + bytes(64))


def test_empty_and_missing_files(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(FrameError, match="0 bytes, inside its prelude"):
        FrameReader(tmp_path / "empty")
    with pytest.raises(FileNotFoundError):
        FrameReader(tmp_path / "missing")


def test_opening_reads_no_segment() -> None:
    data = bytearray(FILE)
    with FrameReader(FILE) as reader:
        first, length = reader.entries[0].offset, sum(e.length for e in reader.entries)
    data[first : first + length] = bytes(length)
    with FrameReader(data) as reader:
        assert reader.regions == REGIONS
        with pytest.raises(IntegrityError, match=r"not the one in the table.*plane k"):
            reader.sealed(0)


def test_segment_of_an_older_frame_in_the_same_place() -> None:
    older = make_file(make_header(nonce=1), make_segments())
    with FrameReader(FILE) as reader:
        entry = reader.entries[1]
    span = slice(entry.offset, entry.offset + entry.length)
    data = bytearray(FILE)
    data[span] = older[span]
    with pytest.raises(IntegrityError, match="plane v"):
        read_all(data)


def test_segment_number_out_of_range() -> None:
    reader = FrameReader(FILE)
    for number in (-1, 3, 2**62):
        with pytest.raises(FrameError, match=f"segment {number} of 3"):
            reader.sealed(number)


BAD_ENTRIES = [
    (0, 0), (0, 2**62), (0, 2**64 - 1), (1, 0), (1, 64), (1, 2**62), (1, 2**64 - 64), (1, 2**64 - 1), (2, 1),
    (2, 2**32 - 1), (3, 1), (3, 2**16 - 1), (4, 1), (4, 255), (5, 1), (6, 1), (7, 1), (7, 9), (8, 1), (9, 1),
    (10, 4), (10, 5), (11, 0), (11, 5), (11, 2**32 - 1), (12, 0),
]  # fmt: skip


@pytest.mark.parametrize(("column", "value"), BAD_ENTRIES)
def test_malicious_table_with_a_right_digest(column: int, value: int) -> None:
    forged = ForgedFile.of(HEADER, make_segments())
    forged.entry[0, column] = value
    with pytest.raises(FrameError, match=r"table|group 0"):
        read_all(forged.pack())


@pytest.mark.parametrize(
    ("field", "value"),
    [(0, 0), (0, 2**62), (0, 2**64 - 1), (1, 0), (1, 2), (1, 4), (1, 2**62), (1, 2**64 - 1), (2, 0)],
)
def test_malicious_trailer_with_a_right_digest(field: int, value: int) -> None:
    forged = ForgedFile.of(HEADER, make_segments())
    forged.trailer[field] = value
    with pytest.raises(FrameError, match=r"trailer|header"):
        read_all(forged.pack())


def test_overlapping_segments() -> None:
    forged = ForgedFile.of(HEADER, make_segments())
    first = len(forged.header)
    forged.entry = {(1, 0): first}
    with pytest.raises(FrameError, match="starts at byte"):
        read_all(forged.pack())


def test_metadata_longer_than_its_segment() -> None:
    forged = ForgedFile.of(HEADER, make_segments())
    forged.segments[0].fields[10] = 2**32 - 1
    with pytest.raises(FrameError, match=r"metadata of 4294967295 bytes.*plane k"):
        read_all(forged.pack())


def test_describe_is_json() -> None:
    with FrameReader(FILE) as reader:
        told = json.loads(json.dumps(describe(reader)))
    assert told["version"] == [1, 0]
    assert told["ratio"] == pytest.approx(768 / len(FILE))
    assert told["chains"][0]["stages"] == ["quantizer:identity@1", "codec:raw@1"]
    assert [s["wire_bytes"] for s in told["segments"]] == [192, 256, 256]
    assert told["segments"][1]["region"] == "group 0 plane v layers 0 heads 0-1 tokens 0-4"


def test_describe_tells_bad_segments_from_good_ones() -> None:
    meta = b"\x92\x91\x90\x91\x97\x10\xcd\x01\x00\x01\x01\x10\xc2\xc0"  # no parameters, one stream of 16 bytes
    segments = [Segment(i, at, 0, meta, bytes(64)) for i, at in enumerate(REGIONS)]
    data = bytearray(make_file(HEADER, segments))
    with FrameReader(data) as reader:
        data[reader.entries[1].offset + 64] ^= 1
        rows = describe(reader)["segments"]
        unread = describe(reader, verify=False)["segments"]
    assert [row["ok"] for row in rows] == [True, False, True]
    assert "digest mismatch" in rows[1]["error"]
    assert rows[0]["code_bytes"] == 16
    assert [row["ok"] for row in unread] == [None] * 3


sizes = st.lists(st.integers(0, 700), max_size=30)


@given(sizes, st.integers(0, 2**64 - 1))
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_overhead_is_bounded(bodies: list[int], nonce: int) -> None:
    """Raw + 192 bytes a segment + 4 KiB + 48 bytes a segment, with metadata of up to 80 bytes."""
    header = make_header(len(bodies), nonce, layer_blocks=tuple((i,) for i in range(len(bodies))))
    at = [REGIONS[0].__class__(0, "k", (i,), (0, 1), 0, 4) for i in range(len(bodies))]
    data = make_file(header, [Segment(i, at[i], 0, bytes(80), bytes(n)) for i, n in enumerate(bodies)])
    assert len(data) <= sum(bodies) + (192 + 48) * len(bodies) + 4096
    assert [len(s.body) for s in read_all(data)] == bodies


def test_large_counts_allocate_nothing() -> None:
    forged = ForgedFile.of(make_header(2**20), make_segments())
    tracemalloc.start()
    with pytest.raises(FrameError):
        FrameReader(forged.pack())
    for value in (2**20, 2**62):
        forged.trailer[1] = value
        with pytest.raises(FrameError):
            FrameReader(forged.pack())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_trailer_zeros_are_checked() -> None:
    data = bytearray(FILE)
    struct.pack_into("<B", data, len(data) - 1, 1)
    with pytest.raises(FrameError, match="does not end with a trailer"):
        FrameReader(data)
