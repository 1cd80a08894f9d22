from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve_core.errors import FrameError
from kvserve_core.payload import Unpacked, as_bytes, pack, parse_meta
from kvserve_core.spec import DType, Region
from kvserve_core.tensor import TORCH, Part
from kvserve_core.wire import MAX_SEGMENT_BYTES

AT = Region(0, "k", (0,), (0, 1), 0, 16)
RAW_BYTES = 4096


def unpack(meta: Any, body: bytes = b"", raw_bytes: int = RAW_BYTES) -> Unpacked:
    return Unpacked(meta if isinstance(meta, bytes) else msgspec.msgpack.encode(meta), body, raw_bytes, AT)


def stream(**changes: Any) -> list[Any]:
    fields = {"length": 64, "alphabet": 256, "rows": 1, "width": 1, "nbytes": 64, "coded": False, "table": None}
    return list((fields | changes).values())


def test_round_trip() -> None:
    scale, zero = torch.randn(3, 5).bfloat16(), torch.arange(7, dtype=torch.int32)
    codes, wide = torch.arange(100, dtype=torch.uint8), torch.arange(30, dtype=torch.int16)
    meta, body = pack([{}, {"scale": scale, "zero": zero}], [Part(codes, 100, 4), Part(wide, 30)], [None, None])
    assert len(body) % 64 == 0
    got = unpack(meta, body)
    assert got.stages[0] == {}
    assert torch.equal(got.stages[1]["scale"], scale)
    assert torch.equal(got.stages[1]["zero"], zero)
    assert torch.equal(got.blobs[0], codes)
    assert torch.equal(got.blobs[1].view(torch.int16), wide)
    assert [(p.length, p.alphabet, p.rows, p.width, p.coded) for p in got.parts] == [
        (100, 100, 4, 1, False),
        (30, 30, 1, 2, False),
    ]


@given(
    st.lists(st.tuples(st.sampled_from(list(DType)), st.lists(st.integers(0, 4), max_size=4)), max_size=5),
    st.lists(st.integers(0, 300), max_size=4),
)
@settings(max_examples=100)
def test_round_trip_of_any_shape(tensors: list[tuple[DType, list[int]]], lengths: list[int]) -> None:
    params = {f"p{i}": torch.zeros(shape, dtype=TORCH[d]) + i for i, (d, shape) in enumerate(tensors)}
    parts = [Part(torch.arange(n).to(torch.uint8), 256) for n in lengths]
    meta, body = pack([params], parts, [None] * len(parts))
    got = unpack(meta, body)
    assert got.stages[0].keys() == params.keys()
    for name, value in params.items():
        assert got.stages[0][name].dtype == value.dtype
        assert torch.equal(got.stages[0][name], value)
    assert all(torch.equal(b, p.codes) for b, p in zip(got.blobs, parts, strict=True))


def test_coded_streams_keep_their_bytes() -> None:
    meta, body = pack([{}], [Part(torch.zeros(50, dtype=torch.uint8), 2)], [b"coded"])
    got = unpack(meta, body)
    assert got.parts[0].coded
    assert bytes(as_bytes(got.blobs[0])) == b"coded"


def test_result_does_not_share_the_senders_buffer() -> None:
    meta, body = pack([{}], [Part(torch.ones(16, dtype=torch.uint8), 2)], [None])
    got = unpack(meta, body)
    body[:] = bytes(len(body))
    assert int(got.blobs[0].sum()) == 16


def test_as_bytes_shares_memory() -> None:
    x = torch.zeros(4, dtype=torch.int16)
    as_bytes(x)[0] = 1
    assert x[0] == 1


BIG = 2**62
HOSTILE_META: dict[str, Any] = {
    "not msgpack": b"\xc1",
    "pickle": b"\x80\x04\x95cos\nsystem\n",
    "empty": b"",
    "depth": b"\x91" * 4000,
    "array of 2^32": b"\xdd\xff\xff\xff\xff",
    "bad utf-8": b"\x92\x91\x91\x93\xa1\xff\xa5uint8\x91\x01\x90",
    "ext": msgspec.msgpack.encode([[], msgspec.msgpack.Ext(5, b"x")]),
    "a third field": [[[]], [], 1],
    "unknown dtype": [[[["p", "float64", [1]]]], []],
    "object dtype": [[[["p", "object", [1]]]], []],
    "255 dimensions": [[[["p", "uint8", [1] * 255]]], []],
    "negative dimension": [[[["p", "uint8", [-1]]]], []],
    "two negative dimensions": [[[["p", "uint8", [-4, -4]]]], []],
    "dimension of 2^62": [[[["p", "uint8", [BIG]]]], []],
    "empty with a stride of 2^63": [[[["p", "uint8", [0, 2**63]]]], []],
    "product that wraps at 2^64": [[[["p", "uint8", [2**32, 2**32]]]], []],
    "dimension that is a float": [[[["p", "uint8", [1.5]]]], []],
    "nan": [[[["p", "uint8", [float("nan")]]]], []],
    "parameter twice": [[[["p", "uint8", [1]], ["p", "uint8", [1]]]], []],
    "length of 2^62": [[[]], [stream(length=BIG, coded=True)]],
    "negative length": [[[]], [stream(length=-64, nbytes=-64)]],
    "negative size": [[[]], [stream(nbytes=-1, coded=True)]],
    "size of 2^62": [[[]], [stream(nbytes=BIG, coded=True)]],
    "size beyond the length": [[[]], [stream(nbytes=65, coded=True)]],
    "codes that are not all there": [[[]], [stream(nbytes=63)]],
    "width 3": [[[]], [stream(width=3, nbytes=192)]],
    "width 0": [[[]], [stream(width=0, nbytes=0)]],
    "alphabet 0": [[[]], [stream(alphabet=0)]],
    "alphabet beyond the width": [[[]], [stream(alphabet=257)]],
    "alphabet of 2^62": [[[]], [stream(alphabet=BIG, width=2, nbytes=128)]],
    "rows 0": [[[]], [stream(rows=0)]],
    "rows of 2^62": [[[]], [stream(rows=BIG)]],
    "rows that do not divide": [[[]], [stream(rows=3)]],
    "bomb": [[[]], [stream(length=6 * RAW_BYTES, coded=True)]],
    "many small bombs": [[[]], [stream(length=RAW_BYTES, coded=True, nbytes=0)] * 6],
    "more than the body holds": [[[]], [stream(), stream()]],
}


@pytest.mark.parametrize("meta", HOSTILE_META.values(), ids=HOSTILE_META)
def test_hostile_metadata_names_the_region(meta: Any) -> None:
    with pytest.raises(FrameError, match="group 0 plane k layers 0 heads 0-1 tokens 0-16"):
        unpack(meta, bytes(64))


def test_the_hostile_base_case_is_honest() -> None:
    assert unpack([[[]], [stream()]], bytes(64)).blobs[0].numel() == 64


def test_body_with_more_than_the_metadata_says() -> None:
    with pytest.raises(FrameError, match="128 bytes, the metadata describes 64"):
        unpack([[[]], [stream()]], bytes(128))


@pytest.mark.parametrize(("length", "at"), [(5, 5), (5, 15), (17, 40), (17, 63)])
def test_padding_is_checked(length: int, at: int) -> None:
    body = bytearray(64)
    body[at] = 1
    with pytest.raises(FrameError, match="padding set"):
        unpack([[[]], [stream(length=length, nbytes=length)]], body)


def test_a_region_too_large_to_decode() -> None:
    with pytest.raises(FrameError, match="at most 268435456"):
        unpack([[[]], []], raw_bytes=MAX_SEGMENT_BYTES + 1)


def test_hostile_sizes_allocate_nothing() -> None:
    tracemalloc.start()
    for meta in HOSTILE_META.values():
        with pytest.raises(FrameError):
            unpack(meta, bytes(64))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_parse_meta_names_the_place() -> None:
    with pytest.raises(FrameError, match="segment 7"):
        parse_meta(b"\xc1", "segment 7")
