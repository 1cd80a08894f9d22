"""Hostile frames: over 20,000 cases in the normal run, reproducible. Only the FrameError family may come out.

Longer, with fresh cases each time: ``KVSERVE_FUZZ=50 python -m pytest tests/core/test_frame_fuzz.py`` (50 times).
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from frame_cases import REGIONS, Forged, ForgedFile, forge_header, make_file, make_header, make_segments, refusal
from fuzz_settings import fuzz
from kvserve_core.container import FrameReader, describe
from kvserve_core.errors import FrameError
from kvserve_core.payload import Unpacked
from kvserve_core.wire import Codebook, Sealed, Segment, header_length, unpack_header

HEADER = make_header()
FIELDS: dict[str, Any] = msgspec.to_builtins(HEADER)
BOOK = Codebook(HEADER)
SEGMENTS = make_segments()
FILE = make_file(HEADER, SEGMENTS)
OTHER = make_file(make_header(nonce=99), SEGMENTS)

edges = st.sampled_from([0, 1, 2, 63, 64, 127, 128, 255, 256, 2**16 - 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1])
wide = st.sampled_from([2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 64, 2**64 - 1])
negative = st.sampled_from([-1, -2, -64, -(2**31), -(2**63)])
text = st.sampled_from(["", "k", "v", "kv", "uint8", "bfloat16", "float64", "object", "../../x", "\0", "a" * 300])
scalars = st.one_of(
    edges, wide, negative, text, st.none(), st.booleans(), st.floats(), st.binary(max_size=8), st.text(max_size=8)
)
values = st.recursive(
    scalars | st.builds(msgspec.msgpack.Ext, st.integers(-128, 127), st.binary(max_size=8)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def u(bits: int) -> st.SearchStrategy[int]:
    """An unsigned field: edges of every size, and any value."""
    return st.one_of(edges | wide, st.integers(0, 300), st.integers(0, 2**64 - 1)).map(lambda x: x % 2**bits)


def read_everything(data: bytes) -> list[Segment]:
    with FrameReader(data) as reader:
        describe(reader)
        return list(reader.segments())


def refused(data: bytes) -> bool:
    """Whether the frame was refused as it should be."""
    return refusal(lambda: read_everything(data)) is not None


@given(st.binary(max_size=300))
@fuzz(3000)
def test_any_bytes(data: bytes) -> None:
    for attempt in (data, FILE[:32] + data, b"kvserve\0" + data):
        with pytest.raises(FrameError):
            read_everything(attempt)


@given(st.binary(max_size=200))
@fuzz(2500)
def test_any_header_with_a_right_digest(body: bytes) -> None:
    with pytest.raises(FrameError, match="header"):
        unpack_header(forge_header(body))


@given(st.lists(st.tuples(st.integers(0, len(FILE) - 1), st.integers(1, 255)), min_size=1, max_size=6))
@fuzz(4000)
def test_changed_bytes(changes: list[tuple[int, int]]) -> None:
    data = bytearray(FILE)
    for at, mask in changes:
        data[at] ^= mask
    assume(data != FILE)
    assert refused(bytes(data))


@given(st.integers(0, len(FILE)), st.integers(0, len(FILE)), st.integers(0, len(FILE)))
@fuzz(3000)
def test_moved_and_missing_pieces(a: int, b: int, c: int) -> None:
    a, b, c = sorted((a, b, c))
    for data in (FILE[:a] + FILE[b:], FILE[:b] + FILE[a:], FILE[:a] + FILE[b:c] + FILE[a:b] + FILE[c:]):
        if data != FILE:
            assert refused(data)


@given(st.integers(0, len(FILE) // 64), st.integers(0, len(FILE) // 64))
@fuzz(500)
def test_pieces_of_another_frame(a: int, b: int) -> None:
    span = slice(64 * min(a, b), 64 * max(a, b))
    data = bytearray(FILE)
    data[span] = OTHER[span]
    assume(bytes(data) not in (FILE, OTHER))
    assert refused(bytes(data))


ids = st.lists(st.lists(edges | wide | negative | st.integers(0, 3), max_size=3), max_size=3)
plausible: dict[str, st.SearchStrategy[Any]] = {
    "transfer_id": text,
    "fingerprint": text,
    "profile": text,
    "num_tokens": edges | wide | negative,
    "num_segments": edges | wide | negative,
    "raw_bytes": edges | wide | negative,
    "nonce": edges | wide | negative,
    "shard": st.fixed_dictionaries({"layers": st.lists(edges | wide, max_size=4), "rank": edges, "size": edges | wide}),
    "chains": st.lists(st.fixed_dictionaries({"stages": st.lists(text, max_size=2), "spec": text}), max_size=3),
    "planes": st.lists(text, max_size=4),
    "layer_blocks": ids,
    "head_groups": ids,
    "artefacts": st.lists(text | st.just("0" * 64), max_size=2),
}


@given(st.fixed_dictionaries({}, optional={name: plausible[name] | values for name in FIELDS}))
@fuzz(1000)
def test_header_fields(changes: dict[str, Any]) -> None:
    body = msgspec.msgpack.encode(FIELDS | changes)
    assume(len(body) < 3900)
    forged = ForgedFile.of(HEADER, SEGMENTS)
    forged.header = forge_header(body)
    refused(forged.pack())


@given(st.sampled_from(sorted(FIELDS)), st.data())
@fuzz(2000)
def test_one_header_field(name: str, data: st.DataObject) -> None:
    """One field at a time comes further than many at once."""
    forged = ForgedFile.of(HEADER, SEGMENTS)
    changed = FIELDS | {name: data.draw(plausible[name])}
    forged.header = forge_header(msgspec.msgpack.encode(changed))
    forged.nonce = changed["nonce"] % 2**64
    refused(forged.pack())


@given(st.dictionaries(st.integers(1, 9), u(8), min_size=1, max_size=3))
@fuzz(500)
def test_prelude_fields(changes: dict[int, int]) -> None:
    body = msgspec.msgpack.encode(HEADER)
    data = forge_header(body, changes)
    if refusal(lambda: unpack_header(data)) is None:
        assert unpack_header(data) == HEADER
        assert header_length(data) <= 4096


WIDTHS = (32, 16, 8, 8, 16, 16, 16, 16, 32, 32, 32, 64, 32)
descriptors = st.fixed_dictionaries({}, optional={i: u(bits) for i, bits in enumerate(WIDTHS)})


@given(st.integers(0, 2), descriptors, st.binary(max_size=80), st.binary(max_size=80))
@fuzz(2000)
def test_descriptor_fields(which: int, changes: dict[int, int], meta: bytes, body: bytes) -> None:
    forged = Forged.of(HEADER, Segment(which, REGIONS[which], 0, meta, body))
    for i, value in changes.items():
        forged.fields[i] = value
    head, rest = forged.seal(HEADER.nonce)
    sealed = Sealed(which, head, rest)
    message = refusal(lambda: BOOK.unseal(sealed, REGIONS[which]))
    if message is None:
        segment = BOOK.unseal(sealed, REGIONS[which])
        assert (segment.at, segment.chain) == (REGIONS[which], 0)
    else:
        assert str(REGIONS[which]) in message


@given(
    st.dictionaries(st.tuples(st.integers(0, 2), st.integers(0, 12)), u(64), max_size=3),
    st.dictionaries(st.integers(0, 2), u(64), max_size=2),
)
@fuzz(1500)
def test_table_and_trailer_fields(entry: dict[tuple[int, int], int], trailer: dict[int, int]) -> None:
    bits = (64, 64, *WIDTHS[:10], 64)
    forged = ForgedFile.of(HEADER, SEGMENTS)
    forged.entry = {(row, column): value % 2 ** bits[column] for (row, column), value in entry.items()}
    forged.trailer = trailer
    data = forged.pack()
    assert refused(data) or data == FILE


param = st.tuples(text, text, st.lists(edges | wide | negative | st.integers(0, 9), max_size=7)).map(list)
part = st.tuples(*[edges | wide | negative | st.integers(0, 64)] * 5, st.booleans(), st.none() | text).map(list)
honest_param = st.tuples(text, st.sampled_from(["uint8", "float32"]), st.lists(st.integers(0, 4), max_size=4))
honest_part = st.integers(0, 64).map(lambda n: [n, 16, 1, 1, n, False, None])
metas = st.tuples(
    st.lists(st.lists(param | honest_param.map(list), max_size=2), max_size=3),
    st.lists(part | honest_part, max_size=3),
).map(list)


@given(metas | values, st.binary(max_size=64), st.integers(0, 2))
@fuzz(2000)
def test_segment_metadata(meta: Any, body: bytes, rows: int) -> None:
    padded = body + bytes(-len(body) % 64) + bytes(64 * rows)
    packed = msgspec.msgpack.encode(meta)
    message = refusal(lambda: Unpacked(packed, padded, 4096, REGIONS[0]))
    if message is None:
        assert sum(blob.numel() for blob in Unpacked(packed, padded, 4096, REGIONS[0]).blobs) <= len(padded)
    else:
        assert str(REGIONS[0]) in message


@given(st.binary(max_size=64))
@fuzz(1500)
def test_any_metadata(meta: bytes) -> None:
    message = refusal(lambda: Unpacked(meta, bytes(64), 4096, REGIONS[0]))
    assert message is None or str(REGIONS[0]) in message
