from __future__ import annotations

import os
import struct

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frame_cases import PRELUDE, REGIONS, Forged, forge_header, make_header, make_segments, reference_digest
from kvserve_core.errors import ConfigError, FrameError, IntegrityError
from kvserve_core.spec import Region
from kvserve_core.wire import (
    MAX_HEADER,
    VERSION,
    ChainInfo,
    Codebook,
    Sealed,
    Segment,
    header_length,
    pack_header,
    tables,
    unpack_header,
)

HEADER = make_header()
BOOK = Codebook(HEADER)


def test_header_round_trip() -> None:
    data = pack_header(HEADER)
    assert len(data) % 64 == 0
    assert header_length(data[:32]) == len(data)
    assert unpack_header(data + b"segments follow") == HEADER


def test_header_is_what_the_document_says() -> None:
    assert pack_header(HEADER) == forge_header(msgspec.msgpack.encode(HEADER))


def test_header_of_the_largest_size_stays_within_the_bound() -> None:
    spare = MAX_HEADER - len(msgspec.msgpack.encode(make_header(profile="x" * 300)))
    full = make_header(profile="x" * (300 + spare))
    assert len(pack_header(full)) <= 4096 - 64  # the trailer takes the last 64
    assert unpack_header(pack_header(full)) == full
    with pytest.raises(ConfigError, match="artefact"):
        pack_header(make_header(profile="x" * (301 + spare)))


def test_older_minor_version_can_be_pinned() -> None:
    pinned = pack_header(HEADER, version=(1, 0))
    assert (pinned[8], pinned[9], pinned[10]) == (1, 0, 1)
    assert unpack_header(pinned) == HEADER


def test_newer_minor_version_with_a_new_field_is_read() -> None:
    later = msgspec.to_builtins(HEADER) | {"compression_of_hope": [1, 2]}
    body = msgspec.msgpack.encode(later)
    assert unpack_header(forge_header(body, {1: 1, 2: VERSION[1] + 1})) == HEADER
    with pytest.raises(FrameError, match="canonical"):
        unpack_header(forge_header(body))


def test_newer_major_version_that_this_reader_can_follow() -> None:
    body = msgspec.msgpack.encode(HEADER)
    assert unpack_header(forge_header(body, {1: 2, 3: 1})) == HEADER
    with pytest.raises(FrameError, match="upgrade the consumer"):
        unpack_header(forge_header(body, {1: 2, 3: 2}))


@pytest.mark.parametrize("reader", [0, 2])
def test_min_reader_must_make_sense(reader: int) -> None:
    with pytest.raises(FrameError, match="min_reader"):
        unpack_header(forge_header(msgspec.msgpack.encode(HEADER), {3: reader}))


def test_wrong_magic_is_named() -> None:
    with pytest.raises(FrameError, match=r"not a kvserve frame: it starts with b'PK.*prelude"):
        header_length(b"PK\x03\x04" + bytes(60))


def test_pickle_is_not_a_frame() -> None:
    with pytest.raises(FrameError, match="not a kvserve frame"):
        unpack_header(b"\x80\x04\x95" + b"cos\nsystem\n" * 10)


@pytest.mark.parametrize(("field", "value"), [(4, 1), (6, 2), (7, 1), (8, 1), (9, 1)])
def test_reserved_bits_and_algorithm(field: int, value: int) -> None:
    with pytest.raises(FrameError, match="reserved"):
        unpack_header(forge_header(msgspec.msgpack.encode(HEADER), {field: value}))


def test_header_length_beyond_the_bound() -> None:
    prelude = PRELUDE.pack(b"kvserve\0", 1, 0, 1, 0, 2**32 - 1, 1, 0, 0, 0, 0)
    with pytest.raises(FrameError, match="out of bounds"):
        header_length(prelude)


def test_every_truncation_of_the_header() -> None:
    data = pack_header(HEADER)
    for size in range(len(data)):
        with pytest.raises(FrameError, match=r"prelude|header"):
            unpack_header(data[:size])


def test_every_bit_of_the_header_counts() -> None:
    data = bytearray(pack_header(HEADER))
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameError):
            unpack_header(data)
        data[bit // 8] ^= 1 << bit % 8


MALICIOUS: dict[str, dict[str, object]] = {
    "negative count": {"num_segments": -1},
    "count of 2^62": {"num_segments": 2**62},
    "tokens of 2^62": {"num_tokens": 2**62},
    "negative raw bytes": {"raw_bytes": -1},
    "negative head": {"head_groups": [[-1, 0]]},
    "huge layer": {"layer_blocks": [[0, 2**62]]},
    "huge shard layer": {"shard": {"layers": [2**63], "rank": 0, "size": 1}},
    "head twice": {"head_groups": [[1, 1]]},
    "plane twice": {"planes": ["k", "k"]},
    "empty plane": {"planes": [""]},
    "too many planes": {"planes": [f"{i:x}" for i in range(256)]},
    "empty layer block": {"layer_blocks": [[]]},
    "rank beyond size": {"shard": {"layers": [0], "rank": 4, "size": 4}},
    "size of 2^40": {"shard": {"layers": [0], "rank": 0, "size": 2**40}},
    "nan": {"num_tokens": float("nan")},
    "bool": {"num_segments": True},
    "path as artefact": {"artefacts": ["../../etc/passwd"]},
    "ext type": {"transfer_id": msgspec.msgpack.Ext(1, b"cos\nsystem")},
    "bytes": {"fingerprint": b"f" * 64},
    "null": {"profile": None},
}


@pytest.mark.parametrize("change", MALICIOUS.values(), ids=MALICIOUS)
def test_malicious_header_with_a_right_digest(change: dict[str, object]) -> None:
    body = msgspec.msgpack.encode(msgspec.to_builtins(HEADER) | change)
    with pytest.raises(FrameError, match="header"):
        unpack_header(forge_header(body))


RAW_MSGPACK = {
    "array of 2^32 items": b"\xdd\xff\xff\xff\xff",
    "map of 2^32 items": b"\xdf\xff\xff\xff\xff",
    "string of 4 GiB": b"\x81\xabtransfer_id\xdb\xff\xff\xff\xff",
    "depth": b"\x81\xa6planes" + b"\x91" * 3000 + b"\xc0",
    "bad utf-8": b"\x81\xabtransfer_id\xa1\xff",
    "empty": b"",
    "trailing bytes": msgspec.msgpack.encode(HEADER) + b"\xc0",
    "duplicate key": b"\x8e" + msgspec.msgpack.encode(HEADER)[1:] + b"\xaanum_tokens\x04",
    "unknown key": b"\x8e" + msgspec.msgpack.encode(HEADER)[1:] + b"\xa4code\xa1x",
    "long form of an int": msgspec.msgpack.encode(HEADER).replace(b"\xaanum_tokens\x04", b"\xaanum_tokens\xcc\x04"),
}


@pytest.mark.parametrize("body", RAW_MSGPACK.values(), ids=RAW_MSGPACK)
def test_malicious_msgpack_with_a_right_digest(body: bytes) -> None:
    with pytest.raises(FrameError, match="header"):
        unpack_header(forge_header(body))


def test_header_padding_must_be_zero() -> None:
    body = msgspec.msgpack.encode(HEADER)
    data = forge_header(body + b"\0" * 3, {5: len(body)})
    assert unpack_header(data) == HEADER
    with pytest.raises(FrameError, match="canonical"):
        unpack_header(forge_header(body + b"\0\1\0", {5: len(body)}))


@pytest.mark.parametrize("size", [0, 1, 63, 64, 100, 16384, 16385, 70000])
def test_segment_round_trip(size: int) -> None:
    body = os.urandom(size)
    segment = Segment(1, REGIONS[1], 0, b"meta", body)
    sealed = BOOK.seal(segment)
    assert len(sealed.head) % 64 == 0
    assert len(sealed.body) % 64 == 0
    assert sealed.nbytes - size <= 48 + len(segment.meta) + 63 + 63
    assert BOOK.unseal(sealed, REGIONS[1]) == segment


def test_aligned_body_is_not_copied() -> None:
    body = bytearray(128)
    assert BOOK.seal(Segment(0, REGIONS[0], 0, b"", body)).body is body


def test_segment_is_what_the_document_says() -> None:
    for segment in make_segments():
        sealed = BOOK.seal(segment)
        assert (sealed.head, sealed.body) == Forged.of(HEADER, segment).seal(HEADER.nonce)


@given(st.binary(max_size=40000), st.integers(0, 2**64 - 1), st.integers(0, 2))
@settings(max_examples=50, deadline=None, derandomize=True, database=None)
def test_digest_agrees_with_the_reference(body: bytes, nonce: int, index: int) -> None:
    header = make_header(nonce=nonce)
    sealed = Codebook(header).seal(Segment(index, REGIONS[index], 0, b"m", body))
    head = bytes(sealed.head)
    expected = reference_digest(nonce, index, head[:40] + head[48:], bytes(sealed.body))
    assert struct.unpack_from("<Q", head, 40) == (expected,)


def test_every_bit_of_a_segment_counts() -> None:
    sealed = BOOK.seal(make_segments()[0])
    for which, size in (("head", len(sealed.head)), ("body", len(sealed.body))):
        for bit in range(8 * size):
            parts = {"head": bytearray(sealed.head), "body": bytearray(sealed.body)}
            parts[which][bit // 8] ^= 1 << bit % 8
            with pytest.raises(FrameError, match="group 0 plane k layers 0 heads 0-1 tokens 0-4"):
                BOOK.unseal(Sealed(0, **parts), REGIONS[0])


def test_every_truncation_of_a_segment() -> None:
    sealed = BOOK.seal(make_segments()[1])
    for size in range(len(sealed.head)):
        with pytest.raises(FrameError, match="plane v"):
            BOOK.unseal(Sealed(1, sealed.head[:size], sealed.body), REGIONS[1])
    for size in range(len(sealed.body)):
        with pytest.raises(FrameError, match="plane v"):
            BOOK.unseal(Sealed(1, sealed.head, sealed.body[:size]), REGIONS[1])


def test_swapped_segments() -> None:
    first, second, _ = map(BOOK.seal, make_segments())
    with pytest.raises(FrameError, match=r"expected 0 \(in group 0 plane k"):
        BOOK.unseal(Sealed(0, second.head, second.body), REGIONS[0])
    with pytest.raises(IntegrityError):
        BOOK.unseal(Sealed(0, first.head, second.body[: len(first.body)]), REGIONS[0])


def test_stale_segment_of_another_frame() -> None:
    stale = Codebook(make_header(nonce=HEADER.nonce + 1)).seal(make_segments()[0])
    with pytest.raises(IntegrityError, match="plane k"):
        BOOK.unseal(stale, REGIONS[0])


def test_another_region_than_expected() -> None:
    sealed = BOOK.seal(make_segments()[0])
    other = Region(0, "k", (0,), (0, 1), 0, 3)
    with pytest.raises(FrameError, match=r"covers .*tokens 0-4.*tokens 0-3"):
        BOOK.unseal(sealed, other)


def test_without_an_expected_region_the_index_is_named() -> None:
    sealed = BOOK.seal(make_segments()[2])
    assert BOOK.unseal(sealed).at == REGIONS[2]
    with pytest.raises(IntegrityError, match="segment 2"):
        BOOK.unseal(Sealed(2, sealed.head, bytes(len(sealed.body))))


INDEX, CHAIN, PLANE, FLAGS, GROUP, LAYERS, HEADS, ZERO, START, STOP, META, BODY, ZERO2 = range(13)
BAD_FIELDS = [
    (INDEX, 1), (INDEX, 2**32 - 1), (CHAIN, 1), (CHAIN, 2**16 - 1), (PLANE, 2), (PLANE, 255), (FLAGS, 1),
    (LAYERS, 2), (LAYERS, 2**16 - 1), (HEADS, 1), (ZERO, 1), (START, 4), (START, 5), (STOP, 0), (STOP, 5),
    (STOP, 2**32 - 1), (META, 0), (META, 2**16 + 1), (META, 2**32 - 1), (BODY, 0), (BODY, 2**62), (BODY, 2**64 - 1),
    (ZERO2, 1),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS)
def test_malicious_descriptor_with_a_right_digest(field: int, value: int) -> None:
    forged = Forged.of(HEADER, make_segments()[0])
    forged.fields[field] = value
    with pytest.raises(FrameError, match="segment 0"):
        BOOK.unseal(Sealed(0, *forged.seal(HEADER.nonce)))


@pytest.mark.parametrize(("meta", "body"), [(b"meta\1", bytes(100)), (b"meta", bytes(100) + b"\1")])
def test_padding_must_be_zero_even_with_a_right_digest(meta: bytes, body: bytes) -> None:
    forged = Forged.of(HEADER, Segment(0, REGIONS[0], 0, b"meta", bytes(100)))
    forged.meta, forged.body = meta, body
    with pytest.raises(FrameError, match="padding"):
        BOOK.unseal(Sealed(0, *forged.seal(HEADER.nonce)))


def test_segment_index_beyond_the_header() -> None:
    sealed = Codebook(make_header()).seal(make_segments()[2])
    with pytest.raises(FrameError, match="segment 2"):
        Codebook(make_header(num_segments=2)).unseal(sealed)


def test_sealing_what_the_header_does_not_name() -> None:
    with pytest.raises(FrameError, match="'v2' is not in the header"):
        BOOK.seal(Segment(0, Region(0, "v2", (0,), (0, 1), 0, 4), 0, b"", b""))
    with pytest.raises(FrameError, match="metadata of 70000 bytes"):
        BOOK.seal(Segment(0, REGIONS[0], 0, bytes(70000), b""))


def test_tables_keep_the_order_of_the_plan() -> None:
    assert tables(reversed(REGIONS)) == (("k", "v"), ((1,), (0,)), ((0, 1),))


def test_more_chains_than_one() -> None:
    book = Codebook(make_header(chains=(HEADER.chains[0], ChainInfo(("codec:zstd@1",), "{}"))))
    assert book.unseal(book.seal(Segment(0, REGIONS[0], 1, b"", b"x"))).chain == 1
