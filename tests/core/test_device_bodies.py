"""Bodies that stay where they were encoded: the same bytes, digests and values as on the host."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvserve_core.bodies import host_bytes, piece_hashes
from kvserve_core.decoder import Decoder
from kvserve_core.errors import FrameError, IntegrityError
from kvserve_core.payload import Unpacked, bodies_on_device, body_bytes, pack
from kvserve_core.pipeline import Pipeline
from kvserve_core.profile import RAW_PIPELINE
from kvserve_core.session.sealing import brought, seal_all
from kvserve_core.spec import DType, KVSpec, LayerGroup, PlanePart, PlaneSpec, Region, whole
from kvserve_core.tensor import Part, _in_place
from kvserve_core.wire import Codebook, Sealed

PLANES = tuple(PlaneSpec(name, 2, (PlanePart(name, 64),), DType.BF16) for name in ("k", "v"))
KV = KVSpec("m", (LayerGroup(0, (0, 1), PLANES),))
UNIFORM = {"quantizer": {"name": "uniform", "configuration": {"levels": 16}}, "codec": "bitpack"}
SPECS = {"raw": RAW_PIPELINE, "uniform": {"planes": {"*": UNIFORM}, "sink_tokens": 4}}


def hashed(bodies: list[Tensor]) -> list[bytes]:
    return [piece_hashes(host_bytes(body)) for body in bodies]


def made(name: str) -> tuple[Pipeline, object, list[tuple[object, Tensor]]]:
    pipeline = Pipeline.build(SPECS[name], KV, whole(KV))
    header, planned = pipeline.header("t", 300, name)
    draw = torch.Generator().manual_seed(1)
    shapes = [(len(p.at.layers), len(p.at.heads), p.at.num_tokens, 64) for p in planned]
    return (
        pipeline,
        header,
        [(p, torch.randn(s, generator=draw).bfloat16()) for p, s in zip(planned, shapes, strict=True)],
    )


@pytest.mark.parametrize("name", SPECS)
def test_bytes_and_digests_are_those_of_the_host(name: str) -> None:
    pipeline, header, data = made(name)
    book = Codebook(header)
    there = pipeline.encode(data, on_device=True)
    assert all(isinstance(s.body, Tensor) for s in there)
    sealed, expected = seal_all(book, there, hashed), [book.seal(s) for s in pipeline.encode(data)]
    assert [(bytes(a.head), bytes(host_bytes(a.body))) for a in sealed] == [
        (bytes(b.head), bytes(b.body)) for b in expected
    ]


@pytest.mark.parametrize("name", SPECS)
def test_they_decode_to_the_same_values(name: str) -> None:
    pipeline, header, data = made(name)
    book, decoder = Codebook(header), Decoder(header, KV)
    sealed = seal_all(book, pipeline.encode(data, on_device=True), hashed)
    arrived = [replace(s, hashes=hashed([s.body])[0]) for s in sealed]
    got = decoder.decode([book.unseal(s) for s in arrived])
    expected = decoder.decode([book.unseal(book.seal(s)) for s in pipeline.encode(data)])
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(got, expected, strict=True))


def test_hashes_of_other_bytes_are_noticed() -> None:
    pipeline, header, data = made("uniform")
    book = Codebook(header)
    sealed = seal_all(book, pipeline.encode(data, on_device=True), hashed)
    wrong = hashed([sealed[1].body])[0]
    with pytest.raises(IntegrityError):
        book.unseal(replace(sealed[0], hashes=wrong))


def test_what_does_not_pay_is_raw_there_too() -> None:
    pipeline, _, data = made("uniform")
    noisy = [(p, torch.full_like(x, float("nan"))) for p, x in data]
    assert {s.chain for s in pipeline.encode(noisy, on_device=True)} == {0}


def test_one_buffer_holds_all_with_zeros_between() -> None:
    a, b = torch.arange(50, dtype=torch.bfloat16), torch.arange(77, dtype=torch.uint8)
    _, body = pack([{"a": a}], [Part(b, 256)], [None])
    first, second, empty = bodies_on_device([[a, b], [b[:0], a, b], []], torch.device("cpu"))
    assert bytes(first.numpy().data) == bytes(second.numpy().data) == bytes(body)
    assert (len(first), len(empty)) == (body_bytes([a, b]), 0)


def test_a_body_that_is_too_short_is_refused() -> None:
    meta, body = pack([], [Part(torch.arange(100, dtype=torch.uint8), 256)], [None])
    at = Region(0, "k", (0,), (0,), 0, 256)
    short = torch.frombuffer(bytearray(body)[:64], dtype=torch.uint8)
    with pytest.raises(FrameError, match="ends at byte"):
        Unpacked(meta, short, 4096, at)


def test_a_sealed_body_that_is_shorter_than_it_says_is_refused() -> None:
    pipeline, header, data = made("raw")
    book = Codebook(header)
    (sealed, *_) = seal_all(book, pipeline.encode(data, on_device=True), hashed)
    cut = Sealed(sealed.index, sealed.head, sealed.body[:64], hashed([sealed.body[:64]])[0])
    with pytest.raises(FrameError, match="lengths"):
        book.unseal(cut)


@pytest.mark.parametrize("name", SPECS)
def test_bodies_hashed_on_the_device_come_to_the_host_unchanged(name: str) -> None:
    pipeline, header, data = made(name)
    book = Codebook(header)
    sealed = brought(seal_all(book, pipeline.encode(data, on_device=True), hashed))
    assert all(isinstance(s.body, memoryview) for s in sealed)
    assert [(bytes(s.head), bytes(s.body)) for s in sealed] == [
        (bytes(s.head), bytes(s.body)) for s in map(book.seal, pipeline.encode(data))
    ]


def test_slices_that_are_a_whole_buffer_are_taken_as_it() -> None:
    room = torch.arange(256, dtype=torch.uint8)
    whole_room = _in_place([room[:64], room[64:256]], [0, 64, 256])
    assert whole_room is not None
    assert (whole_room.data_ptr(), whole_room.numel()) == (room.data_ptr(), 256)


@pytest.mark.parametrize(
    ("cuts", "starts"),
    [
        ([(0, 64), (128, 256)], [0, 64, 192]),  # a gap
        ([(64, 256), (0, 64)], [0, 192, 256]),  # another order
        ([(0, 64), (64, 128)], [0, 64, 128]),  # not all of it
    ],
)
def test_other_slices_are_not(cuts: list[tuple[int, int]], starts: list[int]) -> None:
    room = torch.arange(256, dtype=torch.uint8)
    assert _in_place([room[a:b] for a, b in cuts], starts) is None


def test_tensors_of_their_own_are_no_buffer() -> None:
    assert _in_place([torch.zeros(64, dtype=torch.uint8)], [0, 64]) is None
